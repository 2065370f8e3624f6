"""The blocks of random models: each maps rows of 8 numbers, with one token per row, to rows of 8
numbers.

All blocks have this shape, so that any block can follow any other, and compiled kernels are found
in the cache. A new or removed name changes the cases of all seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH: Final = 8
TOKENS: Final = 6


class Plain(nn.Module):
    """A module that works on rows in another shape, such as ``(2, 4)`` for two channels."""

    def __init__(self, inner: nn.Module, *shape: int) -> None:
        super().__init__()
        self.inner = inner
        self.shape = shape

    def forward(self, x: Tensor, _: Tensor) -> Any:
        if not self.shape:
            return self.inner(x)
        return self.inner(x.reshape(x.shape[0], *self.shape)).reshape(x.shape[0], WIDTH)


class Computed(nn.Module):
    """Modules, parameters, buffers and numbers, with a function of them, the rows and the
    tokens."""

    def __init__(
        self, compute: Callable[[Computed, Tensor, Tensor], Any], **parts: nn.Module | Tensor | int
    ) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        return self.compute(self, x, tokens)


def _weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter whose rows have about unit length."""
    return nn.Parameter(torch.randn(shape, dtype=dtype) * (shape[-1] if shape else 1) ** -0.5)


def _linear(width: int = WIDTH, out: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, out)


def _around(compute: Callable[[Computed, Tensor, Tensor], Any]) -> Callable[[], nn.Module]:
    """Returns a maker of a linear layer ``m.inner`` with a function of it, the rows and the
    tokens."""
    return lambda: Computed(compute, inner=_linear())


