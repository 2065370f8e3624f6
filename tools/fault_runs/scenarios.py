"""The scenarios. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

Way = Literal["eager", "compiled", "concat", "coalesced", "sharded"]
"""Eager DDP and stock ``torch.compile(ddp)``, which are the peers, a mode of the flag, or
``"concat"`` with the option ``shard_optimizer``."""

PEERS: tuple[Way, ...] = ("eager", "compiled")
MODES: tuple[Way, ...] = ("concat", "coalesced")

Action = Literal["kill", "stop", "raise", "skip"]

Point = Literal[
    "step",
    "forward",
    "forward-op",
    "hook",
    "backward",
    "compile",
    "compile-backward",
    "after-backward",
    "update",
    "after-update",
    "send",
]
"""Points of a training at which a fault can happen: see :mod:`fault_runs.training`."""


@dataclass(frozen=True)
class Fault:
    """A fault of a rank.

    Attributes:
        action: kill -9, SIGSTOP, a user's exception, or a skipped step.
        rank: number of the rank; ``None`` for all ranks.
        point: point in the training.
        step: number of the step.
        continue_s: seconds after which a stopped rank continues; ``None``: never.
    """

    action: Action
    rank: int | None
    point: Point
    step: int = 3
    continue_s: float | None = None

    def hits(self, rank: int, point: str, step: int) -> bool:
        return (self.rank is None or self.rank == rank) and (self.point, self.step) == (point, step)


@dataclass(frozen=True)
class Scenario:
    """A program with a fault, and its limits.

    Attributes:
        name: name to select it by.
        program: ``module:function``, called with a :class:`fault_runs.rank.Run` on each rank.
        options: options that the program reads from its run.
        fault: fault that the program injects.
        ranks: number of processes.
        group_timeout_s: timeout of the process group, in seconds.
        limit_s: seconds from the fault (or the start, if there is none) until a rank counts as
            hung.
        slack_s: how much later than the latest peer an error may be, in seconds.
        environment: environment variables of all ranks.
        rank_environment: environment variables of single ranks.
        prepare: called with the directory of Inductor's cache, filled by a run without a fault.
        warm: whether the cache is filled before.
        trainings: number of trainings that run at the same time, on one cache.
        launcher: ``"torchrun"`` restarts ranks once.
        interrupt_step: step of any rank at which the launcher and all ranks get SIGINT.
        must_end_right: whether an error is a violation even if the peers end with one.
        may_grow: how much more than the peers a value that must stay flat may grow, by name.
        peers: the ways that it is compared with.
        said: text that must be in an error of a rank, by rank.
        may_miss: number of steps that a rank may finish less than a peer.
    """

    name: str
    program: str = "fault_runs.training:train"
    options: Mapping[str, object] = field(default_factory=dict)
    fault: Fault | None = None
    ranks: int = 2
    group_timeout_s: float = 10.0
    limit_s: float = 60.0
    slack_s: float = 2.0
    environment: Mapping[str, str] = field(default_factory=dict)
    rank_environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    warm: bool = True
    trainings: int = 1
    launcher: Literal["python", "torchrun"] = "python"
    interrupt_step: int | None = None
    must_end_right: bool = False
    may_grow: Mapping[str, float] = field(default_factory=dict)
    peers: Sequence[Way] = PEERS
    said: Mapping[int, str] = field(default_factory=dict)
    may_miss: int = 0


SLOW_S: Final = 120.0
"""Timeout of a group in which a rank compiles what others have in their cache, in seconds."""

LONG_S: Final = 240.0

OWN_STORE: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Restarted ranks find the addresses of dead ranks in the launcher's store, and Gloo cannot
connect: with eager DDP too (torch 2.13)."""

_ONLY_STEPS: Final[Mapping[Point, int]] = MappingProxyType({"compile": 0, "compile-backward": 1})
"""The only step in which a point is reached, for points that not every step reaches: a module's
first backward is not traced."""


def _signals() -> Iterator[Scenario]:
    """Ranks that die, stall for a time, or stall for good; rank 0 has the store."""
    points: tuple[Point, ...] = ("step", "compile", "compile-backward", "backward")
    waits: tuple[tuple[Action, str, float | None], ...] = (
        ("kill", "", None),
        ("stop", "-for-5", 5.0),
        ("stop", "-for-20", 20.0),
        ("stop", "-for-ever", None),
    )
    for point in points:
        step = _ONLY_STEPS.get(point, 3)
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
    """Options of a point: a backward starts a compile if compiled autograd traces it."""
    return {"graph": "compiled_autograd"} if point == "compile-backward" else {}


def _exceptions() -> Iterator[Scenario]:
    """Exceptions that a user's code raises on one rank or on all, and that it catches or not."""
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
        step = _ONLY_STEPS.get(point, 3)
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


_ENDING: Final[tuple[Action, ...]] = ("kill", "raise")
_FAILED_STEP: Final = "an optimizer step has failed on this rank"


