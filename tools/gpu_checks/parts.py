"""The parts of the check. Nothing here imports torch, so that listing parts is fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import MODES, Scenario

OPTIONS: Final = ("plain", "scaling-", "reduce-")
"""Prefixes of features that test options of the flag: in all dtypes, on one rank and on two."""

LOOPS: Final = (
    *("backward-inside", "eager-forward", "no-sync", "no-sync-inside"),
    *("kept-gradients", "added-gradients", "several-backwards", "retain-graph"),
    *("graph-break", "checkpointing", "reduce-overhead", "layouts", "batch-norm"),
    *("autocast", "autocast-inside", "two-dtypes"),
    *("grad-scaler", "grad-scaler-inf", "grad-scaler-autocast"),
    *("optimizer-fused", "optimizer-foreach", "optimizer-foreach-inside", "optimizer-compiled"),
    *("static-graph", "bucket-view", "hook-bf16"),
)
"""Features that depend on the device, or that trainers' loops consist of: on one rank."""

LOOPS_ON_TWO: Final = (
    *("backward-inside", "no-sync", "kept-gradients", "batch-norm"),
    *("autocast", "grad-scaler-inf", "optimizer-foreach"),
)
"""Features that can fail only on more than one rank."""

REGISTERED: Final = (
    *("plain", "no-sync", "kept-gradients", "added-gradients", "several-backwards", "static-graph"),
)
"""Features that are also trained in buckets that NCCL has registered: gradients of one round exist
in the next one."""

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
"""2 ** -10 of a gradient's largest element in fp32, 2 ** -5 if anything is rounded to 16 bits; the
error of a gradient that is not written is far larger."""

NORM_PARTS: Final = 3
"""Number of parts that they are distributed over: each compiles on one core."""

ROUGH_EPS: Final = 2.0**10
"""Tolerance of models that round on a GPU: convolutions, for which cuDNN chooses an algorithm. The
error of a gradient that is not averaged, or is overwritten too early, is some 2 ** 20 eps of
fp32."""

CONVOLVED: Final = ("layouts", "batch-norm")

FEATURE_PARTS: Final = {"concat": 3, "coalesced": 2}
"""Number of parts with two ranks that the features of DDP are distributed over: those that each
check trains."""

FAILING_LAST: Final = ("failing", "in-parts-failing")
"""Features with errors: a leftover of one must not stop others."""

LATE_ON_A_GPU: Final = ("update-group-after-error",)
"""A collective over Gloo that waits too long raises an error; NCCL kills the process."""


@dataclass(frozen=True)
class Check:
    """A training that is compared with eager DDP.

    Attributes:
        scenario: the training.
        mode: mode of ``FusionConfig``.
        dtype: dtype of its gradients.
        needs_cuda: whether the CPU cannot run it.
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
    """A part of the check with its own process and its own result.

    Attributes:
        name: name for ``--only``.
        measure: ``module:function`` with the arguments :class:`gpu_checks.sites.Site` and a
            function that records a row. If empty, the part's checks are trained.
        ranks: number of ranks that reduce together.
        checks: trainings that are compared with eager DDP.
        limit_s: time limit.
        least_s: the part is not started if less time is left.
    """

    name: str
    measure: str = ""
    ranks: int = 1
    checks: tuple[Check, ...] = field(default=())
    limit_s: float = 200.0
    least_s: float = 20.0

    @property
    def mode(self) -> str:
        """The mode of its checks."""
        return self.checks[0].mode if self.checks else ""

    def checks_on(self, device: str) -> tuple[Check, ...]:
        """The checks that a kind of device can run."""
        return tuple(check for check in self.checks if device == "cuda" or not check.needs_cuda)


def _trained(what: str, mode: str, ranks: int, checks: Iterable[Check], **limits: Any) -> Part:
    name = f"{what}-{mode}" if ranks == 1 else f"{what}-{mode}-{ranks}"
    return Part(name, ranks=ranks, checks=tuple(checks), **limits)


def _dealt(
    what: str, mode: str, ranks: int, checks: Sequence[Check], parts: int, **limits: Any
) -> Iterator[Part]:
    """Parts that divide some checks among them."""
    for number in range(parts):
        yield _trained(f"{what}-{number + 1}", mode, ranks, checks[number::parts], **limits)


def _in_dtypes(mode: str, ranks: int, features: Iterable[Scenario]) -> Iterator[Check]:
    for scenario in features:
        made = replace(scenario, ranks=ranks)
        if scenario.feature in CONVOLVED:
            # On a GPU, BatchNorm's compiled kernels round differently in each run, with DDP or not.
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
    """One rank sends nothing, but NCCL registers memory nevertheless."""
    options = (("memory", "registered"),)
    chosen = [replace(ON_TWO[feature], options=options) for feature in REGISTERED]
    checks = [check for check in _in_dtypes("concat", 1, chosen) if check.dtype == "fp32"]
    return Part("registered", checks=tuple(checks))


THIRDS_EPS: Final = 2.0**10
"""Tolerance in eps of fp32, for a mean of 2 ** 16 averages of bf16. Rounding leaves less than a
tenth of it there, and NCCL's own averages are off by 2 ** 14 eps (tests/tools/test_gpu.py)."""


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
    # Its collectives break the graph, and a warning says what is then left unfused.
    options: dict[str, Any] = {"tolerance_eps": ROUGH_EPS, "becomes": "equal, unfused"}
    check = Check(Scenario("gpu", "sync-batch-norm", target, ranks, **options), mode, "fp32", True)
    return _trained("loops", mode, ranks, [*_in_dtypes(mode, ranks, chosen), check])


def _features(mode: str) -> Iterator[Part]:
    """All features of DDP, in the mode that a check uses."""
    elsewhere = {*LOOPS_ON_TWO, *LATE_ON_A_GPU}
    chosen = [
        scenario
        for scenario in ON_TWO.values()
        if scenario.tested[:1] == (mode,) and scenario.feature not in elsewhere
        # A GPU machine can have any torch.
        if not scenario.feature.startswith(OPTIONS) and not scenario.fails_on_oldest
    ]
    chosen.sort(key=lambda scenario: scenario.feature in FAILING_LAST)
    checks = [Check(scenario, mode, scenario.dtypes[0]) for scenario in chosen]
    yield from _dealt("features", mode, 2, checks, FEATURE_PARTS[mode], limit_s=240)


def _measured() -> Part:
    """Buckets that are chosen from measurements: of the network, and then of the steps."""
    target = "gpu_checks.targets:measured"
    scenario = Scenario("gpu", "measured", target, 2)
    return Part("auto-2", ranks=2, checks=(Check(scenario, "auto", "fp32"),))


ON_TWO: Final = {
    scenario.feature: scenario for scenario in SCENARIOS if scenario.parallelism == "ddp-2"
}

PROBE: Final = Part("nccl-on-one-gpu", "gpu_checks.net:probe", ranks=2, limit_s=35)
"""Checks whether NCCL accepts two ranks on one GPU."""

PARTS: Final = (
    *(part for mode in MODES for part in _norms(mode)),
    Part("net-gpt2", "gpu_checks.net:gpt2", ranks=2, limit_s=230, least_s=90),
    # Short ones first: on an H200, the parts before them took 270 s, and not all starts end in 85.
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
"""In order of importance, in case time runs out."""
