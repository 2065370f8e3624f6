"""Families of operators: what a gradient passes through and stays itself, in another shape, layout,
dtype or scale; and what Inductor makes of an operator, a library's kernel or one that it generates.

Each family is named once, with what it promises of its result beside its input:

==================  ========  ==============  ===============
family              elements  their order     their memory
==================  ========  ==============  ===============
``RESHAPES``        same      same            same if it can
``PERMUTES``        same      another         same
``COMPLEX_VIEWS``   same      same            same
``PLACES``          some      as given        same
``RELAYOUTS``       same      same            another
``CASTS``           rounded   same            another
``DIVISIONS``       divided   same            another
``ITEMS``           of one value of several   same
==================  ========  ==============  ===============

"Order" is the logical one, row by row, whatever the strides. ``DIVISIONS_OF_LISTS`` divide several
tensors at once. Code that asks what stands between two nodes composes its set of these families,
and says which promise it needs.

They are complete for what Inductor (torch 2.11 to 2.15) leaves in a post-grad graph. ``t``,
``transpose`` and their like have become ``permute``; ``_to_copy`` a cast; ``alias``, ``detach``,
``lift_fresh`` and a clone or cast to what a tensor is already are gone. ``expand``, ``select`` and
slices belong to no family: they repeat elements or leave some out.
"""

from __future__ import annotations

import operator
from typing import Final, TypeAlias

import torch
from torch import fx

from fusion_passes.graph.operators import AS_COMPLEX
from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import schema

_aten = torch.ops.aten

Family: TypeAlias = frozenset[object]

RESHAPE: Final = _aten.reshape.default
CAST: Final = torch.ops.prims.convert_element_type.default
COPY: Final = _aten.copy.default
"""``copy(template, value)``: the elements of ``value`` in the layout and dtype of ``template``."""

TRACED_RESHAPES: Final[Family] = frozenset((_aten.view.default, _aten._unsafe_view.default))
"""Reshapes as they are traced. Inductor makes ``reshape`` of them before its post-grad passes: once
it has chosen layouts, a stride in the graph is no promise any more."""

RESHAPES: Final[Family] = TRACED_RESHAPES | {
    RESHAPE,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
}

PERMUTES: Final[Family] = frozenset((_aten.permute.default,))

COMPLEX_VIEWS: Final[Family] = frozenset(
    (_aten.view_as_real.default, _aten.view_as_complex.default, AS_COMPLEX)
)

PLACES: Final[Family] = frozenset((_aten.as_strided.default,))
"""A gradient in its bucket."""

RELAYOUTS: Final[Family] = frozenset((_aten.clone.default, COPY))

CASTS: Final[Family] = frozenset((CAST,))

DIVISIONS: Final[Family] = frozenset((_aten.div.Tensor, _aten.div.Scalar))
"""By a number: a node with two tensors is none of them, whatever its operator."""

DIVISIONS_OF_LISTS: Final[Family] = frozenset((_aten._foreach_div.Scalar,))
"""``DIVISIONS`` of several tensors by one number, which :data:`ITEMS` takes apart again."""

ITEMS: Final[Family] = frozenset((operator.getitem,))

VIEWS: Final[Family] = RESHAPES | PERMUTES | COMPLEX_VIEWS | PLACES
"""All that, as Inductor lowers it, computes nothing."""


# --- Kernels -------------------------------------------------------------------------------------

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
