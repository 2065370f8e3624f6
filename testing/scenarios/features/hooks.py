"""Hooks: of users on tensors and parameters, and DDP's communication hooks."""

# No annotations from the future: DDP compares those of communication hooks with types.
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from testing.models import Batch
from testing.scenarios.features.groups import PAIRS
from testing.scenarios.loop import Loop, backwards, train
from testing.scenarios.run import Run


def tensor_hook(run: Run) -> None:
    """On an output of the model: its gradient is doubled."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        outputs: Tensor = model(batch[0])
        outputs.register_hook(lambda gradient: gradient * 2)
        return (outputs * batch[1]).sum()

    train(run, run.ddp(run.mlp()), Loop(loss=loss))


def parameter_hook(run: Run, **loop: Any) -> None:
    """On a parameter: its gradient is doubled before it is averaged."""
    model = run.mlp()
    model.get_parameter("2.weight").register_hook(lambda gradient: gradient * 2)
    train(run, run.ddp(model), Loop(**loop))


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def accumulation_hook(run: Run) -> None:
    """``register_post_accumulate_grad_hook`` before DDP is constructed."""
    model = run.mlp().to(run.device)
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(_double)
    train(run, run.ddp(model))


def accumulation_hook_behind(run: Run) -> None:
    """``register_post_accumulate_grad_hook`` after DDP is constructed."""
    ddp = run.ddp(run.mlp())
    ddp.module.get_parameter("2.weight").register_post_accumulate_grad_hook(_double)
    train(run, ddp)


def hooks_that_come_and_go(run: Run) -> None:
    """Hooks on parameters, put there and taken away between steps. They see the gradient of this
    rank alone, and may change it."""
    ddp = run.ddp(run.mlp(2))
    forward = run.compile(ddp)
    backwards(run, ddp, forward, 1)
    weight, bias = ddp.module[0].weight, ddp.module[0].bias
    handle = weight.register_hook(lambda gradient: gradient.clamp(-3, 3))
    bias.register_post_accumulate_grad_hook(_double)
    backwards(run, ddp, forward, 2, first=1)
    handle.remove()
    backwards(run, ddp, forward, 1, first=3)


def hooks_in_order(run: Run) -> None:
    """Hooks on gradients and on parameters, put there before DDP was constructed and after. What
    they see is what eager DDP shows them."""
    seen: dict[str, Tensor] = {}
    model = run.mlp().to(run.device)

    def note(label: str) -> Callable[[Any], None]:
        def hook(value: Any) -> None:
            gradient: Any = value.grad if isinstance(value, nn.Parameter) else value
            seen[f"{label} {len(seen)}"] = gradient.detach().clone()

        return hook

    weight = model.get_parameter("2.weight")
    weight.register_post_accumulate_grad_hook(note("early"))
    ddp = run.ddp(model)
    weight.register_hook(note("gradient"))
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(note("late"))
    train(run, ddp)
    run.note_end(nn.Module(), **seen)


def _hook_node(parameter: Tensor, seen: list[Tensor]) -> list[Any]:
    """Put hooks on the node that accumulates a parameter's gradient, which note what they see. The
    first one puts zeros in its place on rank 1. Returns what removes them, and the node."""
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node

    def before(gradients: Any) -> Any:
        seen.append(gradients[0].detach().clone())
        return (gradients[0] * (1 - dist.get_rank()),)

    def behind(_: Any, __: Any) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.detach().clone())

    return [node.register_prehook(before), node.register_hook(behind), node]


def node_hooks(run: Run) -> None:
    """Hooks on the autograd nodes that accumulate gradients, put there and taken away between
    steps. They see the gradient of this rank alone, and may change it."""
    seen: list[Tensor] = []
    ddp = run.ddp(run.mlp(2))
    forward = run.compile(ddp)
    backwards(run, ddp, forward, 1)
    *handles, _ = _hook_node(ddp.module[0].weight, seen)
    backwards(run, ddp, forward, 2, first=1)
    for handle in handles:
        handle.remove()
    backwards(run, ddp, forward, 1, first=3)
    run.note_end(nn.Module(), **{str(number): value for number, value in enumerate(seen)})


def node_hooks_before(run: Run) -> None:
    """The same, put there before the flag was set and DDP was constructed; gradients are kept, and
    the backward is inside of the compiled function."""
    seen: list[Tensor] = []
    model = run.mlp(2).to(run.device)
    with torch._inductor.config.patch(ddp_fusion=None):
        hooks = _hook_node(model.get_parameter("0.weight"), seen)
    train(run, run.ddp(model), Loop("inside", steps=2, micro_batches=2, no_sync=True, zero="kept"))
    run.note_end(nn.Module(), **{str(number): value for number, value in enumerate(seen)})
    del hooks


def module_hooks(run: Run) -> None:
    """Full backward hooks and forward hooks on a layer."""
    model = run.mlp()

    def on_backward(_: nn.Module, gradients: Any, __: Any) -> Any:
        return tuple(None if gradient is None else gradient * 2 for gradient in gradients)

    model[2].register_full_backward_hook(on_backward)
    model[2].register_forward_hook(lambda _, __, output: output * 2)
    train(run, run.ddp(model))


def renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Eager DDP refuses the name of the bf16 hook where there is no NCCL."""

    def users_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        result: torch.futures.Future[Tensor] = hook(state, bucket)
        return result

    return users_hook


