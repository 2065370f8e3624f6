"""DDP's options, as the bench of options sets them: under the flag and without it alike."""

# No annotations from the future: DDP compares those of communication hooks with types.
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from workloads.models import VOCABULARY

BRANCH_WIDTH: Final = 256
LOOKED_UP: Final = 512
SPARSE_WIDTH: Final = 64

EQUAL: Final = 1e-3
"""Of an element, over the largest of its gradient: what adding in another order may give."""
EQUAL_FP16: Final = 2e-3
EQUAL_BF16: Final = 2e-2
"""The same where sums are rounded to 11 and to 8 bits."""

FP16_SCALE: Final = 4096.0
"""Of the loss where fp16 is sent, as a ``GradScaler`` does: gradients of a mean are subnormal."""

ONE_BUCKET_MB: Final = 1000
"""More than the models have: of one bucket."""

FIRST_COMPRESSED: Final = 2
"""The step from which PowerSGD compresses."""


class Branching(nn.Module):
    """A model beside two small ones, of which each step takes one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.branches = nn.ModuleList([nn.Linear(BRANCH_WIDTH, BRANCH_WIDTH) for _ in range(2)])

    def forward(self, taken: int, *batch: Tensor) -> Tensor:
        branch = self.branches[taken]
        loss: Tensor = self.model(*batch) + branch(torch.ones(1, BRANCH_WIDTH)).square().mean()
        return loss


class LookingUp(nn.Module):
    """A model beside an embedding with sparse gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.table = nn.Embedding(VOCABULARY, SPARSE_WIDTH, sparse=True)

    def forward(self, indices: Tensor, *batch: Tensor) -> Tensor:
        loss: Tensor = self.model(*batch) + self.table(indices).square().mean()
        return loss


def _model_alone(model: nn.Module) -> nn.Module:
    return model


def _no_inputs(_: int, __: int) -> tuple[Any, ...]:
    return ()


def _branch(step: int, rank: int) -> tuple[Any, ...]:
    return ((step + rank) % 2,)


def _indices(_: int, rank: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randint(VOCABULARY, (LOOKED_UP,), generator=generator),)


def users_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average, in a callback."""
    work: Any = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    ranks = dist.get_world_size()
    averaged: torch.futures.Future[Tensor]
    averaged = work.get_future().then(lambda future: future.value()[0].div_(ranks))
    return averaged


def bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Do what ``bf16_compress_hook`` does: DDP's own reducer refuses its name without NCCL."""
    hook = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    sent: torch.futures.Future[Tensor] = hook(state, bucket)
    return sent


Hook = tuple[Any, Callable[..., Any]]
"""A state, and a hook."""


def power_sgd(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """PowerSGD from vectors of ones: random ones go by a gradient's place in its bucket, which
    depends on when a method has it ready."""
    if bucket.index() not in state.p_memory_dict:
        shapes = [
            gradient.flatten(1).shape for gradient in bucket.gradients() if gradient.dim() > 1
        ]
        rate = state.min_compression_rate
        shapes = [shape for shape in shapes if sum(shape) * rate < shape.numel()]
        state.p_memory_dict[bucket.index()] = torch.ones(sum(shape[0] for shape in shapes))
        state.q_memory_dict[bucket.index()] = torch.ones(sum(shape[1] for shape in shapes))
    return powerSGD_hook.powerSGD_hook(state, bucket)


def _power_sgd() -> Hook:
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=FIRST_COMPRESSED)
    return state, power_sgd


@dataclass(frozen=True)
class Option:
    """An option of DDP, and a model that has a use for it.

    Attributes:
        hook: makes a communication hook; for DDP's own reducer, if it is asked so.
        ddp: what the constructor is given.
        around: what the model is put in.
        inputs: of what it is put in, by step and rank, before the model's batch.
        tolerance: of an element of a gradient, over the largest one.
        scale: of the loss.
        joins: whether the ranks run out of inputs one after another, inside of ``join``.
    """

    hook: Callable[[bool], Hook] | None = None
    ddp: dict[str, Any] = field(default_factory=dict)
    around: Callable[[nn.Module], nn.Module] = _model_alone
    inputs: Callable[[int, int], tuple[Any, ...]] = _no_inputs
    tolerance: float = EQUAL
    scale: float = 1.0
    joins: bool = False

    def wrap(self, model: nn.Module, *, own_reducer: bool) -> DistributedDataParallel:
        """DDP with the option.

        Args:
            model: as :attr:`around` makes it.
            own_reducer: whether DDP's own reducer trains it.
        """
        ddp = DistributedDataParallel(model, **self.ddp)
        if self.hook is not None:
            ddp.register_comm_hook(*self.hook(own_reducer))
        return ddp


OPTIONS: Final = {
    "none": Option(),
    "find_unused_parameters": Option(ddp={"find_unused_parameters": True}),
    "find_unused_parameters, branches": Option(
        ddp={"find_unused_parameters": True}, around=Branching, inputs=_branch
    ),
    "static_graph": Option(ddp={"static_graph": True}),
    "fp16_compress_hook": Option(
        lambda _: (None, default_hooks.fp16_compress_hook), tolerance=EQUAL_FP16, scale=FP16_SCALE
    ),
    "bf16_compress_hook": Option(
        lambda own: (None, bf16_hook if own else default_hooks.bf16_compress_hook),
        tolerance=EQUAL_BF16,
    ),
    "fp16_compress_wrapper": Option(
        lambda _: (dist.group.WORLD, default_hooks.fp16_compress_wrapper(users_hook)),
        tolerance=EQUAL_FP16,
        scale=FP16_SCALE,
    ),
    "powerSGD_hook": Option(lambda _: _power_sgd(), ddp={"bucket_cap_mb": ONE_BUCKET_MB}),
    "user's hook": Option(lambda _: (dist.group.WORLD, users_hook)),
    "sparse embedding": Option(around=LookingUp, inputs=_indices),
    "join": Option(joins=True),
}
"""By name, in the order of the table; the first is without an option, to compare with."""
