"""DDP's communication hooks: those that only average, and those that are called with buckets,
whatever they make of them; and its hook on buffers."""

# No annotations from the future: DDP compares those of communication hooks with types.
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from testing import models
from testing.scenarios.features.loops import MODELS, Counting, autocast_of
from testing.scenarios.features.unused import branching
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run


def renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Eager DDP refuses the name of the bf16 hook where there is no NCCL."""

    def users_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return hook(state, bucket)

    return users_hook


HOOKS: Final[Mapping[str, Callable[..., Any]]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "wrapped in fp16": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    "noop": debugging_hooks.noop_hook,  # Gradients stay each rank's own.
}


def torchs(run: Run, hook: str) -> None:
    """A hook of torch, one of :data:`HOOKS`."""
    ddp, called = run.ddp(run.mlp()), HOOKS[hook]
    is_refused = hook == "bf16" and not run.is_fused
    ddp.register_comm_hook(None, renamed(called) if is_refused else called)
    train(run, ddp)


def builtin(run: Run) -> None:
    """``_register_builtin_comm_hook``: those of the C++ reducer."""
    ddp = run.ddp(run.mlp())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(run, ddp)


def stepping(run: Run) -> None:
    """``_register_fused_optim``: a step for each bucket as it is averaged."""
    ddp = run.ddp(run.mlp())
    ddp._register_fused_optim(torch.optim.SGD, lr=1.0)
    train(run, ddp, optimizer=no_optimizer)


class _Nothing(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None


def no_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Where something else steps; it drops gradients all the same."""
    return _Nothing(parameters, {})


def _sum_buffers(group: Any, buffers: dict[str, Tensor]) -> None:
    for buffer in buffers.values():
        dist.all_reduce(buffer, group=group)


def buffer_hook(run: Run) -> None:
    """``_register_buffer_comm_hook``: buffers are summed after each forward."""
    ddp = run.ddp(Counting(run.mlp()))
    ddp._register_buffer_comm_hook(ddp.process_group, _sum_buffers)
    train(run, ddp)


# --- A hook of the user's own --------------------------------------------------------------------


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


def summing_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum instead of averaging, over the group that is its state."""
    work: Any = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def summing_over(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The same over the group that its state, a list, holds now."""
    return summing_hook(state[0], bucket)


def _train_summing(
    run: Run, model: nn.Module, ddp: Mapping[str, Any], *, several: bool = False, **loop: Any
) -> None:
    wrapped, calls = run.ddp(model, **ddp), Calls(run, several=several)
    wrapped.register_comm_hook(calls, summing)
    train(run, wrapped, **loop)
    calls.check()


def users(
    run: Run, model: str = "layers", *, ddp: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """A hook of the user's own.

    Args:
        run: where it is noted.
        model: one of :data:`testing.scenarios.features.loops.MODELS`.
        ddp: options of ``DistributedDataParallel``.
        options: whether there are ``several`` buckets, and fields of the loop.
    """
    _train_summing(run, MODELS[model](run), ddp or {}, **options)


def users_autocast(run: Run) -> None:
    """The same under autocast in the run's dtype."""
    _train_summing(run, models.mlp(), {}, draw=models.whole_rows, loss=autocast_of(run))


def users_flag_unset(run: Run) -> None:
    """The same where the flag is unset while it is trained."""
    ddp, calls = run.ddp(run.mlp(2)), Calls(run)
    ddp.register_comm_hook(calls, summing)
    forward = run.compile(ddp)
    backwards(run, ddp, forward, 2)
    with torch._inductor.config.patch(ddp_fusion=None):
        backwards(run, ddp, forward, 1, first=2)
    calls.check()


# --- Hooks of torch that keep something between buckets ------------------------------------------


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


def power_sgd(run: Run, *, in_fp16: bool = False) -> None:
    """``powerSGD_hook``, or ``fp16_compress_wrapper`` around it."""
    hook: Any = powerSGD_hook.powerSGD_hook
    hook = default_hooks.fp16_compress_wrapper(hook) if in_fp16 else hook
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


def unused(run: Run, *, several: bool = False, **options: Any) -> None:
    """A hook of the user's own, and branches that some ranks do not take.

    Args:
        run: where it is noted.
        several: whether there are several buckets.
        options: of :func:`testing.scenarios.features.unused.branching`.
    """
    calls = Calls(run, several=several)
    branching(run, prepare=lambda ddp: ddp.register_comm_hook(calls, summing), **options)
    calls.check()


def unused_another_group(run: Run, takes: str) -> None:
    """``allreduce_hook`` over a group that is not the module's."""
    group, hook = _alone(), default_hooks.allreduce_hook
    branching(run, takes, prepare=lambda ddp: ddp.register_comm_hook(group, hook))


def unused_wrapped(run: Run, takes: str) -> None:
    """``fp16_compress_wrapper``. Eager DDP leaves a parameter that this rank has not used the
    hook's result as it is, in the smaller dtype: ours has the parameter's."""

    def widen(ddp: nn.Module) -> None:
        for parameter in ddp.parameters():
            if not run.is_fused and parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def prepare(ddp: Any) -> None:
        ddp.register_comm_hook(None, HOOKS["wrapped in fp16"])

    branching(run, takes, prepare=prepare, before_note=widen)
