"""Communication hooks that are called with DDP's buckets, whatever they make of them."""

# No annotations from the future: DDP compares those of communication hooks with types.
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from testing import models
from testing.scenarios.features.buffers import Counting
from testing.scenarios.features.hooks import renamed
from testing.scenarios.features.precision import autocast_of
from testing.scenarios.features.unused import train_branching
from testing.scenarios.loop import Loop, backwards, train
from testing.scenarios.run import Run

CAP_MB = 0.0003
"""Several buckets of a small model."""


class Calls:
    """What a hook is called with: as with eager DDP, in each backward from the first bucket to the
    last one, alike on all ranks.

    Args:
        run: where their numbers are noted.
        several: whether there are several buckets: eager DDP may have another number of them.
    """

    def __init__(self, run: Run, *, several: bool = False) -> None:
        self._run = run
        self._several = several
        self._backwards: list[list[tuple[int, bool, list[torch.Size]]]] = []

    def add(self, bucket: dist.GradBucket) -> None:
        """Note a call."""
        shapes = [parameter.shape for parameter in bucket.parameters()]
        assert shapes == [gradient.shape for gradient in bucket.gradients()]
        if bucket.index() == 0:
            self._backwards.append([])
        self._backwards[-1].append((bucket.index(), bucket.is_last(), shapes))

    def check(self) -> None:
        """Check all that was noted, on all ranks together."""
        for calls in self._backwards:
            assert [index for index, _, _ in calls] == list(range(len(calls)))
            assert [is_last for _, is_last, _ in calls] == [False] * (len(calls) - 1) + [True]
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, str(self._backwards))
        assert len(set(seen)) == 1, seen
        counts = [len(calls) for calls in self._backwards]
        assert counts
        if self._several:
            assert min(counts[1:]) > 1  # Eager DDP makes them after its first backward.
        else:
            self._run.note("calls", counts)


def summing(state: Calls, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum, and twice: neither an average, nor done in place."""
    state.add(bucket)
    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    doubled: torch.futures.Future[Tensor] = work.get_future().then(
        lambda future: 2 * future.value()[0]
    )
    return doubled


def _train_summing(
    run: Run,
    loop: Loop | None = None,
    model: nn.Module | None = None,
    *,
    several: bool = False,
    **options: Any,
) -> None:
    """Train with :func:`summing`, by default three layers."""
    ddp = run.ddp(run.mlp() if model is None else model, **options)
    calls = Calls(run, several=several)
    ddp.register_comm_hook(calls, summing)
    train(run, ddp, loop)
    calls.check()


def users(run: Run, **loop: Any) -> None:
    """A hook of the user's own."""
    _train_summing(run, Loop(**loop))


def batch_sizes(run: Run) -> None:
    """The same with several batch sizes."""
    _train_summing(run, Loop(steps=5, sizes=(4, 6, 3)), run.mlp(2))


def several(run: Run) -> None:
    """The same with several buckets."""
    _train_summing(run, several=True, bucket_cap_mb=CAP_MB)


def autocast(run: Run) -> None:
    """The same under autocast in the run's dtype."""
    loop = Loop(draw=models.whole_rows, loss=autocast_of(run))
    _train_summing(run, loop, models.mlp())


def unusual_parameters(run: Run) -> None:
    """The same with tied and frozen parameters, and buffers."""
    model = models.Tied()
    model.middle.requires_grad_(False)
    _train_summing(run, model=Counting(model))


class _Kinds(nn.Module):
    """Exact. Parameters of several dtypes and layouts, one of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, models.WIDTH)
        self.factor = nn.Parameter(torch.empty(models.WIDTH, dtype=torch.float64))
        self.phase = nn.Parameter(torch.empty(models.WIDTH, 2, dtype=torch.complex64))
        self.across = nn.Parameter(torch.empty(models.WIDTH, models.WIDTH).t())
        models.fill_whole(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() @ self.across
        out: Tensor = (x * self.factor).sum() + (x * self.phase.sum(1)).real.sum().double()
        return out.reshape(1, 1)


def several_kinds(run: Run) -> None:
    """The same with parameters of several dtypes and layouts."""
    _train_summing(run, model=_Kinds())


def flag_unset(run: Run) -> None:
    """The same where the flag is unset while it is trained."""
    ddp = run.ddp(run.mlp(2))
    calls = Calls(run)
    ddp.register_comm_hook(calls, summing)
    forward = run.compile(ddp)
    backwards(run, ddp, forward, 2)
    with torch._inductor.config.patch(ddp_fusion=None):
        backwards(run, ddp, forward, 1, first=2)
    calls.check()


# --- Hooks of torch, and what they are wrapped in ------------------------------------------------


def _alone() -> Any:
    """A process group of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def _train_hooked(run: Run, state: Any, hook: Callable[..., Any], steps: int) -> None:
    """Some backwards with a hook; what rounds leaves no parameter that others start from."""
    ddp = run.ddp(run.mlp())
    ddp.register_comm_hook(state, hook)
    backwards(run, ddp, run.compile(ddp), steps)


def power_sgd_state() -> powerSGD_hook.PowerSGDState:
    """Compresses from the third step on."""
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )


def power_sgd(run: Run) -> None:
    """``powerSGD_hook``, compressing from the third step on."""
    _train_hooked(run, power_sgd_state(), powerSGD_hook.powerSGD_hook, steps=5)


def wrapped_power_sgd(run: Run) -> None:
    """``fp16_compress_wrapper`` around ``powerSGD_hook``."""
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    _train_hooked(run, power_sgd_state(), hook, steps=5)


def wrapped_in_bf16(run: Run) -> None:
    """``bf16_compress_wrapper`` around ``allreduce_hook``."""
    hook = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    _train_hooked(run, None, renamed(hook), steps=3)


def post_local_sgd(run: Run) -> None:
    """``post_localSGD_hook``: from the third step on, each rank averages with itself."""
    state = post_localSGD_hook.PostLocalSGDState(None, _alone(), 2)
    _train_hooked(run, state, post_localSGD_hook.post_localSGD_hook, steps=4)


def another_group(run: Run) -> None:
    """``allreduce_hook`` over a group that is not the module's."""
    _train_hooked(run, _alone(), default_hooks.allreduce_hook, steps=3)


# --- Parameters that are not used ----------------------------------------------------------------

CHANGING = (("a", "b"), ("ab", ""), ("b", "a"), ("a", "a"))
"""The branches that each rank takes, step by step."""

IN_TURN = (("a", "b"), ("b", "a"), ("a", "a"), ("b", "b"))
"""Two graphs, where what is used is not the subject."""


def _train_unused(
    run: Run,
    takes: Sequence[Sequence[str]] = CHANGING,
    *,
    several: bool = False,
    **options: Any,
) -> None:
    """Train with :func:`summing` and branches that some ranks do not take."""
    calls = Calls(run, several=several)
    train_branching(
        run, takes, prepare=lambda ddp: ddp.register_comm_hook(calls, summing), **options
    )
    calls.check()


def unused(run: Run, **options: Any) -> None:
    """Other ranks use other branches in each step."""
    _train_unused(run, **options)


def unused_in_turn(run: Run, **options: Any) -> None:
    """Ranks use one of two branches."""
    _train_unused(run, IN_TURN, **options)


def unused_several(run: Run) -> None:
    """The same with several buckets."""
    _train_unused(run, IN_TURN, several=True, bucket_cap_mb=CAP_MB)


def unused_never(run: Run) -> None:
    """The same where all of them are used."""
    _train_unused(run, [["abc"]] * 3)


def unused_another_group(run: Run) -> None:
    """``allreduce_hook`` over a group that is not the module's."""
    group = _alone()
    hook = default_hooks.allreduce_hook
    train_branching(run, IN_TURN, prepare=lambda ddp: ddp.register_comm_hook(group, hook))


def unused_wrapped(run: Run) -> None:
    """``fp16_compress_wrapper``. Eager DDP leaves a parameter that this rank has not used the
    hook's result as it is, in the smaller dtype: ours has the parameter's."""

    def widen(ddp: nn.Module) -> None:
        for parameter in ddp.parameters():
            if not run.is_fused and parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    train_branching(
        run, IN_TURN, prepare=lambda ddp: ddp.register_comm_hook(None, hook), before_note=widen
    )
