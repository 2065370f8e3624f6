"""What is run, part by part. Nothing here imports torch: a list of parts must come at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import MODES, Scenario

OPTIONS: Final = ("plain", "scaling-", "reduce-")
"""How features begin that are about the options of the flag: in all dtypes, on one rank and two."""

LOOPS: Final = (
    "backward-inside",
    "eager-forward",
    "no-sync",
    "no-sync-inside",
    "kept-gradients",
    "added-gradients",
    "several-backwards",
    "retain-graph",
    "graph-break",
    "checkpointing",
    "autocast",
    "autocast-inside",
    "grad-scaler",
    "grad-scaler-inf",
    "grad-scaler-autocast",
    "two-dtypes",
    "optimizer-fused",
    "optimizer-foreach",
    "optimizer-foreach-inside",
    "optimizer-compiled",
    "reduce-overhead",
    "layouts",
    "batch-norm",
    "static-graph",
    "bucket-view",
    "hook-bf16",
)
"""Features that depend on the device, or that trainers' loops are made of: on one rank."""

LOOPS_ON_TWO: Final = (
    "backward-inside",
    "no-sync",
    "kept-gradients",
    "autocast",
    "grad-scaler-inf",
    "optimizer-foreach",
    "batch-norm",
)
"""Those of them that more than one rank can break."""

ROUGH_EPS: Final = 2.0**10
"""For what rounds on a GPU: convolutions, for which cuDNN chooses a method by itself. What is not
averaged, or overwritten too early, is wrong by some 2 ** 20 eps of fp32."""

CONVOLVED: Final = ("layouts", "batch-norm")

FEATURE_PARTS: Final = {"concat": 3, "coalesced": 2}
"""Over how many parts of two ranks the features of DDP are dealt: those that each check trains."""

FAILING_LAST: Final = ("failing", "in-parts-failing")
"""Features with errors: what one leaves behind must not stop others."""

LATE_ON_A_GPU: Final = ("update-group-after-error",)
"""A collective over Gloo that waits too long raises an error; NCCL takes down the process."""


@dataclass(frozen=True)
class Check:
    """One training beside eager DDP.

    Attributes:
        scenario: what is trained.
        dtype: of its gradients.
        flag: fields of ``FusionConfig``.
        needs_cuda: whether the CPU cannot do it.
        also_right: outcomes that are right beside ``"equal"``.
    """

    scenario: Scenario
    dtype: str
    flag: Mapping[str, Any]
    needs_cuda: bool = False
    also_right: tuple[str, ...] = ()

    @classmethod
    def of(cls, scenario: Scenario, mode: str, dtype: str, **options: Any) -> Check:
        """An entry of the catalogue, in a mode."""
        flag = {"mode": mode, **dict(scenario.options)}
        return cls(scenario, dtype, flag, **{"also_right": (scenario.becomes,), **options})

    @property
    def title(self) -> str:
        """The name of its row, which both modes and all numbers of ranks share."""
        return f"{self.scenario.feature}, {self.dtype}"


@dataclass(frozen=True)
class Part:
    """What runs in a process of its own, and has a result of its own.

    Attributes:
        name: for ``--only``.
        measure: ``module:function``; it takes a :class:`gpu_checks.sites.Site` and a function that
            notes a row. Empty: its checks are trained.
        ranks: that reduce together.
        checks: trainings beside eager DDP.
        limit_s: at most.
        least_s: with less time left, it is not begun.
    """

    name: str
    measure: str = ""
    ranks: int = 1
    checks: tuple[Check, ...] = field(default=())
    limit_s: float = 200.0
    least_s: float = 20.0

    @property
    def mode(self) -> str:
        """Of its checks."""
        return str(self.checks[0].flag["mode"]) if self.checks else ""

    def checks_on(self, device: str) -> tuple[Check, ...]:
        """Those that a kind of device can do."""
        return tuple(check for check in self.checks if device == "cuda" or not check.needs_cuda)


def _trained(what: str, mode: str, ranks: int, checks: Iterable[Check], **limits: Any) -> Part:
    name = f"{what}-{mode}" if ranks == 1 else f"{what}-{mode}-{ranks}"
    return Part(name, ranks=ranks, checks=tuple(checks), **limits)


