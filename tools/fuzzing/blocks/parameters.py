"""Parameters of all kinds: dtypes, layouts, ties, frozen ones, parametrizations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fuzzing.blocks.base import WIDTH, Computed, Plain, block, linear, weight


@block
def bf16() -> nn.Module:
    """Make a layer in bf16."""
    return Computed(
        lambda m, x, _: m.inner(x.bfloat16()).to(x.dtype), inner=linear().to(torch.bfloat16)
    )


@block
def fp64() -> nn.Module:
    """Make a layer in fp64."""
    return Computed(lambda m, x, _: m.inner(x.double()).to(x.dtype), inner=linear().double())


@block
def complex_diagonal() -> nn.Module:
    """Make complex parameters, through a Fourier transform."""
    return Computed(
        lambda m, x, _: torch.fft.irfft(torch.fft.rfft(x) * m.factor, n=WIDTH),
        factor=weight(5, dtype=torch.complex64),
    )


@block
def complex_rotation() -> nn.Module:
    """Make a complex matrix."""

    def rotate(m: Computed, x: Tensor, _: Tensor) -> Any:
        pairs = torch.view_as_complex(x.reshape(-1, 4, 2).contiguous())
        return torch.view_as_real(pairs @ m.matrix).reshape(-1, WIDTH)

    return Computed(rotate, matrix=weight(4, 4, dtype=torch.complex64))


@block
def scalar() -> nn.Module:
    """Make a parameter without a dimension."""
    return Computed(lambda m, x, _: x * m.gain, gain=weight())


@block
def scalars() -> nn.Module:
    """Make gains of several shapes with one element."""
    return Computed(
        lambda m, x, _: torch.tanh(x * m.a + m.b) * m.c, a=weight(1), b=weight(1, 1), c=weight()
    )


@block
def empty() -> nn.Module:
    """Make a parameter without an element."""
    return Computed(lambda m, x, _: m.inner(x) + m.none.sum(0), none=weight(0, 8), inner=linear())


@block
def transposed() -> nn.Module:
    """Make a weight whose rows are last in memory."""
    return Computed(lambda m, x, _: x @ m.matrix, matrix=nn.Parameter(weight(8, 8).detach().t()))


@block
def permuted() -> nn.Module:
    """Make a weight of three permuted dimensions."""
    matrix = nn.Parameter(weight(4, 8, 2).detach().permute(1, 2, 0))
    return Computed(lambda m, x, _: torch.einsum("bd,dij->bij", x, m.w).reshape(-1, 8), w=matrix)


@block
def strided() -> nn.Module:
    """Make a weight with gaps in memory."""
    matrix = nn.Parameter(weight(8, 16).detach()[:, ::2])
    return Computed(lambda m, x, _: x @ m.matrix, matrix=matrix)


@block
def one_storage() -> nn.Module:
    """Make parameters that are views of one buffer."""
    flat = torch.randn(80) * 0.3
    return Computed(
        lambda m, x, _: F.linear(x, m.weight, m.bias),
        weight=nn.Parameter(flat[:64].view(8, 8)),
        bias=nn.Parameter(flat[64:72]),
    )


@block
def swapped_before() -> nn.Module:
    """Make a layer whose weight was replaced."""
    inner = linear()
    inner.weight = nn.Parameter(inner.weight.detach() * 0.5)
    inner.bias.data = torch.ones(WIDTH)
    return Plain(inner)


@block
def frozen() -> nn.Module:
    """Make a frozen layer between others."""
    middle = linear().requires_grad_(False)
    return Plain(nn.Sequential(linear(), middle, nn.Tanh(), linear()))


@block
def frozen_bias() -> nn.Module:
    """Make a layer with a frozen bias."""
    inner = linear()
    inner.bias.requires_grad_(False)
    return Plain(inner)


@block
def tied() -> nn.Module:
    """Make two layers with one weight."""
    first, second = linear(), linear()
    second.weight = first.weight
    return Plain(nn.Sequential(first, nn.Tanh(), second))


@block
def tied_transposed() -> nn.Module:
    """Make an autoencoder with one weight."""
    return Computed(
        lambda m, x, _: torch.tanh(m.encoder(x)) @ m.encoder.weight + m.bias,
        encoder=linear(8, 4),
        bias=weight(8),
    )


@block
def weight_norm() -> nn.Module:
    """Make torch's weight_norm."""
    return Plain(parametrizations.weight_norm(linear()))


@block
def spectral_norm() -> nn.Module:
    """Make torch's spectral_norm, whose buffers change in each forward."""
    return Plain(parametrizations.spectral_norm(linear()))


@block
def orthogonal() -> nn.Module:
    """Make an orthogonal weight."""
    return Plain(parametrizations.orthogonal(linear(), orthogonal_map="cayley"))


class Symmetric(nn.Module):
    """A parametrization of symmetric matrices."""

    def forward(self, matrix: Tensor) -> Any:
        return matrix.triu() + matrix.triu(1).transpose(-1, -2)


@block
def symmetric() -> nn.Module:
    """Make a symmetric weight."""
    inner = linear()
    parametrize.register_parametrization(inner, "weight", Symmetric())
    return Plain(inner)


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


@block
def parameter_subclass() -> nn.Module:
    """Make a parameter of a class of its own."""
    inner = linear()
    inner.weight = Marked(inner.weight.detach())
    return Plain(inner)


@block
def parameter_list() -> nn.Module:
    """Make parameters in a list and a dict."""
    return Computed(
        lambda m, x, _: torch.tanh(x @ m.many[0] + m.named["b"]) @ m.many[1],
        many=nn.ParameterList([weight(8, 8), weight(8, 8)]),
        named=nn.ParameterDict({"b": weight(8)}),
    )


@block
def module_dict() -> nn.Module:
    """Make layers in a dict of lists."""
    inner = nn.ModuleDict({"in": nn.ModuleList([linear(), linear()]), "out": linear()})
    return Computed(
        lambda m, x, _: m.inner["out"](sum(torch.tanh(layer(x)) for layer in m.inner["in"])),
        inner=inner,
    )


@block
def sliced() -> nn.Module:
    """Use a part of a weight: the rest of its gradient is zero."""
    return Computed(lambda m, x, _: x @ m.table[2:10] + m.table[0], table=weight(12, 8))


@block
def hypernetwork() -> nn.Module:
    """Make a weight that another layer computes."""
    return Computed(
        lambda m, x, _: x @ m.maker(m.code).reshape(8, 8), code=weight(4), maker=linear(4, 64)
    )


@block
def standardised() -> nn.Module:
    """Normalise a weight in the forward."""
    return Computed(lambda m, x, _: x @ F.normalize(m.matrix, dim=0), matrix=weight(8, 8))


@block
def detached() -> nn.Module:
    """Use a parameter once with and once without a gradient."""
    return Computed(lambda m, x, _: m.inner(x) - 0.5 * m.inner.weight.detach()[0], inner=linear())


@block
def ignored() -> nn.Module:
    """Make a layer that DDP is to ignore; see ``Model``."""
    inner = linear()
    setattr(inner, "ddp_ignores", True)  # noqa: B010  Modules know no bool by a name.
    return Plain(inner)