def _changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Returns a maker of a changed linear layer."""

    def make() -> nn.Module:
        inner = _linear()
        change(inner)
        return Plain(inner)

    return make


# --- Layers: linear, convolution, normalisation, recurrent, attention ---------------------------


def _lazy() -> nn.Module:
    """A lazy layer that got its width from a first call."""
    layer = nn.LazyLinear(WIDTH)
    layer(torch.zeros(2, WIDTH))
    return Plain(layer)


def _recur(m: Computed, x: Tensor, _: Tensor) -> Any:
    return m.inner(x.reshape(-1, 2, 4))[0].reshape(-1, WIDTH)


def _scan_by_cells(m: Computed, x: Tensor, _: Tensor) -> Any:
    state = (x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4))
    outputs = []
    for step in x.reshape(-1, 2, 4).unbind(1):
        state = m.cell(step, state)
        outputs.append(state[0])
    return torch.cat(outputs, 1)


def _attend(m: Computed, x: Tensor, _: Tensor) -> Any:
    x = x.reshape(-1, 2, 4)
    return m.inner(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)


def _attend_causally(m: Computed, x: Tensor, _: Tensor) -> Any:
    q, k, v = m.projections(x.reshape(-1, 2, 4)).chunk(3, -1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(y).reshape(-1, WIDTH)


def _attend_by_hand(m: Computed, x: Tensor, _: Tensor) -> Any:
    x = x.reshape(-1, 2, 4)
    scores = torch.einsum("bid,de,bje->bij", x, m.qk, x) + m.bias
    return torch.einsum("bij,bjd->bid", scores.softmax(-1), m.value(x)).reshape(-1, WIDTH)


def _look_up_bags(m: Computed, x: Tensor, t: Tensor) -> Any:
    return x + m.table(torch.stack([t, (t + 1) % TOKENS], 1))


def _mix_experts(m: Computed, x: Tensor, _: Tensor) -> Any:
    outputs = torch.stack([m.a(x), m.b(x)], 1)
    return torch.einsum("bk,bkd->bd", m.router(x).softmax(1), outputs)


_LAYERS: Final[dict[str, Callable[[], nn.Module]]] = {
    "dense": lambda: Plain(_linear()),
    "dense_without_bias": lambda: Plain(nn.Linear(WIDTH, WIDTH, bias=False)),
    "mlp": lambda: Plain(nn.Sequential(_linear(WIDTH, 16), nn.GELU(), _linear(16, WIDTH))),
    # Many small gradients, and some that are larger than a bucket.
    "deep": lambda: Plain(nn.Sequential(*(f() for _ in range(5) for f in (_linear, nn.Tanh)))),
    "wide": lambda: Plain(nn.Sequential(_linear(WIDTH, 512), nn.Tanh(), _linear(512, WIDTH))),
    "swiglu": lambda: Computed(
        lambda m, x, _: m.down(F.silu(m.gate(x)) * m.up(x)),
        gate=_linear(WIDTH, 16),
        up=_linear(WIDTH, 16),
        down=_linear(16, WIDTH),
    ),
    "glu": lambda: Plain(nn.Sequential(_linear(WIDTH, 16), nn.GLU())),
    "bilinear": lambda: Computed(
        lambda m, x, _: m.inner(x, x), inner=nn.Bilinear(WIDTH, WIDTH, WIDTH)
    ),
    # An adapter parallel to a frozen layer.
    "low_rank": lambda: Computed(
        lambda m, x, _: m.frozen(x) + x @ m.a @ m.b,
        frozen=_linear().requires_grad_(False),
        a=_weight(8, 2),
        b=_weight(2, 8),
    ),
    "conv1d": lambda: Plain(nn.Conv1d(2, 2, 3, padding=1), 2, 4),
    "conv1d_circular": lambda: Plain(
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular", bias=False), 2, 4
    ),
    "conv2d": lambda: Plain(nn.Conv2d(2, 2, 3, padding=1), 2, 2, 2),
    "conv2d_channels_last": lambda: Plain(
        nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        2,
        2,
        2,
    ),
    "conv2d_grouped": lambda: Plain(nn.Conv2d(2, 2, 3, padding=1, groups=2), 2, 2, 2),
    "conv3d": lambda: Plain(nn.Conv3d(1, 1, 3, padding=1), 1, 2, 2, 2),
    "transposed_conv1d": lambda: Plain(nn.ConvTranspose1d(2, 2, 3, padding=1), 2, 4),
    "transposed_conv2d": lambda: Plain(
        nn.Sequential(nn.ConvTranspose2d(2, 2, 2, stride=2), nn.AvgPool2d(2)), 2, 2, 2
    ),
    "lazy": _lazy,
    "layer_norm": lambda: Plain(nn.LayerNorm(WIDTH)),
    "rms_norm": lambda: Plain(nn.RMSNorm(WIDTH)),
    "group_norm": lambda: Plain(nn.GroupNorm(1, 2), 2, 4),
    "instance_norm": lambda: Plain(
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True), 2, 4
    ),
    "batch_norm": lambda: Plain(nn.BatchNorm1d(2), 2, 4),
    "batch_norm_2d": lambda: Plain(
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()), 2, 2, 2
    ),
    # It averages by its number of batches.
    "batch_norm_counting": lambda: Plain(nn.BatchNorm1d(2, momentum=None), 2, 4),
    "batch_norm_frozen": lambda: Plain(
        nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Conv1d(2, 2, 1)), 2, 4
    ),
    "embedding": lambda: Computed(
        lambda m, x, t: x + m.table(t), table=nn.Embedding(TOKENS, WIDTH)
    ),
    # One row gets no gradient.
    "embedding_padded": lambda: Computed(
        lambda m, x, t: x * torch.tanh(m.table(t)), table=nn.Embedding(TOKENS, WIDTH, padding_idx=0)
    ),
    "embedding_bag": lambda: Computed(
        _look_up_bags, table=nn.EmbeddingBag(TOKENS, WIDTH, mode="mean")
    ),
    # The embedding is also the weight of the logits layer.
    "embedding_tied": lambda: Computed(
        lambda m, x, t: ((x + m.table(t)) @ m.table.weight.t()).softmax(1) @ m.table.weight,
        table=nn.Embedding(TOKENS, WIDTH),
    ),
    "rnn": lambda: Computed(_recur, inner=nn.RNN(4, 4, batch_first=True)),
    "gru": lambda: Computed(_recur, inner=nn.GRU(4, 4, batch_first=True)),
    "lstm": lambda: Computed(_recur, inner=nn.LSTM(4, 4, num_layers=2, batch_first=True)),
    "lstm_cell": lambda: Computed(_scan_by_cells, cell=nn.LSTMCell(4, 4)),
    "gru_cell": lambda: Computed(
        lambda m, x, _: m.cell(x, torch.tanh(x)), cell=nn.GRUCell(WIDTH, WIDTH)
    ),
    "attention": lambda: Computed(_attend, inner=nn.MultiheadAttention(4, 2, batch_first=True)),
    "attention_causal": lambda: Computed(
        _attend_causally, projections=_linear(4, 12), out=_linear(4, 4)
    ),
    "attention_by_hand": lambda: Computed(
        _attend_by_hand, qk=_weight(4, 4), bias=_weight(2, 2), value=_linear(4, 4)
    ),
    "transformer_layer": lambda: Plain(
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2, 4
    ),
    "experts": lambda: Computed(_mix_experts, router=_linear(WIDTH, 2), a=_linear(), b=_linear()),
    "dropout": lambda: Plain(nn.Sequential(_linear(), nn.Dropout(0.0), nn.PReLU())),
    "prelu": lambda: Plain(nn.PReLU(2), 2, 4),
    "residual": lambda: Computed(
        lambda m, x, _: x + m.inner(x),
        inner=nn.Sequential(nn.LayerNorm(WIDTH), _linear(WIDTH, 16), nn.SiLU(), _linear(16, WIDTH)),
    ),
    "upsample": lambda: Plain(
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv1d(2, 2, 1), nn.AvgPool1d(2)), 2, 4
    ),
}


# --- Parameters of all kinds: dtypes, layouts, ties, frozen ones, parametrizations --------------


def _rotate(m: Computed, x: Tensor, _: Tensor) -> Any:
    pairs = torch.view_as_complex(x.reshape(-1, 4, 2).contiguous())
    return torch.view_as_real(pairs @ m.matrix).reshape(-1, WIDTH)


def _one_storage() -> nn.Module:
    """Parameters that are views of one buffer."""
    flat = torch.randn(80) * 0.3
    return Computed(
        lambda m, x, _: F.linear(x, m.weight, m.bias),
        weight=nn.Parameter(flat[:64].view(8, 8)),
        bias=nn.Parameter(flat[64:72]),
    )


def _frozen() -> nn.Module:
    middle = _linear().requires_grad_(False)
    return Plain(nn.Sequential(_linear(), middle, nn.Tanh(), _linear()))


def _tied() -> nn.Module:
    first, second = _linear(), _linear()
    second.weight = first.weight
    return Plain(nn.Sequential(first, nn.Tanh(), second))


class _Symmetric(nn.Module):
    """A parametrization of symmetric matrices."""

    def forward(self, matrix: Tensor) -> Any:
        return matrix.triu() + matrix.triu(1).transpose(-1, -2)


class _Marked(nn.Parameter):
    """A parameter of a subclass."""


def _swap(layer: nn.Linear) -> None:
    """Replace a layer's weight."""
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)
    layer.bias.data = torch.ones(WIDTH)


