"""Families of operators that change only the shape, layout, dtype or scale of a gradient; and which
operators Inductor turns into library kernels instead of generating a kernel.

The table says what each family guarantees about its result, compared with its input:

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

"Order" is the logical order, row by row, whatever the strides. ``DIVISIONS_OF_LISTS`` divide
several tensors at once. Code that follows a gradient from one node to another composes the set of
families that it accepts, and says which guarantee it needs.

The families cover all such operators that Inductor (torch 2.11 to 2.15) leaves in a post-grad
graph. Inductor replaces ``t``, ``transpose`` and similar operators by ``permute``, and ``_to_copy``
by a cast; it removes ``alias``, ``detach``, ``lift_fresh``, and a clone or cast that changes
nothing. ``expand``, ``select`` and slices are in no family: they repeat or drop elements.
"""

from __future__ import annotations

import operator
from typing import Final, TypeAlias

import torch
from torch import fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import schema

_aten = torch.ops.aten

Family: TypeAlias = frozenset[object]

RESHAPE: Final = _aten.reshape.default
CAST: Final = torch.ops.prims.convert_element_type.default
COPY: Final = _aten.copy.default
"""``copy(template, value)``: the elements of ``value``, in the layout and dtype of ``template``."""

TRACED_RESHAPES: Final[Family] = frozenset((_aten.view.default, _aten._unsafe_view.default))
"""Reshapes as tracing records them. Inductor replaces them by ``reshape`` before its post-grad
passes, because the strides in the graph no longer hold once it has chosen layouts."""

RESHAPES: Final[Family] = TRACED_RESHAPES | {
    RESHAPE,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
}

PERMUTES: Final[Family] = frozenset((_aten.permute.default,))

COMPLEX_VIEWS: Final[Family] = frozenset(
    (_aten.view_as_real.default, _aten.view_as_complex.default)
)

PLACES: Final[Family] = frozenset((_aten.as_strided.default,))
"""The view of a gradient in its bucket."""

RELAYOUTS: Final[Family] = frozenset((_aten.clone.default, COPY))

CASTS: Final[Family] = frozenset((CAST,))

DIVISIONS: Final[Family] = frozenset((_aten.div.Tensor, _aten.div.Scalar))
"""Divisions by a number. A node that divides by a tensor is not one of them, although its operator
may be in the family."""

DIVISIONS_OF_LISTS: Final[Family] = frozenset((_aten._foreach_div.Scalar,))
"""``DIVISIONS`` of a list of tensors by one number; the results are taken out by :data:`ITEMS`."""

ITEMS: Final[Family] = frozenset((operator.getitem,))

VIEWS: Final[Family] = RESHAPES | PERMUTES | COMPLEX_VIEWS | PLACES
"""All operators that compute nothing once Inductor has lowered them."""


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
    """Whether the node becomes a library call: a matrix product, a convolution or attention."""
    name = _name(node)
    return name in _KERNEL_NAMES or name.startswith(_KERNEL_PREFIXES)


def stores_unscaled(node: fx.Node) -> bool:
    """Whether the node's kernel can store its result where it is told to, but cannot scale it: a
    library's matrix product, or a scatter, which adds to what it has stored (an embedding)."""
    return _name(node) in _MATRIX_PRODUCTS or _name(node) in _SCATTERS


def _name(node: fx.Node) -> str:
    return schema(node.target).name if isinstance(node.target, OpOverload) else ""
