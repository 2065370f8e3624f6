"""What is run, part by part. Nothing here imports torch: a list of parts must come at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import MODES, Scenario

TARGETS: Final = "gpu_checks.targets"

Group = Literal["norms", "steps", "starts", "graphs", "copies", "correctness", "trainers", "probe"]
"""Which section of the page a part belongs to."""

SCALINGS: Final = ("auto", "collective", "bucket")
DTYPES: Final = ("fp32", "bf16", "fp16")
REDUCE_DTYPES: Final = ("bf16", "fp16")

LOOPS: Final = (
    "backward-inside",
    "eager-forward",
    "no-sync",
    "no-sync-inside",
    "kept-gradients",
    "added-gradients",
    "several-backwards",
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
    "layouts",
    "batch-norm",
    "static-graph",
    "bucket-view",
    "hook-bf16",
)
"""Features of the catalogue that depend on the device, or that trainers' loops are made of."""

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
"""For what rounds on a GPU: softmax and tanh, and convolutions, for which cuDNN chooses a method by
itself. A saved tensor that was overwritten too early is wrong by some 2 ** 20 eps of fp32."""

ROUGH_EPS_OF_BF16: Final = 2.0**5
"""The same for bf16, whose eps is 2 ** 16 times as large."""

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
        also_right: kinds of :class:`testing.scenarios.outcomes.Outcome` that are right beside
            ``"equal"``.
    """

    scenario: Scenario
    dtype: str
    flag: Mapping[str, Any]
    needs_cuda: bool = False
    also_right: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name of its row, which both modes and all numbers of ranks share."""
        options = [f"`{name}={value!r}`" for name, value in self.flag.items() if name != "mode"]
        return ", ".join([self.scenario.title, self.dtype, *options])


@dataclass(frozen=True)
class Part:
    """What runs in processes of its own, and has a result of its own.

    Attributes:
        name: for ``--only``.
        group: which section it belongs to.
        ranks: processes.
        checks: trainings beside eager DDP.
        measure: instead of those, ``module:function``; it takes a :class:`gpu_checks.sites.Site`
            and a function that notes a row.
        limit_s: at most.
        least_s: with less time left, it is not begun.
        has_group: whether the processes join a process group.
        starts_pairs: whether its process starts two ranks at a time.
    """

    name: str
    group: Group
    ranks: int = 1
    checks: tuple[Check, ...] = field(default=())
    measure: str = ""
    limit_s: float = 150.0
    least_s: float = 20.0
    has_group: bool = True
    starts_pairs: bool = False

    @property
    def joined(self) -> int:
        """Ranks that reduce together."""
        return 2 if self.starts_pairs else self.ranks

    @property
    def mode(self) -> str:
        """Of its checks."""
        return str(self.checks[0].flag["mode"]) if self.checks else ""

    def checks_on(self, device: str) -> tuple[Check, ...]:
        """Those that a kind of device can do."""
        return tuple(check for check in self.checks if device == "cuda" or not check.needs_cuda)


def _options(mode: str, ranks: int) -> Part:
    scalings = [name for name in SCALINGS if (mode, name) != ("coalesced", "bucket")]
    plain = Scenario("gpu", "plain", "as it is", "testing.scenarios.features.loops:plain", ranks)
    checks = [
        Check(plain, dtype, {"mode": mode, "scaling": scaling})
        for dtype in DTYPES
        for scaling in scalings
    ]
    for sent in REDUCE_DTYPES:
        hooked = replace(plain, title="as eager DDP's hook", target=f"{TARGETS}:sent_in_{sent}")
        checks += [
            Check(hooked, "fp32", {"mode": mode, "scaling": scaling, "reduce_dtype": sent})
            for scaling in scalings
        ]
    return Part(_name("options", mode, ranks), "correctness", ranks, tuple(checks), limit_s=200)


def _loops(mode: str, ranks: int, features: Iterable[str]) -> Part:
    known = {scenario.feature: scenario for scenario in SCENARIOS if scenario.ranks == 2}
    checks = []
    for feature in features:
        scenario = replace(known[feature], ranks=ranks)
        if feature in CONVOLVED:
            # On a GPU, BatchNorm's compiled kernels round otherwise in each run, with DDP or not.
            scenario = replace(scenario, tolerance_eps=ROUGH_EPS, by_hand=False)
        checks += [Check(scenario, dtype, {"mode": mode}) for dtype in scenario.dtypes]
    synced = Scenario("gpu", "sync-bn", "`SyncBatchNorm`", f"{TARGETS}:synced_batch_norm", ranks)
    synced = replace(synced, tolerance_eps=ROUGH_EPS)
    # Its collectives break the graph, and what is then left unfused is warned of.
    unfused = ("equal, unfused",)
    flag = {"mode": mode}
    checks.append(Check(synced, "fp32", flag, needs_cuda=True, also_right=unfused))
    return Part(_name("loops", mode, ranks), "correctness", ranks, tuple(checks), limit_s=200)