_PARAMETERS: Final[dict[str, Callable[[], nn.Module]]] = {
    "bf16": lambda: Computed(
        lambda m, x, _: m.inner(x.bfloat16()).to(x.dtype), inner=_linear().to(torch.bfloat16)
    ),
    "fp64": lambda: Computed(
        lambda m, x, _: m.inner(x.double()).to(x.dtype), inner=_linear().double()
    ),
    "complex_diagonal": lambda: Computed(
        lambda m, x, _: torch.fft.irfft(torch.fft.rfft(x) * m.factor, n=WIDTH),
        factor=_weight(5, dtype=torch.complex64),
    ),
    "complex_rotation": lambda: Computed(_rotate, matrix=_weight(4, 4, dtype=torch.complex64)),
    "scalar": lambda: Computed(lambda m, x, _: x * m.gain, gain=_weight()),
    "scalars": lambda: Computed(
        lambda m, x, _: torch.tanh(x * m.a + m.b) * m.c, a=_weight(1), b=_weight(1, 1), c=_weight()
    ),
    "empty": lambda: Computed(
        lambda m, x, _: m.inner(x) + m.none.sum(0), none=_weight(0, 8), inner=_linear()
    ),
    # Rows as the last dimension in memory, permuted dimensions, and gaps.
    "transposed": lambda: Computed(
        lambda m, x, _: x @ m.matrix, matrix=nn.Parameter(_weight(8, 8).detach().t())
    ),
    "permuted": lambda: Computed(
        lambda m, x, _: torch.einsum("bd,dij->bij", x, m.w).reshape(-1, 8),
        w=nn.Parameter(_weight(4, 8, 2).detach().permute(1, 2, 0)),
    ),
    "strided": lambda: Computed(
        lambda m, x, _: x @ m.matrix, matrix=nn.Parameter(_weight(8, 16).detach()[:, ::2])
    ),
    "one_storage": _one_storage,
    "swapped_before": _changed(_swap),
    "frozen": _frozen,
    "frozen_bias": _changed(lambda layer: layer.bias.requires_grad_(False)),
    "tied": _tied,
    # An autoencoder with one weight.
    "tied_transposed": lambda: Computed(
        lambda m, x, _: torch.tanh(m.encoder(x)) @ m.encoder.weight + m.bias,
        encoder=_linear(8, 4),
        bias=_weight(8),
    ),
    "weight_norm": lambda: Plain(parametrizations.weight_norm(_linear())),
    # Its buffers change in each forward.
    "spectral_norm": lambda: Plain(parametrizations.spectral_norm(_linear())),
    "orthogonal": lambda: Plain(parametrizations.orthogonal(_linear(), orthogonal_map="cayley")),
    "symmetric": _changed(
        lambda layer: parametrize.register_parametrization(layer, "weight", _Symmetric())
    ),
    "parameter_subclass": _changed(
        lambda layer: setattr(layer, "weight", _Marked(layer.weight.detach()))
    ),
    "parameter_list": lambda: Computed(
        lambda m, x, _: torch.tanh(x @ m.many[0] + m.named["b"]) @ m.many[1],
        many=nn.ParameterList([_weight(8, 8), _weight(8, 8)]),
        named=nn.ParameterDict({"b": _weight(8)}),
    ),
    "module_dict": lambda: Computed(
        lambda m, x, _: m.inner["out"](sum(torch.tanh(layer(x)) for layer in m.inner["in"])),
        inner=nn.ModuleDict({"in": nn.ModuleList([_linear(), _linear()]), "out": _linear()}),
    ),
    # The rest of its gradient is zero.
    "sliced": lambda: Computed(
        lambda m, x, _: x @ m.table[2:10] + m.table[0], table=_weight(12, 8)
    ),
    # Another layer computes the weight.
    "hypernetwork": lambda: Computed(
        lambda m, x, _: x @ m.maker(m.code).reshape(8, 8), code=_weight(4), maker=_linear(4, 64)
    ),
    "standardised": lambda: Computed(
        lambda m, x, _: x @ F.normalize(m.matrix, dim=0), matrix=_weight(8, 8)
    ),
    # A parameter that is used once with and once without a gradient.
    "detached": _around(lambda m, x, _: m.inner(x) - 0.5 * m.inner.weight.detach()[0]),
    # DDP ignores it: see :class:`fuzzing.models.Model`.
    "ignored": _changed(lambda layer: setattr(layer, "ddp_ignores", True)),
}