def _sharded() -> Iterator[Scenario]:
    """Faults with a sharded optimizer, around its step and in the messages that follow. Without
    this option, other ranks notice a fault after the backward in their next step alone."""
    points: tuple[Point, ...] = ("backward", "after-backward", "update", "after-update", "send")
    for point in points:
        for rank in (0, 1):
            for action in _ENDING:
                fault = Fault(action, rank, point)
                yield Scenario(f"sharded-{action}-{rank}-{point}", fault=fault, may_miss=1)
    for point in ("backward", "send"):
        fault = Fault("stop", 1, point, continue_s=20.0)
        yield Scenario(f"sharded-stop-1-{point}-for-20", fault=fault, may_miss=1)
    for point in ("update", "send"):
        for action in _ENDING:
            fault = Fault(action, 1, point)
            name = f"sharded-three-{action}-1-{point}"
            yield Scenario(name, ranks=3, fault=fault, may_miss=1)
    # A rank that catches its error and goes on: after one in its backward, with the next batch, as
    # without this option; after a later one, others would not notice without this option.
    for point, said in (
        ("backward", {0: "the user's own error"}),
        ("after-backward", {}),
        ("update", {0: _FAILED_STEP, 1: _FAILED_STEP}),
        ("after-update", {0: _FAILED_STEP, 1: _FAILED_STEP}),
        ("send", {0: "the user's own error", 1: _FAILED_STEP}),
    ):
        for goes_on in ("at once", "together"):
            is_told = point == "send" or (goes_on == "together") == (point == "backward")
            yield Scenario(
                f"sharded-raise-1-{point}-{goes_on.replace(' ', '-')}",
                options={"goes_on": goes_on},
                fault=Fault("raise", 1, point),
                said=said if is_told else {},
                peers=(),
            )
    for point in ("backward", "after-backward"):
        yield Scenario(
            f"sharded-raise-all-{point}-together",
            options={"goes_on": "together"},
            fault=Fault("raise", None, point),
        )
    yield from _long("sharded-")


def _caches() -> Iterator[Scenario]:
    """Compiler caches that differ between ranks, are broken, or are shared by several trainings."""
    cold = {"TORCHINDUCTOR_CACHE_DIR": "{directory}/cold"}
    no_graphs = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

    def slow(name: str, **values: object) -> Scenario:
        base = {"group_timeout_s": SLOW_S, "limit_s": LONG_S, "must_end_right": True}
        return Scenario(name, **(base | values))  # type: ignore[arg-type]

    for rank in (0, 1):
        yield slow(f"cold-cache-on-{rank}", rank_environment={rank: cold})
        yield slow(f"no-fx-cache-on-{rank}", rank_environment={rank: no_graphs})
    for name, prepare in BROKEN_CACHES.items():
        # We make no promise about stock Inductor with broken files.
        yield slow(name, prepare=prepare, must_end_right=False, peers=("compiled",))
    yield slow("two-trainings-on-a-cold-cache", warm=False, trainings=2)
    yield slow("two-trainings-on-a-warm-cache", trainings=2)


def _rewrite_graphs(change: Callable[[bytes], bytes], cache: Path) -> None:
    for folder in ("fxgraph", "aotautograd"):
        for path in (cache / folder).rglob("*"):
            if path.is_file():
                path.write_bytes(change(path.read_bytes()))


def _empty_code(cache: Path) -> None:
    """Empty the generated code that the cached graphs name."""
    for path in cache.rglob("*.py"):
        path.write_bytes(b"")


BROKEN_CACHES: Final[Mapping[str, Callable[[Path], None]]] = MappingProxyType(
    {
        "corrupt-graphs": partial(_rewrite_graphs, lambda _: b"\x80\xffnot what was written here"),
        # As after a full disk or a crash.
        "truncate-graphs": partial(_rewrite_graphs, lambda data: data[: len(data) // 2]),
        "corrupt-code": _empty_code,
    }
)
"""Functions that break Inductor's files, by scenario name."""


FLAT: Final[Mapping[str, float]] = MappingProxyType({"memory_kb": 8192, "objects": 500})
"""How much more than the peers the values of a long run may grow."""


def _lasting(name: str, program: str, **values: object) -> Scenario:
    values |= {"program": f"fault_runs.training:{program}", "must_end_right": True}
    values |= {"group_timeout_s": SLOW_S, "limit_s": 500.0}
    return Scenario(name, **values)  # type: ignore[arg-type]


def _long(prefix: str) -> Iterator[Scenario]:
    """Programs that take long, and must leave nothing behind."""
    yield _lasting(f"{prefix}groups-made-again", "remake_groups")
    made = {**FLAT, "memory_kb": 32768}
    yield _lasting(f"{prefix}modules-made-and-dropped", "make_many", may_grow=made)
    yield _lasting(f"{prefix}thousand-steps", "train_long", may_grow=FLAT)


def _lifetimes() -> Iterator[Scenario]:
    """Trainings under torchrun, long ones, and ones that create groups or modules repeatedly."""
    yield Scenario(
        "restart-under-torchrun",
        options={"checkpoint": True},
        fault=Fault("kill", 1, "backward"),
        environment=OWN_STORE,
        launcher="torchrun",
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
    yield from _long("")
    of_several = {"options": {"hook": "disabled"}, "may_grow": FLAT}
    yield _lasting("thousand-steps-of-several-graphs", "train_long", **of_several)
    for number in range(100):
        name = f"starts-and-ends-{number}"
        yield Scenario(name, options={"steps": 2}, must_end_right=True)


SCENARIOS: Final = [*_signals(), *_exceptions(), *_caches(), *_lifetimes()]
"""For all modes of the flag."""

SHARDED: Final = list(_sharded())
"""For ``"sharded"``."""
