"""What is run, part by part. Nothing here imports torch: a list of parts must come at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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

REGISTERED: Final = (
    *("plain", "no-sync", "kept-gradients", "added-gradients", "several-backwards", "static-graph"),
)
"""Features that are also trained in buckets that NCCL has registered: in which gradients of one
round are there in the next."""

NORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "layer_norm": {"place": "between", "norm": "layer_norm"},
    "rms_norm": {"place": "between", "norm": "rms_norm"},
    "RMSNorm by hand": {"place": "between", "norm": "by hand"},
    "post-LN block": {"place": "post", "norm": "layer_norm"},
    "pre-LN block": {"place": "pre", "norm": "layer_norm"},
    "layer_norm, autocast": {"place": "between", "norm": "layer_norm", "autocasts": True},
    "pre-LN block, autocast": {"place": "pre", "norm": "layer_norm", "autocasts": True},
}
"""Arguments of :func:`gpu_checks.targets.norms`."""

NORM_EPS: Final = {"fp32": 2.0**13, "bf16": 2.0**2, "fp16": 2.0**5, "autocast": 2.0**18}
"""2 ** -10 of a gradient's largest element in fp32, 2 ** -5 where anything is rounded to 16 bits; a
gradient that is not written is wrong by far more."""

NORM_PARTS: Final = 3
"""Over how many parts they are dealt: each compiles on a core."""

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
        mode: of ``FusionConfig``.
        dtype: of its gradients.
        needs_cuda: whether the CPU cannot do it.
    """

    scenario: Scenario
    mode: str
    dtype: str
    needs_cuda: bool = False

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
        return self.checks[0].mode if self.checks else ""

    def checks_on(self, device: str) -> tuple[Check, ...]:
        """Those that a kind of device can do."""
        return tuple(check for check in self.checks if device == "cuda" or not check.needs_cuda)


def _trained(what: str, mode: str, ranks: int, checks: Iterable[Check], **limits: Any) -> Part:
    name = f"{what}-{mode}" if ranks == 1 else f"{what}-{mode}-{ranks}"
    return Part(name, ranks=ranks, checks=tuple(checks), **limits)


def _dealt(
    what: str, mode: str, ranks: int, checks: Sequence[Check], parts: int, **limits: Any
) -> Iterator[Part]:
    """Parts that have some checks together."""
    for number in range(parts):
        yield _trained(f"{what}-{number + 1}", mode, ranks, checks[number::parts], **limits)


def _in_dtypes(mode: str, ranks: int, features: Iterable[Scenario]) -> Iterator[Check]:
    for scenario in features:
        made = replace(scenario, ranks=ranks)
        if scenario.feature in CONVOLVED:
            # On a GPU, BatchNorm's compiled kernels round otherwise in each run, with DDP or not.
            made = replace(made, tolerance_eps=ROUGH_EPS)
        if mode in scenario.modes:
            yield from (Check(made, mode, dtype) for dtype in scenario.dtypes)


def _norms(mode: str) -> Iterator[Part]:
    checks = []
    for name, arguments in NORMS.items():
        autocasts = "autocasts" in arguments
        for dtype in ("fp32",) if autocasts else ("fp32", "bf16", "fp16"):
            scenario = Scenario(
                "gpu",
                name,
                "gpu_checks.targets:norms",
                ranks=1,
                tolerance_eps=NORM_EPS["autocast" if autocasts else dtype],
                arguments=tuple(arguments.items()),
            )
            checks.append(Check(scenario, mode, dtype, needs_cuda=name != "layer_norm"))
    yield from _dealt("norms", mode, 1, checks, NORM_PARTS)


def _registered() -> Part:
    """Nothing is sent on one rank; NCCL registers memory all the same."""
    options = (("memory", "registered"),)
    chosen = [replace(ON_TWO[feature], options=options) for feature in REGISTERED]
    checks = [check for check in _in_dtypes("concat", 1, chosen) if check.dtype == "fp32"]
    return Part("registered", checks=tuple(checks))