def _in_dtypes(mode: str, ranks: int, features: Iterable[Scenario]) -> Iterator[Check]:
    for scenario in features:
        made = replace(scenario, ranks=ranks)
        if scenario.feature in CONVOLVED:
            # On a GPU, BatchNorm's compiled kernels round otherwise in each run, with DDP or not.
            made = replace(made, tolerance_eps=ROUGH_EPS)
        if mode in scenario.modes:
            yield from (Check.of(made, mode, dtype) for dtype in scenario.dtypes)


def _options(mode: str, ranks: int) -> Part:
    chosen = [scenario for scenario in ON_TWO.values() if scenario.feature.startswith(OPTIONS)]
    return _trained("options", mode, ranks, _in_dtypes(mode, ranks, chosen))


def _loops(mode: str, ranks: int) -> Part:
    chosen = [ON_TWO[feature] for feature in (LOOPS if ranks == 1 else LOOPS_ON_TWO)]
    target = "gpu_checks.targets:synced_batch_norm"
    synced = Scenario("gpu", "sync-batch-norm", target, ranks, tolerance_eps=ROUGH_EPS)
    # Its collectives break the graph, and what is then left unfused is warned of.
    check = Check.of(synced, mode, "fp32", needs_cuda=True, also_right=("equal, unfused",))
    return _trained("loops", mode, ranks, [*_in_dtypes(mode, ranks, chosen), check])


def _features(mode: str, number: int) -> Part:
    """One of the parts that have all features of DDP together, in the mode that a check has."""
    elsewhere = {*LOOPS_ON_TWO, *LATE_ON_A_GPU}
    chosen = [
        scenario
        for scenario in ON_TWO.values()
        if scenario.tested[:1] == (mode,) and scenario.feature not in elsewhere
        # A GPU can have any torch.
        if not scenario.feature.startswith(OPTIONS) and not scenario.fails_on_oldest
    ]
    chosen.sort(key=lambda scenario: scenario.feature in FAILING_LAST)
    dealt = chosen[number :: FEATURE_PARTS[mode]]
    checks = [Check.of(scenario, mode, scenario.dtypes[0]) for scenario in dealt]
    return _trained(f"features-{number + 1}", mode, 2, checks, limit_s=240)


def _measured() -> Part:
    """Buckets chosen by what is measured: the network, and then the steps."""
    target = "gpu_checks.targets:measured"
    scenario = Scenario("gpu", "measured", target, 2)
    return Part("auto-2", ranks=2, checks=(Check.of(scenario, "auto", "fp32"),))


ON_TWO: Final = {
    scenario.feature: scenario for scenario in SCENARIOS if scenario.parallelism == "ddp-2"
}

PROBE: Final = Part("nccl-on-one-gpu", "gpu_checks.net:add_up", ranks=2, limit_s=35)
"""Whether NCCL takes two ranks on one GPU."""

PARTS: Final = (
    Part("norms", "gpu_checks.norms:measure", limit_s=110),
    Part("net-gpt2", "gpu_checks.net:gpt2", ranks=2, limit_s=230, least_s=90),
    # Short ones first: on an H200 what is before them took 270 s, and not all starts end in 85.
    # Nothing is sent: what registering the buckets' memory costs, and no gain.
    Part("registered", "gpu_checks.one_rank:registered", limit_s=60),
    Part("graphs", "gpu_checks.one_rank:graphs", limit_s=70),
    Part("copies", "gpu_checks.copies:measure", limit_s=60),
    Part("starts", "gpu_checks.starts:measure", limit_s=120),
    Part("net-resnet", "gpu_checks.net:resnet", ranks=2, limit_s=170, least_s=90),
    *(_options(mode, 1) for mode in MODES),
    *(_loops(mode, 1) for mode in MODES),
    *(_options(mode, 2) for mode in MODES),
    *(_loops(mode, 2) for mode in MODES),
    _measured(),
    *(_features(mode, number) for mode in MODES for number in range(FEATURE_PARTS[mode])),
)
"""In the order in which they matter, should time run out."""