def _train_with_hook(run: Run, hook: Callable[..., Any]) -> None:
    ddp = run.ddp(run.mlp())
    ddp.register_comm_hook(None, hook)
    train(run, ddp, Loop(steps=3))


def allreduce_hook(run: Run) -> None:
    """``default_hooks.allreduce_hook``."""
    _train_with_hook(run, default_hooks.allreduce_hook)


def builtin_hook(run: Run) -> None:
    """``_register_builtin_comm_hook``: those of the C++ reducer."""
    ddp = run.ddp(run.mlp())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(run, ddp)


def bf16_hook(run: Run) -> None:
    """``default_hooks.bf16_compress_hook``."""
    hook = default_hooks.bf16_compress_hook
    _train_with_hook(run, hook if run.is_fused else renamed(hook))


def fp16_hook(run: Run) -> None:
    """``default_hooks.fp16_compress_hook``."""
    _train_with_hook(run, default_hooks.fp16_compress_hook)


def wrapped_hook(run: Run) -> None:
    """``fp16_compress_wrapper`` around ``allreduce_hook``."""
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    _train_with_hook(run, hook)


def _average_over(group: Any, parameter: nn.Parameter) -> None:
    """Line by line what DDP's own hook does, which is why it is easily taken for one."""
    assert parameter.grad is not None
    gradient = parameter.grad / group.size()
    gradient = functional_collectives.all_reduce(gradient, "sum", group)
    parameter.grad.copy_(gradient)


def users_average(run: Run) -> None:
    """DDP over four ranks, but the last layer is averaged over pairs, by a hook of the user's."""
    groups = [dist.new_group(list(pair)) for pair in PAIRS[0]]
    model, names = run.mlp(), ["4.weight", "4.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    hook = functools.partial(_average_over, groups[dist.get_rank() // 2])
    for name in names:
        model.get_parameter(name).register_post_accumulate_grad_hook(hook)
    train(run, run.ddp(model), Loop(style="inside"))
    for report in run.reports():
        assert [len(bucket.parameters) for bucket in report.buckets] == [4]
        assert len(report.rejections) == 2


def noop_hook(run: Run) -> None:
    """``debugging_hooks.noop_hook``: gradients stay each rank's own."""
    _train_with_hook(run, debugging_hooks.noop_hook)


def summing_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum instead of averaging."""
    work: Any = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed
