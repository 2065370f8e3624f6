"""What programs do around layers: custom functions, hooks, checkpoints, graph breaks, buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzzing.blocks.base import TOKENS, WIDTH, Computed, Plain, block, linear, weight


class Cube(torch.autograd.Function):
    """A function with a derivative of its own, which isn't the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        """Compute it."""
        ctx.save_for_backward(x, gain)
        return x * gain + 0.1 * x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what is passed on."""
        x, gain = ctx.saved_tensors
        return gradients[0] * gain, (gradients[0] * x).sum(0) * 2


@block
def custom_function() -> nn.Module:
    """Make a custom function with a parameter."""
    return Computed(lambda m, x, _: Cube.apply(x, m.gain), gain=weight(8))


class Reverse(torch.autograd.Function):
    """The identity, with the gradient turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute it."""
        ctx.factor = -0.5
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Compute what is passed on."""
        return gradients[0] * ctx.factor


@block
def reversed_gradient() -> nn.Module:
    """Make a layer in front of a reversed gradient."""
    return Computed(lambda m, x, _: Reverse.apply(m.inner(x)), inner=linear())


@block
def in_place() -> nn.Module:
    """Change activations in place."""
    return Computed(
        lambda m, x, _: m.b(m.a(x).add_(0.1).relu_()).add_(m.gain),
        a=linear(),
        b=linear(),
        gain=weight(8),
    )


@block
def in_place_slice() -> nn.Module:
    """Write into a part of an activation."""

    def write(m: Computed, x: Tensor, _: Tensor) -> Any:
        y = x.clone()
        y[:, :4] = m.inner(x)
        y[:, 4:] *= m.gain
        return y

    return Computed(write, inner=linear(8, 4), gain=weight(4))


def _mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


@block
def checkpointed() -> nn.Module:
    """Compute a part again in the backward."""
    return Computed(lambda m, x, _: checkpoint(m.inner, x, use_reentrant=False), inner=_mlp())


@block
def checkpointed_reentrant() -> nn.Module:
    """Compute a part again in a backward inside of the backward."""
    return Computed(lambda m, x, _: checkpoint(m.inner, x, use_reentrant=True), inner=_mlp())


@block
def checkpointed_twice() -> nn.Module:
    """Make a checkpoint in a checkpoint."""

    def run(m: Computed, x: Tensor) -> Any:
        return m.outer(checkpoint(m.inner, x, use_reentrant=False))

    return Computed(
        lambda m, x, _: checkpoint(run, m, x, use_reentrant=False), inner=_mlp(), outer=linear()
    )


class Disabled(nn.Module):
    """A layer that is never compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(x))


@block
def disabled() -> nn.Module:
    """Make a layer that is never compiled."""
    return Plain(Disabled())


@block
def graph_break() -> nn.Module:
    """Break the graph."""

    def run(m: Computed, x: Tensor, _: Tensor) -> Any:
        x = m.a(x)
        torch._dynamo.graph_break()
        return m.b(torch.tanh(x))

    return Computed(run, a=linear(), b=linear())


@block
def read_value() -> nn.Module:
    """Read a number of a tensor in the forward."""

    def run(m: Computed, x: Tensor, t: Tensor) -> Any:
        y = m.inner(x)
        return y * 0.5 if t.sum().item() >= 0 else -y

    return Computed(run, inner=linear())


def _double(gradient: Tensor) -> Tensor:
    return gradient * 2


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


@torch.compiler.disable
def _double_disabled(gradient: Tensor) -> Tensor:
    return gradient * 2


def _hook_activation(x: Tensor, hook: Any) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


@block
def hook_on_activation() -> nn.Module:
    """Hook an activation."""
    return Computed(lambda m, x, _: _hook_activation(m.inner(x), _double) * 0.5, inner=linear())


@block
def hook_on_activation_clamping() -> nn.Module:
    """Hook an activation with a function that isn't linear."""
    return Computed(lambda m, x, _: _hook_activation(m.inner(x), _clamp), inner=linear())


@block
def hook_on_activation_disabled() -> nn.Module:
    """Hook an activation with a function that is never compiled."""
    return Computed(lambda m, x, _: _hook_activation(m.inner(x), _double_disabled), inner=linear())


def _hooked_weight(hook: Any) -> nn.Module:
    inner = linear()
    inner.weight.register_hook(hook)
    return Plain(inner)


@block
def hook_on_parameter() -> nn.Module:
    """Hook a parameter."""
    return _hooked_weight(_double)


@block
def hook_on_parameter_clamping() -> nn.Module:
    """Hook a parameter with a function that isn't linear."""
    return _hooked_weight(_clamp)


@block
def hook_on_parameter_disabled() -> nn.Module:
    """Hook a parameter with a function that is never compiled."""
    return _hooked_weight(_double_disabled)


@block
def hook_after_accumulation() -> nn.Module:
    """Hook a parameter's accumulated gradient, before DDP does."""
    inner = linear()
    inner.weight.register_post_accumulate_grad_hook(_halve)
    return Plain(inner)


def _halve(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


@block
def hook_on_layer() -> nn.Module:
    """Hook a layer's forward and backward."""
    inner = linear()
    inner.register_full_backward_hook(lambda *a: (a[1][0] * 0.5,))
    inner.register_forward_pre_hook(lambda *a: (torch.tanh(a[1][0]),))
    inner.register_forward_hook(lambda *a: a[2] * 1.5)
    return Plain(inner)


@block
def used_twice() -> nn.Module:
    """Use a layer twice."""
    return Computed(lambda m, x, _: m.inner(torch.tanh(m.inner(x))), inner=linear())


@block
def shared_child() -> nn.Module:
    """Share a layer between two parents."""
    child = linear()
    first, second = nn.Sequential(child, nn.Tanh()), nn.Sequential(linear(), nn.Tanh(), child)
    return Computed(lambda m, x, _: m.first(x) + m.second(x), first=first, second=second)


class Running(nn.Module):
    """A mean of what passed, and a counter of integers, as buffers."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("unsaved", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        with torch.no_grad():
            self.mean.lerp_(y.detach().mean(0).to(self.mean.dtype), 0.1)
            self.count += 1
        return y - self.mean


@block
def running_mean() -> nn.Module:
    """Update buffers in the forward."""
    return Plain(Running())


class Replaced(nn.Module):
    """A buffer that is a new tensor after each forward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x) * self.scale
        if self.training:
            self.scale = self.scale * 0.9 + 0.1 * y.detach().float().abs().mean(0)
        return y


@block
def replaced_buffer() -> nn.Module:
    """Replace a buffer in the forward."""
    return Plain(Replaced())


class Counting(nn.Module):
    """A number of Python's that changes what is computed, so that Dynamo compiles anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.calls += 1
        return self.inner(x) if self.calls < 2 else torch.tanh(self.inner(x))


@block
def recompiled() -> nn.Module:
    """Compile anew in the middle of the training."""
    return Plain(Counting())


@block
def gather() -> nn.Module:
    """Gather rows and scatter into others."""

    def run(m: Computed, x: Tensor, t: Tensor) -> Any:
        rows = torch.tanh(m.table).index_select(0, t)
        sums = m.table.new_zeros(TOKENS, WIDTH).index_add(0, t, x.to(m.table.dtype))
        return x + rows + 0.1 * sums.gather(0, t[:, None].expand(-1, WIDTH))

    return Computed(run, table=weight(TOKENS, WIDTH))


@block
def einsum() -> nn.Module:
    """Contract three factors."""
    return Computed(
        lambda m, x, _: torch.einsum("bi,ijk,jl->bl", x, m.a, m.b),
        a=weight(8, 2, 3),
        b=weight(2, 8),
    )


@block
def scan() -> nn.Module:
    """Run a linear recurrence in a Python loop."""

    def run(m: Computed, x: Tensor, _: Tensor) -> Any:
        state, states = x[:, 0] * 0, []
        for column in x.unbind(1):
            state = torch.sigmoid(m.decay) * state + column
            states.append(state)
        return torch.stack(states, 1) * m.gain

    return Computed(run, decay=weight(), gain=weight(8))


@block
def rearranged() -> nn.Module:
    """Reshape and permute, as einops does."""

    def run(m: Computed, x: Tensor, _: Tensor) -> Any:
        x = x.reshape(-1, 2, 2, 2).permute(0, 3, 1, 2).reshape(-1, 2, 4)
        return m.inner(x).transpose(1, 2).reshape(-1, WIDTH)

    return Computed(run, inner=linear(4, 4))


@block
def sorted_sums() -> nn.Module:
    """Add up, take maxima and logarithms of sums."""
    return Computed(
        lambda m, x, _: m.inner(x).cumsum(1) * 0.2 + torch.logsumexp(x * m.gain, 1, keepdim=True),
        inner=linear(),
        gain=weight(8),
    )


@block
def merged() -> nn.Module:
    """Merge three inputs, one of them without a gradient."""
    return Computed(
        lambda m, x, t: m.inner(torch.cat([x, m.side(x.detach()), m.table(t)], 1)),
        inner=linear(24, 8),
        side=linear(),
        table=nn.Embedding(TOKENS, WIDTH),
    )


@block
def stopped() -> nn.Module:
    """Compute a target without gradients, beside a branch with them."""

    def run(m: Computed, x: Tensor, _: Tensor) -> Any:
        with torch.no_grad():
            target = m.inner(x)
        return m.inner(x) - 0.5 * target

    return Computed(run, inner=linear())


@block
def functional() -> nn.Module:
    """Call a layer with parameters that are computed."""

    def run(m: Computed, x: Tensor, _: Tensor) -> Any:
        values = {name: value * 0.5 for name, value in m.inner.named_parameters()}
        return torch.func.functional_call(m.inner, values, (x,))

    return Computed(run, inner=linear())


@block
def vectorised() -> nn.Module:
    """Map a function over the rows."""
    return Computed(
        lambda m, x, _: torch.vmap(lambda row: torch.tanh(m.matrix @ row))(x), matrix=weight(8, 8)
    )


@block
def without_autocast() -> nn.Module:
    """Leave autocast for a layer."""

    def run(m: Computed, x: Tensor, _: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return m.inner(x.float())

    return Computed(run, inner=linear())
