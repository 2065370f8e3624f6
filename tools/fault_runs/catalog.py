"""All scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fault_runs import caches
from fault_runs.scenarios import Action, Fault, Point, Scenario

SLOW_S: Final = 120.0
"""Group's timeout where a rank compiles what others have in their cache."""

LONG_S: Final = 240.0

OWN_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""In the launcher's store, restarted ranks find the addresses of those that died, and Gloo cannot
connect: with eager DDP too (torch 2.13)."""

QUICK: Final = {
    "kill-1-backward",
    "stop-0-step-for-20",
    "raise-1-hook",
    "raise-1-disabled-hook-together",
    "corrupt-reports",
    "interrupt-torchrun",
    "starts-and-ends",
}


def _signals() -> Iterator[Scenario]:
    """Ranks that die, stall, or stall for good; rank 0 has the store."""
    points: tuple[Point, ...] = ("step", "compile", "compile-backward", "backward")
    waits: tuple[tuple[Action, str, float | None], ...] = (
        ("kill", "", None),
        ("stop", "-for-5", 5.0),
        ("stop", "-for-20", 20.0),
        ("stop", "-for-ever", None),
    )
    for point in points:
        step = 0 if point.startswith("compile") else 3
        for action, words, wait_s in waits:
            for rank in (0, 1):
                yield Scenario(
                    f"{action}-{rank}-{point}{words}",
                    options=_options_of(point),
                    fault=Fault(action, rank, point, step, wait_s),
                )
    for rank in (0, 1):
        kill = Fault("kill", rank, "backward")
        yield Scenario(f"three-kill-{rank}-backward", ranks=3, fault=kill)
        stop = Fault("stop", rank, "backward", continue_s=20.0)
        yield Scenario(f"three-stop-{rank}-backward-for-20", ranks=3, fault=stop)


def _options_of(point: Point) -> dict[str, object]:
    """A backward starts a compile where compiled autograd traces it."""
    return {"graph": "compiled_autograd"} if point == "compile-backward" else {}


def _exceptions() -> Iterator[Scenario]:
    """The user's exceptions: on one rank or on all, at the end or with training going on."""
    points: tuple[tuple[str, Point, str | None], ...] = (
        ("step", "step", None),
        ("forward", "forward", None),
        ("forward-op", "forward-op", None),
        ("hook", "hook", "traced"),
        ("disabled-hook", "hook", "disabled"),
        ("backward", "backward", None),
        ("compile", "compile", None),
        ("compile-backward", "compile-backward", None),
    )
    for name, point, hook in points:
        step = 0 if point.startswith("compile") else 3
        for who, rank in (("0", 0), ("1", 1), ("all", None)):
            for goes_on in (None, "at once", "together"):
                if goes_on == "at once" and rank == 0:
                    continue
                words = f"-{goes_on.replace(' ', '-')}" if goes_on else ""
                yield Scenario(
                    f"raise-{who}-{name}{words}",
                    options={"hook": hook, "goes_on": goes_on, **_options_of(point)},
                    fault=Fault("raise", rank, point, step),
                )
    for rank in (0, 1):
        yield Scenario(f"skip-{rank}", fault=Fault("skip", rank, "step"))
        yield Scenario(
            f"skip-{rank}-of-several-graphs",
            options={"hook": "disabled"},
            fault=Fault("skip", rank, "step"),
        )


def _caches() -> Iterator[Scenario]:
    """Caches that differ between ranks, that are broken, and that can't be written."""
    cold = {"TORCHINDUCTOR_CACHE_DIR": "{directory}/cold"}
    # What stock Inductor makes of its broken or missing files is no promise of ours.
    torchs: dict[str, object] = {"must_end_right": False, "peers": ("compiled",)}
    no_graphs = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

    def slow(name: str, **values: object) -> Scenario:
        base = {"group_timeout_s": SLOW_S, "limit_s": LONG_S, "must_end_right": True}
        return Scenario(name, **(base | values))  # type: ignore[arg-type]

    for rank in (0, 1):
        yield slow(f"cold-cache-on-{rank}", rank_environment={rank: cold})
        yield slow(f"no-fx-cache-on-{rank}", rank_environment={rank: no_graphs})
    for prepare in (
        caches.corrupt_graphs,
        caches.truncate_graphs,
        caches.corrupt_code,
        caches.corrupt_reports,
        caches.empty_reports,
        caches.foreign_reports,
        caches.remove_reports,
        caches.make_read_only,
        caches.make_full,
        caches.make_small,
    ):
        name = prepare.__name__.replace("_", "-").replace("make-", "cache-")
        if prepare.__name__.endswith("reports"):
            yield slow(name, prepare=prepare)
        else:
            yield slow(name, prepare=prepare, warm=prepare is not caches.make_small, **torchs)
    yield slow("read-only-cold-cache", prepare=caches.make_read_only, warm=False, **torchs)
    yield slow("two-trainings-on-a-cold-cache", warm=False, trainings=2)
    yield slow("two-trainings-on-a-warm-cache", trainings=2)


def _lifetimes() -> Iterator[Scenario]:
    """Launchers, and what is made and dropped."""
    yield Scenario(
        "restart-under-torchrun",
        options={"checkpoint": True},
        fault=Fault("kill", 1, "backward"),
        environment=OWN_STORE,
        launcher="torchrun",
        launcher_options=("--max-restarts=1",),
        limit_s=90.0,
        slack_s=5.0,
        must_end_right=True,
    )
    yield Scenario(
        "interrupt-torchrun",
        options={"steps": 1000, "pause_s": 0.1},
        launcher="torchrun",
        interrupt_step=3,
        slack_s=5.0,
    )
    flat = {"memory_kb": 8192, "objects": 500}
    lasting = {"group_timeout_s": SLOW_S, "limit_s": 500.0, "must_end_right": True}

    def long(name: str, program: str, **options: object) -> Scenario:
        values = {"program": f"fault_runs.lifetimes:{program}", "options": options, **lasting}
        return Scenario(name, **values)  # type: ignore[arg-type]

    yield long("groups-made-again", "remake_groups")
    yield long("modules-made-and-dropped", "make_many", may_grow=flat | {"memory_kb": 32768})
    yield long("thousand-steps", "train_long", may_grow=flat)
    yield long("thousand-steps-of-several-graphs", "train_long", may_grow=flat, hook="disabled")
    yield Scenario("starts-and-ends", options={"steps": 2}, repeats=100, must_end_right=True)


def _marked_quick(scenarios: Iterator[Scenario]) -> Iterator[Scenario]:
    for scenario in scenarios:
        values = {**vars(scenario), "quick": scenario.name in QUICK}
        yield Scenario(**values)


SCENARIOS: Final = [
    scenario
    for group in (_signals, _exceptions, _caches, _lifetimes)
    for scenario in _marked_quick(group())
]
