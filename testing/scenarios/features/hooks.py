"""Users' hooks on tensors, parameters, layers and autograd nodes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from testing.models import OUTPUTS, WIDTH, Checkpointed, Exact
from testing.scenarios.features.instances import PAIRS
from testing.scenarios.loop import backwards, train
from testing.scenarios.run import Run


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def come_and_go(run: Run) -> None:
    """Hooks on parameters that are registered and removed between steps. They see the gradient of
    this rank only, and may change it."""
    ddp, forward = run.compiled(run.mlp(2))
    backwards(run, ddp, forward, 1)
    weight, bias = ddp.module[0].weight, ddp.module[0].bias
    handle = weight.register_hook(lambda gradient: gradient.clamp(-3, 3))
    bias.register_post_accumulate_grad_hook(_double)
    backwards(run, ddp, forward, 2, first=1)
    handle.remove()
    backwards(run, ddp, forward, 1, first=3)


def in_order(run: Run, **loop: Any) -> None:
    """Hooks on gradients and on parameters, registered before and after DDP is constructed; some
    double their gradient. They see the same gradients as with eager DDP."""
    seen: dict[str, Tensor] = {}
    model = run.mlp().to(run.device)

    def note(label: str) -> Callable[[Any], None]:
        def hook(value: Any) -> None:
            gradient: Any = value.grad if isinstance(value, nn.Parameter) else value
            seen[f"{label} {len(seen)}"] = gradient.detach().clone()

        return hook

    weight = model.get_parameter("2.weight")
    weight.register_post_accumulate_grad_hook(note("early"))
    weight.register_post_accumulate_grad_hook(_double)
    ddp = run.ddp(model)
    weight.register_hook(note("gradient"))
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(note("late"))
    train(run, ddp, **loop)
    run.note_values(**seen)


def _hook_node(parameter: Tensor, seen: list[Tensor]) -> list[Any]:
    """Register hooks on the ``AccumulateGrad`` node of a parameter that record the gradients they
    see. On rank 1, the first hook replaces the gradient by zeros; the second one waits for a moment
    in which a bucket could be launched. Return the function that removes the hooks, and the
    node."""
    node: Any = torch.autograd.graph.get_gradient_edge(parameter).node

    def before(gradients: Any) -> Any:
        seen.append(gradients[0].detach().clone())
        return (gradients[0] * (1 - dist.get_rank()),)

    def behind(_: Any, __: Any) -> None:
        assert parameter.grad is not None
        time.sleep(0.1)
        seen.append(parameter.grad.detach().clone())

    return [node.register_prehook(before), node.register_hook(behind), node]


def on_nodes(run: Run, *, is_compiled: bool = True, is_reentrant: bool = False) -> None:
    """Hooks on ``AccumulateGrad`` nodes that are registered and removed between steps. They see the
    gradient of this rank only, and may change it, also if it comes from a nested backward."""
    seen: list[Tensor] = []
    model = Checkpointed(reentrant=True) if is_reentrant else run.mlp(2)
    ddp, forward = run.compiled(model, bucket_cap_mb=1e-5)  # One bucket per gradient.
    weight = model.get_parameter("layers.2.weight" if is_reentrant else "0.weight")
    forward = forward if is_compiled else ddp
    backwards(run, ddp, forward, 1)
    *handles, _ = _hook_node(weight, seen)
    backwards(run, ddp, forward, 2, first=1)
    for handle in handles:
        handle.remove()
    backwards(run, ddp, forward, 1, first=3)
    run.note_values(**{str(number): value for number, value in enumerate(seen)})


def on_nodes_before(run: Run) -> None:
    """Hooks on nodes that are registered before the flag is set and DDP is constructed; gradients
    are kept, and the backward is inside of the compiled function."""
    seen: list[Tensor] = []
    model = run.mlp(2).to(run.device)
    with torch._inductor.config.patch(ddp_fusion=None):
        hooks = _hook_node(model.get_parameter("0.weight"), seen)
    loop: dict[str, Any] = {"steps": 2, "micro_batches": 2, "no_sync": True, "zero": "kept"}
    train(run, run.ddp(model), style="inside", **loop)
    run.note_values(**{str(number): value for number, value in enumerate(seen)})
    del hooks


def on_modules(run: Run) -> None:
    """Full backward hooks and forward hooks on a layer."""
    model = run.mlp()

    def on_backward(_: nn.Module, gradients: Any, __: Any) -> Any:
        return tuple(None if gradient is None else gradient * 2 for gradient in gradients)

    model[2].register_full_backward_hook(on_backward)
    model[2].register_forward_hook(lambda _, __, output: output * 2)
    train(run, run.ddp(model))


def _average_over(group: Any, parameter: nn.Parameter) -> None:
    """A hook that does line by line the same as DDP's own hook, and could be mistaken for it."""
    assert parameter.grad is not None
    gradient = parameter.grad / group.size()
    gradient = functional_collectives.all_reduce(gradient, "sum", group)
    parameter.grad.copy_(gradient)


