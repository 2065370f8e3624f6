"""Operators that a gradient passes through and stays itself: other shape, layout, dtype or scale.

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
``SCALINGS``        scaled    same            another
``ITEMS``           of one value of several   same
==================  ========  ==============  ===============

"Order" is the logical one, row by row, whatever the strides. ``SCALINGS_OF_LISTS`` scale several
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

from fusion_passes.graph.operators import AS_COMPLEX

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
MULTIPLICATIONS: Final[Family] = frozenset((_aten.mul.Tensor, _aten.mul.Scalar))

SCALINGS: Final[Family] = DIVISIONS | MULTIPLICATIONS
"""By a number: a node with two tensors is no scaling, whatever its operator."""

SCALINGS_OF_LISTS: Final[Family] = frozenset((_aten._foreach_div.Scalar, _aten._foreach_mul.Scalar))
"""``SCALINGS`` of several tensors by one number, which :data:`ITEMS` takes apart again."""

ITEMS: Final[Family] = frozenset((operator.getitem,))

VIEWS: Final[Family] = RESHAPES | PERMUTES | COMPLEX_VIEWS | PLACES
"""All that, as Inductor lowers it, computes nothing."""
