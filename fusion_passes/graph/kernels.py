"""What Inductor makes of an operator: a library's kernel, or one that it generates."""

from __future__ import annotations

from typing import Final

from torch import fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import schema

_MATRIX_PRODUCTS: Final = frozenset(
    ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
)
_SCATTERS: Final = frozenset(("aten::index_put", "aten::_unsafe_index_put", "aten::scatter_add"))
_KERNEL_NAMES: Final = _MATRIX_PRODUCTS | frozenset(
    ("aten::convolution", "aten::convolution_backward", "aten::_grouped_mm")
)
_KERNEL_PREFIXES: Final = ("aten::_scaled_dot_product_", "mkldnn::", "mkl::")


def is_library_kernel(node: fx.Node) -> bool:
    """Whether the node becomes a call of a library: a matrix product, convolution, attention."""
    name = _name(node)
    return name in _KERNEL_NAMES or name.startswith(_KERNEL_PREFIXES)


def stores_unscaled(node: fx.Node) -> bool:
    """Whether the node's kernel stores where it is pointed to, but cannot scale what it stores: a
    library's matrix product, or one that adds to what it has stored before, as for an embedding."""
    return _name(node) in _MATRIX_PRODUCTS or _name(node) in _SCATTERS


def _name(node: fx.Node) -> str:
    return schema(node.target).name if isinstance(node.target, OpOverload) else ""