def users_average(run: Run) -> None:
    """DDP over four ranks, but a user's hook averages the last layer over pairs of ranks."""
    groups = [dist.new_group(list(pair)) for pair in PAIRS[0]]
    model, names = run.mlp(), ["4.weight", "4.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    hook = functools.partial(_average_over, groups[dist.get_rank() // 2])
    for name in names:
        model.get_parameter(name).register_post_accumulate_grad_hook(hook)
    train(run, run.ddp(model), style="inside")


class _Nested(Exact, layer=WIDTH):
    """Exact. A compiled layer that is used once or twice. A hook on its first output calls
    ``torch.autograd.grad`` through it and drops the result, as in models whose backward solves an
    equation.

    Attributes:
        uses: number of calls of the layer.
        of_weight: whether the hook also asks for the weight's gradient.
    """

    def __init__(self, run: Run, uses: int, *, of_weight: bool) -> None:
        super().__init__()
        self.call = [run.compile(self.layer)]
        self.uses = uses
        self.of_weight = of_weight

    def forward(self, x: Tensor) -> Tensor:
        (call,) = self.call
        first = call(x)
        wanted = [x, self.layer.weight] if self.of_weight else [x]

        def nest(gradient: Tensor) -> None:
            handle.remove()
            torch.autograd.grad(first, wanted, gradient * 100, retain_graph=True)

        handle = first.register_hook(nest)
        result: Tensor = call(first) if self.uses == 2 else first
        return result[:, :OUTPUTS]


def nested_grad(run: Run, *, uses: int, of_weight: bool = False) -> None:
    """A nested backward through a compiled forward that the outer backward reaches too. Its
    gradients belong to no parameter."""
    ddp = run.ddp(_Nested(run, uses, of_weight=of_weight))
    backwards(run, ddp, lambda inputs: ddp(inputs.requires_grad_()))


def registered_meanwhile(run: Run, *, on_node: bool = False) -> None:
    """A hook on the output registers a hook on the first weight, or on its autograd node, while the
    backward runs."""
    ddp, forward = run.compiled(run.mlp(2))
    weight = ddp.module[0].weight
    node: Any = torch.autograd.graph.get_gradient_edge(weight).node
    for step in range(4):
        ddp.zero_grad()
        inputs, factors = run.rows(step)
        output, handles = forward(inputs), list[Any]()

        def register(_: Tensor, handles: list[Any] = handles) -> None:
            if on_node:
                handles.append(node.register_prehook(lambda gradients: (gradients[0] * 2,)))
            else:
                handles.append(weight.register_hook(lambda gradient: gradient * 2))

        if step != 1:
            output.register_hook(register)
        (output * factors).sum().backward()
        run.note_backward(ddp)
        for handle in handles:
            handle.remove()
