"""The ways to reduce gradients that are compared: each makes a training step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from workloads.models import Batch, Subject

Style = Literal["eager", "outside", "inside"]
"""How a step runs: uncompiled; with a compiled forward and the backward outside of it; or both in
one compiled step, whose backward compiled autograd traces."""


@dataclass(frozen=True)
class Way:
    """A way to reduce gradients.

    Attributes:
        style: how a step runs.
        reducer: DDP's reducer: ``"c++"``, ``"python"``, or ``"none"`` without DDP.
        fusion: value of ``ddp_fusion``; only for this package.
        memory: memory of buckets, as in ``FusionConfig``; only for this package.
        is_sharded: whether optimizer states are divided by the ranks: with eager DDP, by torch's
            ``ZeroRedundancyOptimizer``.
        is_overlapped: whether the next forward waits for the parameters.
        is_traced: whether compiled autograd traces its backward, outside of a compiled step.
        passes: torch's own fusion passes.
        bucketing: whether torch's ``bucket_all_reduces_fx`` is on.
        overlap: whether torch's overlap scheduling is on, with bucketing.
        caps: whether its bucket size can be chosen.
        optimizes: whether DDPOptimizer may split the compiled forward.
    """

    style: Style
    reducer: Literal["c++", "python", "none"]
    fusion: str = ""
    memory: Literal["plain", "registered"] = "plain"
    is_sharded: bool = False
    is_overlapped: bool = False
    is_traced: bool = False
    passes: str = ""
    bucketing: bool = False
    overlap: bool = False
    caps: bool = False
    optimizes: bool = True

    @property
    def is_ours(self) -> bool:
        return bool(self.fusion)

    @property
    def compares_buckets(self) -> bool:
        """Whether it compares buckets in its first steps, and keeps the fastest."""
        return self.fusion == "auto"

    @property
    def has_ddp(self) -> bool:
        """Whether gradients are reduced at all; the other ways are lower bounds."""
        return self.is_ours or self.reducer != "none"

    @property
    def compiles_the_same(self) -> bool:
        """Whether it runs the same compiled code under ``no_sync`` and without."""
        return self.has_ddp and self.style != "inside" and not self.is_traced


PLAIN: Final = "no DDP"
TRACED: Final = "no DDP, traced backward"
"""The cost of compiled autograd alone, a lower bound of the ways that use it."""
EAGER: Final = "eager DDP"
ONE_GRAPH: Final = "DDP, one graph"
"""DDP's own reducer after a compiled forward that DDPOptimizer does not split: it differs from
other ways only in how gradients are reduced."""
AUTO: Final = "auto"
ZERO: Final = "ZeroRedundancyOptimizer"
"""Eager DDP, whose optimizer torch divides by the ranks; only with an optimizer."""

OPTIMIZERS: Final = ("sgd", "adamw", "muon")
"""Optimizers that can step behind a backward. ``"muon"`` is for matrices that are no embeddings;
AdamW steps the others."""

WAYS: Final = {
    PLAIN: Way("outside", "none"),
    TRACED: Way("inside", "none"),
    EAGER: Way("eager", "c++", caps=True),
    ONE_GRAPH: Way("outside", "c++", caps=True, optimizes=False),
    "DDPOptimizer": Way("outside", "c++", caps=True),
    "Python reducer": Way("inside", "python"),
    "torch concat": Way("inside", "python", passes="fuse_ddp_with_concat_op", caps=True),
    "torch coalesced": Way("inside", "python", passes="fuse_ddp_with_coalesced_op", caps=True),
    "bucket_all_reduces_fx": Way("inside", "python", bucketing=True, caps=True),
    "torch overlap": Way("inside", "python", overlap=True),
    "concat": Way("outside", "none", fusion="concat", caps=True),
    "coalesced": Way("outside", "none", fusion="coalesced", caps=True),
    "concat, traced": Way("outside", "none", fusion="concat", is_traced=True),
    "concat, sharded": Way("outside", "none", fusion="concat", is_sharded=True),
    "concat, overlapped": Way(
        "outside", "none", fusion="concat", is_sharded=True, is_overlapped=True
    ),
    ZERO: Way("eager", "c++", is_sharded=True),
    "concat, registered": Way("outside", "none", fusion="concat", memory="registered"),
    AUTO: Way("outside", "none", fusion="auto"),
}

OURS: Final = tuple(name for name, way in WAYS.items() if way.is_ours and way.caps)
"""This package's ways with buckets of a fixed size."""