# --- What programs do around layers: custom functions, hooks, checkpoints, graph breaks, buffers -


class _Cube(torch.autograd.Function):
    """A function with a custom derivative, which isn't the true one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain + 0.1 * x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return gradients[0] * gain, (gradients[0] * x).sum(0) * 2


class _Reverse(torch.autograd.Function):
    """The identity, with a negated gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = -0.5
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor


def _write_slice(m: Computed, x: Tensor, _: Tensor) -> Any:
    y = x.clone()
    y[:, :4] = m.inner(x)
    y[:, 4:] *= m.gain
    return y


def _mlp() -> nn.Sequential:
    return nn.Sequential(_linear(), nn.Tanh(), _linear())


def _checkpoint_again(m: Computed, x: Tensor) -> Any:
    return m.outer(checkpoint(m.inner, x, use_reentrant=False))


def _break_graph(m: Computed, x: Tensor, _: Tensor) -> Any:
    x = m.a(x)
    torch._dynamo.graph_break()
    return m.b(torch.tanh(x))


def _read_value(m: Computed, x: Tensor, t: Tensor) -> Any:
    y = m.inner(x)
    return y * 0.5 if t.sum().item() >= 0 else -y


def _double(gradient: Tensor) -> Tensor:
    return gradient * 2


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