def _features(mode: str, number: int) -> Part:
    """One of the parts that have all features of DDP together, in the mode that a check has."""
    elsewhere = {*LOOPS_ON_TWO, "plain", *LATE_ON_A_GPU}
    chosen = [
        scenario
        for scenario in SCENARIOS
        if (scenario.parallelism, scenario.tested[:1]) == ("ddp-2", (mode,))
        and scenario.feature not in elsewhere
        # A GPU can have any torch.
        and not scenario.fails_on_oldest
    ]
    chosen.sort(key=lambda scenario: scenario.feature in FAILING_LAST)
    checks = [
        Check(
            scenario,
            scenario.dtypes[0],
            {"mode": mode, **dict(scenario.options)},
            also_right=(scenario.becomes,),
        )
        for scenario in chosen[number :: FEATURE_PARTS[mode]]
    ]
    name = _name(f"features-{number + 1}", mode, 2)
    return Part(name, "correctness", 2, tuple(checks), limit_s=240)


def _measured() -> Part:
    """Buckets chosen by what is measured: the network, and then the steps."""
    target = f"{TARGETS}:measured"
    scenario = Scenario("gpu", "measured", "up to the steps that it measures", target, 2)
    return Part("auto-2", "correctness", 2, (Check(scenario, "fp32", {"mode": "auto"}),))


def _memory(mode: str) -> Part:
    """Donated buffers and CUDA graphs: what reuses memory."""
    rows = (
        ("what the forward saved is overwritten", "donated", ROUGH_EPS, ("fp32",)),
        ("what the forward saved is overwritten", "donated", ROUGH_EPS_OF_BF16, ("bf16",)),
        ("kept for a second backward", "donated_later", ROUGH_EPS, ("fp32",)),
        ("two forwards, one backward", "donated_twice", ROUGH_EPS, ("fp32",)),
        ("CUDA graphs", "cuda_graphs", 0.0, DTYPES),
        ("CUDA graphs, backward inside", "cuda_graphs_inside", 0.0, ("fp32",)),
    )
    checks = [
        Check(
            Scenario("gpu", name, title, f"{TARGETS}:{name}", 1, tolerance_eps=tolerance),
            dtype,
            {"mode": mode},
        )
        for title, name, tolerance, dtypes in rows
        for dtype in dtypes
    ]
    return Part(f"memory-{mode}", "correctness", 1, tuple(checks))


def _name(what: str, mode: str, ranks: int) -> str:
    return f"{what}-{mode}" if ranks == 1 else f"{what}-{mode}-{ranks}"


PROBE: Final = Part(
    "nccl-on-one-gpu",
    "probe",
    measure="gpu_checks.probe:all_reduce",
    limit_s=35,
    has_group=False,
    starts_pairs=True,
)
"""Whether NCCL takes two ranks on one GPU."""


def _measured_in(
    module: str, name: str, group: Group, limit_s: float, *, starts_pairs: bool = False
) -> Part:
    """A part whose one process measures by itself what its name says."""
    function = name.rpartition("-")[2]
    measure = f"gpu_checks.{module}:{function if function != module else 'measure'}"
    return Part(
        name,
        group,
        measure=measure,
        limit_s=limit_s,
        has_group=False,
        least_s=90.0 if starts_pairs else 20.0,
        starts_pairs=starts_pairs,
    )


PARTS: Final = (
    _measured_in("norms", "norms", "norms", 110),
    _measured_in("net", "net-gpt2", "steps", 230, starts_pairs=True),
    # Short ones first: on an H200 what is before them took 270 s, and not all starts end in 85.
    _measured_in("graphs", "graphs", "graphs", 70),
    _measured_in("copies", "copies", "copies", 60),
    _measured_in("starts", "starts", "starts", 120),
    _measured_in("net", "net-resnet", "steps", 170, starts_pairs=True),
    *(_options(mode, 1) for mode in MODES),
    *(_memory(mode) for mode in MODES),
    *(_loops(mode, 1, LOOPS) for mode in MODES),
    *(_options(mode, 2) for mode in MODES),
    *(_loops(mode, 2, LOOPS_ON_TWO) for mode in MODES),
    _measured(),
    *(_features(mode, number) for mode in MODES for number in range(FEATURE_PARTS[mode])),
    _measured_in("trainers", "trainers", "trainers", 150),
)
"""In the order in which they matter, should time run out."""


def choose(parts: Iterable[Part], names: Iterable[str]) -> list[Part]:
    """The parts with these names, all if there are none.

    Raises:
        ValueError: there is no part of a name.
    """
    parts, names = list(parts), list(names)
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            raise ValueError(f"--only must be one of {', '.join(known)}, but is {name!r}.")
    return [part for part in parts if not names or part.name in names]