@dataclass
class Training:
    """A forward and backward of a model, with fresh gradients each time.

    Attributes:
        model: the model without DDP.
        step: a forward of each batch, and one backward.
        batches: batches of this rank.
        kept_bytes: memory that DDP keeps between steps besides parameters and gradients.
        ddp: the model in DDP; ``None`` without it.
        optimizers: they step behind the backward.
    """

    model: nn.Module
    step: Callable[..., None]
    batches: tuple[Batch, ...]
    kept_bytes: int = 0
    ddp: DistributedDataParallel | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()

    def run(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.step(*self.batches)
        for optimizer in self.optimizers:
            optimizer.step()

    def state_bytes(self) -> int:
        """Bytes of the optimizers' states on this rank."""
        optimizers = (getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers)
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return sum(t.nbytes for state in states for t in state.values() if torch.is_tensor(t))


def prepare(
    way: Way,
    model: nn.Module,
    batches: tuple[Batch, ...],
    cap_mb: float | None,
    optimizer: str = "",
) -> Training:
    """Make a training; the default process group must exist, except without DDP.

    Args:
        way: the way to train.
        model: model from :func:`built`.
        batches: batches of a step, each for a forward; there is one backward, of their sum.
        cap_mb: size of a bucket in MiB; ``None``: the way's default.
        optimizer: one of :data:`OPTIMIZERS`; empty: none.
    """
    configure(way)
    ddp = None
    if way.has_ddp:
        # DDP asks for whole MiB, but accepts others.
        options = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
        ddp = DistributedDataParallel(model, **options)  # type: ignore[arg-type]
    configure_after_ddp(way, cap_mb)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    kept_bytes = trained if way.reducer == "c++" else 0
    optimizers = _optimizers(optimizer, model, is_zero=way.is_sharded and not way.is_ours)
    return Training(model, _step(way.style, ddp or model), batches, kept_bytes, ddp, optimizers)


def _optimizers(name: str, model: nn.Module, *, is_zero: bool) -> list[torch.optim.Optimizer]:
    if not name:
        return []
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = [(kinds.get(name, torch.optim.AdamW), trained)]
    if name == "muon":
        embeddings = {
            id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)
        }
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings]
        ids = set(map(id, matrices))
        others = [p for p in trained if id(p) not in ids]
        parts = [(torch.optim.Muon, matrices), (torch.optim.AdamW, others)]
    if is_zero:
        return [
            ZeroRedundancyOptimizer(part, optimizer_class=kind, lr=1e-5) for kind, part in parts
        ]
    return [kind(part, lr=1e-5) for kind, part in parts if part]


def built(subject: Subject, device: torch.device) -> nn.Module:
    """The subject's model, equal on all ranks."""
    torch.manual_seed(0)
    return subject.build().to(device)


def configure(way: Way) -> None:
    """Change torch's settings that must be set before DDP is constructed."""
    torch._dynamo.config.compiled_autograd = way.style == "inside"
    if way.is_ours:
        import fusion_passes  # It adds the flag; the other ways run without the package.

        options: dict[str, Any] = {"backward_graph": "compiled_autograd"} if way.is_traced else {}
        mode = cast("Any", way.fusion)
        options |= {"shard_optimizer": "overlap" if way.is_overlapped else way.is_sharded}
        flag = fusion_passes.FusionConfig(mode=mode, memory=way.memory, **options)
        inductor_config.ddp_fusion = flag
    elif way.reducer == "python":
        torch._dynamo.config.optimize_ddp = "python_reducer"
    elif not way.optimizes:
        torch._dynamo.config.optimize_ddp = False


def configure_after_ddp(way: Way, cap_mb: float | None) -> None:
    """Change settings that DDP's constructor would overwrite: it switches torch's fusion on, and
    rounds its bucket size down to whole MiB."""
    if way.reducer != "python":
        return
    inductor_config._fuse_ddp_communication = bool(way.passes)
    if way.passes:
        inductor_config._fuse_ddp_communication_passes = [way.passes, "schedule_comm_wait"]
        if cap_mb is not None:
            inductor_config._fuse_ddp_bucket_size = cap_mb
    if way.bucketing:
        inductor_config.bucket_all_reduces_fx = "all"
        if cap_mb is not None:
            # The FX graph cache pickles it into its key, which would fail for a lambda.
            size = functools.partial(_constant, cap_mb)
            inductor_config.bucket_all_reduces_fx_bucket_size_determinator = size
    if way.overlap:
        overlap = inductor_config.aten_distributed_optimizations
        overlap.enable_overlap_scheduling = True
        overlap.collective_bucketing = True


def _constant(cap_mb: float, _: int) -> float:
    """The size of a bucket, whatever its index."""
    return cap_mb


def _step(style: Style, model: nn.Module) -> Callable[..., None]:
    forward = torch.compile(model) if style == "outside" else model

    def step(*batches: Batch) -> None:
        loss = forward(*batches[0])
        for batch in batches[1:]:
            loss = loss + forward(*batch)
        loss.backward()

    return torch.compile(step) if style == "inside" else step