THIRDS_EPS: Final = 2.0**10
"""Of fp32, in a mean of 2 ** 16 averages of bf16. Rounding leaves less than a tenth of it there,
and NCCL's own averages are off by 2 ** 14 eps (tests/tools/test_gpu.py)."""


def _thirds() -> Part:
    """Means of averages of bf16 over three ranks."""
    scenario = Scenario("gpu", "thirds", "gpu_checks.targets:thirds", 3, tolerance_eps=THIRDS_EPS)
    return _trained("thirds", "concat", 3, [Check(scenario, "concat", "bf16")])


def _options(mode: str, ranks: int) -> Part:
    chosen = [scenario for scenario in ON_TWO.values() if scenario.feature.startswith(OPTIONS)]
    return _trained("options", mode, ranks, _in_dtypes(mode, ranks, chosen))


def _loops(mode: str, ranks: int) -> Part:
    chosen = [ON_TWO[feature] for feature in (LOOPS if ranks == 1 else LOOPS_ON_TWO)]
    target = "gpu_checks.targets:synced_batch_norm"
    # Its collectives break the graph, and what is then left unfused is warned of.
    options: dict[str, Any] = {"tolerance_eps": ROUGH_EPS, "becomes": "equal, unfused"}
    check = Check(Scenario("gpu", "sync-batch-norm", target, ranks, **options), mode, "fp32", True)
    return _trained("loops", mode, ranks, [*_in_dtypes(mode, ranks, chosen), check])


def _features(mode: str) -> Iterator[Part]:
    """All features of DDP, in the mode that a check has."""
    elsewhere = {*LOOPS_ON_TWO, *LATE_ON_A_GPU}
    chosen = [
        scenario
        for scenario in ON_TWO.values()
        if scenario.tested[:1] == (mode,) and scenario.feature not in elsewhere
        # A GPU can have any torch.
        if not scenario.feature.startswith(OPTIONS) and not scenario.fails_on_oldest
    ]
    chosen.sort(key=lambda scenario: scenario.feature in FAILING_LAST)
    checks = [Check(scenario, mode, scenario.dtypes[0]) for scenario in chosen]
    yield from _dealt("features", mode, 2, checks, FEATURE_PARTS[mode], limit_s=240)


def _measured() -> Part:
    """Buckets chosen by what is measured: the network, and then the steps."""
    target = "gpu_checks.targets:measured"
    scenario = Scenario("gpu", "measured", target, 2)
    return Part("auto-2", ranks=2, checks=(Check(scenario, "auto", "fp32"),))


ON_TWO: Final = {
    scenario.feature: scenario for scenario in SCENARIOS if scenario.parallelism == "ddp-2"
}

PROBE: Final = Part("nccl-on-one-gpu", "gpu_checks.net:probe", ranks=2, limit_s=35)
"""Whether NCCL takes two ranks on one GPU."""

PARTS: Final = (
    *(part for mode in MODES for part in _norms(mode)),
    Part("net-gpt2", "gpu_checks.net:gpt2", ranks=2, limit_s=230, least_s=90),
    # Short ones first: on an H200 what is before them took 270 s, and not all starts end in 85.
    Part("graphs", "gpu_checks.graphs:measure", limit_s=70),
    Part("copies", "gpu_checks.copies:measure", limit_s=60),
    Part("starts", "gpu_checks.starts:measure", limit_s=120),
    Part("net-resnet", "gpu_checks.net:resnet", ranks=2, limit_s=170, least_s=90),
    _registered(),
    *(_options(mode, 1) for mode in MODES),
    *(_loops(mode, 1) for mode in MODES),
    *(_options(mode, 2) for mode in MODES),
    _thirds(),
    *(_loops(mode, 2) for mode in MODES),
    _measured(),
    *(part for mode in MODES for part in _features(mode)),
)
"""In the order in which they matter, should time run out."""