_double_disabled: Final = torch.compiler.disable(_double)


def _hook_activation(x: Tensor, hook: Any) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


def _halve(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _hook_layer(layer: nn.Linear) -> None:
    layer.register_full_backward_hook(lambda *a: (a[1][0] * 0.5,))
    layer.register_forward_pre_hook(lambda *a: (torch.tanh(a[1][0]),))
    layer.register_forward_hook(lambda *a: a[2] * 1.5)


def _shared_child() -> nn.Module:
    """A layer that two parents share."""
    child = _linear()
    first, second = nn.Sequential(child, nn.Tanh()), nn.Sequential(_linear(), nn.Tanh(), child)
    return Computed(lambda m, x, _: m.first(x) + m.second(x), first=first, second=second)


def _take_mean(m: Computed, x: Tensor, _: Tensor) -> Any:
    """A mean of earlier rows, and an integer counter, as buffers."""
    y = m.inner(x)
    with torch.no_grad():
        m.mean.lerp_(y.detach().mean(0).to(m.mean.dtype), 0.1)
        m.count += 1
    return y - m.mean


def _replace_buffer(m: Computed, x: Tensor, _: Tensor) -> Any:
    """A buffer that is a new tensor after each forward."""
    y = m.inner(x) * m.scale
    if m.training:
        m.scale = m.scale * 0.9 + 0.1 * y.detach().float().abs().mean(0)
    return y


def _count_calls(m: Computed, x: Tensor, _: Tensor) -> Any:
    """A Python number that changes the computation, so that Dynamo recompiles."""
    if m.training:
        m.calls += 1
    return m.inner(x) if m.calls < 2 else torch.tanh(m.inner(x))


def _gather(m: Computed, x: Tensor, t: Tensor) -> Any:
    rows = torch.tanh(m.table).index_select(0, t)
    sums = m.table.new_zeros(TOKENS, WIDTH).index_add(0, t, x.to(m.table.dtype))
    return x + rows + 0.1 * sums.gather(0, t[:, None].expand(-1, WIDTH))


def _scan(m: Computed, x: Tensor, _: Tensor) -> Any:
    """A linear recurrence in a Python loop."""
    state, states = x[:, 0] * 0, []
    for column in x.unbind(1):
        state = torch.sigmoid(m.decay) * state + column
        states.append(state)
    return torch.stack(states, 1) * m.gain


def _rearrange(m: Computed, x: Tensor, _: Tensor) -> Any:
    """Reshape and permute, as einops does."""
    x = x.reshape(-1, 2, 2, 2).permute(0, 3, 1, 2).reshape(-1, 2, 4)
    return m.inner(x).transpose(1, 2).reshape(-1, WIDTH)


def _stop(m: Computed, x: Tensor, _: Tensor) -> Any:
    """A target without gradients, and a branch with them."""
    with torch.no_grad():
        target = m.inner(x)
    return m.inner(x) - 0.5 * target


def _call_functionally(m: Computed, x: Tensor, _: Tensor) -> Any:
    """A layer whose parameters are computed."""
    values = {name: value * 0.5 for name, value in m.inner.named_parameters()}
    return torch.func.functional_call(m.inner, values, (x,))


def _leave_autocast(m: Computed, x: Tensor, _: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return m.inner(x.float())


_PROGRAM: Final[dict[str, Callable[[], nn.Module]]] = {
    "custom_function": lambda: Computed(lambda m, x, _: _Cube.apply(x, m.gain), gain=_weight(8)),
    "reversed_gradient": _around(lambda m, x, _: _Reverse.apply(m.inner(x))),
    "in_place": lambda: Computed(
        lambda m, x, _: m.b(m.a(x).add_(0.1).relu_()).add_(m.gain),
        a=_linear(),
        b=_linear(),
        gain=_weight(8),
    ),
    "in_place_slice": lambda: Computed(_write_slice, inner=_linear(8, 4), gain=_weight(4)),
    "checkpointed": lambda: Computed(
        lambda m, x, _: checkpoint(m.inner, x, use_reentrant=False), inner=_mlp()
    ),
    "checkpointed_reentrant": lambda: Computed(
        lambda m, x, _: checkpoint(m.inner, x, use_reentrant=True), inner=_mlp()
    ),
    "checkpointed_twice": lambda: Computed(
        lambda m, x, _: checkpoint(_checkpoint_again, m, x, use_reentrant=False),
        inner=_mlp(),
        outer=_linear(),
    ),
    "disabled": _around(torch.compiler.disable(lambda m, x, _: torch.tanh(m.inner(x)))),
    "graph_break": lambda: Computed(_break_graph, a=_linear(), b=_linear()),
    "read_value": _around(_read_value),
    "hook_on_activation": _around(lambda m, x, _: _hook_activation(m.inner(x), _double) * 0.5),
    "hook_on_activation_clamping": _around(lambda m, x, _: _hook_activation(m.inner(x), _clamp)),
    "hook_on_activation_disabled": _around(
        lambda m, x, _: _hook_activation(m.inner(x), _double_disabled)
    ),
    "hook_on_parameter": _changed(lambda layer: layer.weight.register_hook(_double)),
    "hook_on_parameter_clamping": _changed(lambda layer: layer.weight.register_hook(_clamp)),
    "hook_on_parameter_disabled": _changed(
        lambda layer: layer.weight.register_hook(_double_disabled)
    ),
    # A hook on the accumulated gradient, registered before DDP has one.
    "hook_after_accumulation": _changed(
        lambda layer: layer.weight.register_post_accumulate_grad_hook(_halve)
    ),
    "hook_on_layer": _changed(_hook_layer),
    "used_twice": _around(lambda m, x, _: m.inner(torch.tanh(m.inner(x)))),
    "shared_child": _shared_child,
    "running_mean": lambda: Computed(
        _take_mean,
        inner=_linear(),
        mean=nn.Buffer(torch.zeros(WIDTH)),
        count=nn.Buffer(torch.zeros((), dtype=torch.long)),
        unsaved=nn.Buffer(torch.ones(WIDTH), persistent=False),
    ),
    "replaced_buffer": lambda: Computed(
        _replace_buffer, inner=_linear(), scale=nn.Buffer(torch.ones(WIDTH))
    ),
    "recompiled": lambda: Computed(_count_calls, inner=_linear(), calls=0),
    "gather": lambda: Computed(_gather, table=_weight(TOKENS, WIDTH)),
    "einsum": lambda: Computed(
        lambda m, x, _: torch.einsum("bi,ijk,jl->bl", x, m.a, m.b),
        a=_weight(8, 2, 3),
        b=_weight(2, 8),
    ),
    "scan": lambda: Computed(_scan, decay=_weight(), gain=_weight(8)),
    "rearranged": lambda: Computed(_rearrange, inner=_linear(4, 4)),
    "sorted_sums": lambda: Computed(
        lambda m, x, _: m.inner(x).cumsum(1) * 0.2 + torch.logsumexp(x * m.gain, 1, keepdim=True),
        inner=_linear(),
        gain=_weight(8),
    ),
    "merged": lambda: Computed(
        lambda m, x, t: m.inner(torch.cat([x, m.side(x.detach()), m.table(t)], 1)),
        inner=_linear(24, 8),
        side=_linear(),
        table=nn.Embedding(TOKENS, WIDTH),
    ),
    "stopped": _around(_stop),
    "functional": _around(_call_functionally),
    "vectorised": lambda: Computed(
        lambda m, x, _: torch.vmap(lambda row: torch.tanh(m.matrix @ row))(x), matrix=_weight(8, 8)
    ),
    "without_autocast": _around(_leave_autocast),
}

BLOCKS: Final = _LAYERS | _PARAMETERS | _PROGRAM
"""All blocks: makers by name."""
