"""Which communication hooks a module accepts under the flag, and the errors for the others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.ddp.module import hand_over
from fusion_passes.reducer.communication import AllReduce, HookCall
from fusion_passes.reducer.reducer import reducer_of
from testing import models
from testing.processes import RUN
from testing.scenarios.catalog import SMALL_MB
from testing.scenarios.features.comm_hooks import power_sgd_state
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run, Tensors
from tests.support.fake_world import fake_world, one_rank, two_layers, without_kernels


def sent_as(ddp: DistributedDataParallel) -> torch.dtype | None:
    """The dtype in which gradients are sent; ``None`` if it is their own or the hook's choice."""
    communication = reducer_of(ddp).queue.communication
    return communication.dtype if isinstance(communication, AllReduce) else None


def is_hooked(ddp: DistributedDataParallel) -> bool:
    """Whether a hook is called with the module's buckets."""
    return isinstance(reducer_of(ddp).queue.communication, HookCall)


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        yield DistributedDataParallel(two_layers())


@pytest.mark.parametrize(
    ("hook", "dtype"),
    [
        (default_hooks.allreduce_hook, None),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
        (default_hooks.fp16_compress_hook, torch.float16),
    ],
)
@pytest.mark.parametrize("names_group", [True, False])
def test_known_hooks(
    ddp: DistributedDataParallel, hook: Any, dtype: torch.dtype | None, names_group: bool
) -> None:
    ddp.register_comm_hook(ddp.process_group if names_group else None, hook)
    assert sent_as(ddp) == dtype


@pytest.mark.parametrize(("kind", "dtype"), [("ALLREDUCE", None), ("FP16_COMPRESS", torch.float16)])
def test_builtin_hooks(ddp: DistributedDataParallel, kind: str, dtype: torch.dtype | None) -> None:
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    assert sent_as(ddp) == dtype


def users_hook(state, bucket):  # DDP compares annotations, which must not be strings.
    return default_hooks.allreduce_hook(state, bucket)


@pytest.mark.parametrize(
    "hook",
    [
        users_hook,
        powerSGD_hook.powerSGD_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ],
)
def test_other_hooks_are_given_our_buckets(ddp: DistributedDataParallel, hook: Any) -> None:
    ddp.register_comm_hook(None, hook)
    assert ddp._use_python_reducer
    assert is_hooked(ddp)
    assert ddp._comm_hooks == [(hook, None)]
    assert ddp._get_ddp_logging_data()["comm_hook"] == hook.__qualname__


def test_an_optimizer_in_a_hook_is_ddps_reducers(ddp: DistributedDataParallel) -> None:
    with pytest.warns(FusionWarning, match=r"_hook_then_optimizer\S+ steps an optimizer while"):
        ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    assert not ddp._use_python_reducer


def test_reduce_dtype_contradicts_a_hook() -> None:
    with fake_world(), inductor_config.patch(ddp_fusion=FusionConfig(reduce_dtype="bf16")):
        ddp = DistributedDataParallel(two_layers())
        with pytest.raises(ValueError, match=r"reduce_dtype='bf16' .* hook users_hook, which says"):
            ddp.register_comm_hook(None, users_hook)
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def test_what_is_no_hook_changes_nothing(ddp: DistributedDataParallel) -> None:
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, [])  # type: ignore[arg-type]
    assert ddp._use_python_reducer
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert sent_as(ddp) == torch.float16


def test_a_hook_over_another_group_is_called(ddp: DistributedDataParallel) -> None:
    other = dist.new_group([0, 1])
    on_other = DistributedDataParallel(two_layers(), process_group=other)
    on_other.register_comm_hook(other, default_hooks.fp16_compress_hook)
    assert sent_as(on_other) == torch.float16
    ddp.register_comm_hook(other, default_hooks.fp16_compress_hook)
    assert is_hooked(ddp)
    # In DDP's hooks, a state of None means the default group, whatever the module's group is.
    on_other = DistributedDataParallel(two_layers(), process_group=other)
    on_other.register_comm_hook(None, default_hooks.allreduce_hook)
    assert is_hooked(on_other)


@pytest.mark.parametrize("first", [default_hooks.bf16_compress_hook, users_hook])
@pytest.mark.parametrize("second", [default_hooks.allreduce_hook, users_hook])
def test_takes_one_hook_as_ddp_does(ddp: DistributedDataParallel, first: Any, second: Any) -> None:
    ddp.register_comm_hook(None, first)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, second)
    assert (sent_as(ddp) == torch.bfloat16) != is_hooked(ddp)


def failing(state, bucket):
    raise KeyError("the hook's own error")


def failing_later(state, bucket):
    def fail(_: Any) -> None:
        raise KeyError("the callback's own error")

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fail)


def giving_no_future(state, bucket):
    return bucket.buffer()


def giving_less(state, bucket):
    return noop_hook(state, bucket).then(lambda future: future.value()[1:])


def changing_parameters(state, bucket):
    with torch.no_grad():
        bucket.parameters()[0].add_(1)
    return noop_hook(state, bucket)


def using_it_later(state, bucket):
    for other in state:
        other.gradients()
    state.append(bucket)
    return noop_hook(state, bucket)


WRONG = {
    failing: "the hook's own error",
    failing_later: "the callback's own error",
    giving_no_future: "must return a torch.futures.Future of a tensor, and giving_no",
    giving_less: "must give a tensor of the bucket's 180 elements, and gave 179 elements.",
    changing_parameters: "changing_parameters has changed parameters. A compiled backward may",
    using_it_later: "has used its bucket after the future that it returned was complete",
}


@pytest.mark.parametrize("hook", WRONG)
def test_errors_reach_the_user(hook: Callable[..., Any]) -> None:
    """Errors in two steps reach the user; then the module continues to train, if it can."""
    errors = []
    with one_rank(), without_kernels(), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(models.mlp())
        ddp.register_comm_hook([], hook)
        compiled = torch.compile(ddp)
        for _ in range(2):
            try:
                compiled(torch.ones(2, models.WIDTH)).sum().backward()
            except Exception as error:  # noqa: BLE001 - of many kinds
                errors.append(str(error))
    assert WRONG[hook] in errors[0]
    assert len(errors) == (1 if hook is using_it_later else 2)


def noting(state, bucket):
    state.append(bucket.index())
    return noop_hook(state, bucket)


def test_hooks_that_come_late_or_stay() -> None:
    """A hook is called from the step after its registration on, also on a copy, and by DDP's own
    reducer. A copy has no hook."""
    late: list[Any] = []
    copied: list[Any] = []
    x = torch.ones(2, models.WIDTH)
    with (
        one_rank(),
        without_kernels(),
        inductor_config.patch(ddp_fusion="concat"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(models.mlp())
        compiled = torch.compile(ddp)
        compiled(x).sum().backward()
        ddp.register_comm_hook(late, noting)
        compiled(x).sum().backward()
        other = copy.deepcopy(ddp)
        torch.compile(other)(x).sum().backward()
        assert len(late) == 1
        other.register_comm_hook(copied, noting)
        torch.compile(other)(x).sum().backward()
        assert len(copied) == 1
        hand_over(ddp, "this is tested")
        ddp(x).sum().backward()
        assert len(late) == 2


def power_sgd_in_several_buckets() -> list[Tensors]:
    """Gradients on this rank after each of several backwards."""
    run = Run(is_fused=True, dtype=torch.float32, device=torch.device("cpu"))
    with inductor_config.patch(ddp_fusion="concat"):
        ddp, forward = run.compiled(run.mlp(), bucket_cap_mb=SMALL_MB)
        ddp.register_comm_hook(power_sgd_state(), powerSGD_hook.powerSGD_hook)
        backwards(run, ddp, forward, 6)
        assert len(reducer_of(ddp).assignment.layout.with_memory) > 1
    return run.backwards


def test_power_sgd_launches_in_one_order_on_all_ranks(run_on_ranks: RUN) -> None:
    """The hook's callbacks launch collectives. With eager DDP over Gloo, those of several buckets
    are launched in any order, and the processes crash, so the catalogue of scenarios cannot have
    this training."""
    for ours, others in zip(*run_on_ranks(2, power_sgd_in_several_buckets), strict=True):
        assert all(value is not None for value in ours.values())
        torch.testing.assert_close(ours, others, rtol=0, atol=0)
