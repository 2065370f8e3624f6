"""The pass that Inductor runs on the backward that AOTAutograd makes with a forward, and the inputs
of that forward whose gradients it stores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fusion_passes.graph.custom_ops import give_own_memory
from fusion_passes.graph.identity import pass_identity
from fusion_passes.graph.text import graph_text
from fusion_passes.layout.layout import InputPosition
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.stored.lowering import register_store_lowerings
from fusion_passes.stored.pieces import StoredInput
from fusion_passes.stored.store import StoreGradients
from fusion_passes.torch_private import CustomGraphPass
from fusion_passes.torch_private.autograd import gradient_dtype, keeps_input_numbers
from fusion_passes.torch_private.inductor import run_observed, trace_artifact


class StorePass(CustomGraphPass):
    """Runs :class:`StoreGradients` on the backward that AOTAutograd has made with a forward. Its
    identity in Inductor's caches is all that it knows of the modules: shapes, places and caps, and
    no names."""

    def __init__(self, stores: StoreGradients) -> None:
        self._stores = stores

    def __call__(self, graph: fx.Graph) -> None:
        _register_lowerings()
        assert graph.owning_module is not None, "a post-grad graph belongs to a module"
        give_own_memory(graph)
        if run_observed(graph.owning_module, type(self._stores).__name__, self._stores):
            trace_artifact("ddp_fusion_stored", lambda: graph_text(graph))

    def uuid(self) -> str:
        return pass_identity(self._stores.identity())


def stores_of_forward(graph: fx.Graph, inputs: Sequence[Any]) -> StoreGradients | None:
    """Make the pass that stores the gradients of a forward's parameters in buckets. Return ``None``
    if no input is a parameter of a managed module, or if AOTAutograd would number the inputs
    differently."""
    if not keeps_input_numbers(graph, inputs):
        return None
    modules: dict[Reducer, int] = {}
    found: dict[int, StoredInput] = {}
    position, has_some, all_gradients = -1, False, reducers.gradients()
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            continue
        position += 1
        owners = all_gradients.get(id(value), ())
        if len(owners) != 1 or id(value) in found:
            continue
        reducer, number = owners[0]
        has_some = True
        kind, graph_layout = reducer.parameters.kinds[number], reducer.assignment.graph_layout
        if kind.is_sparse or kind.is_delayed or gradient_dtype(value) != value.dtype:
            continue
        found[id(value)] = StoredInput(
            index,
            InputPosition(position),
            modules.setdefault(reducer, len(modules)),
            tuple(value.shape),
            tuple(reducer.parameters.strides[number]),
            value.dtype,
            value.device,
            None if graph_layout is None else graph_layout.places[number],
            kind.owner,
        )
    if not has_some:
        return None
    caps = tuple(reducer.assignment.piece_caps for reducer in modules)
    return StoreGradients(tuple(found.values()), len(inputs), caps)


@functools.cache
def _register_lowerings() -> None:
    """Register the lowerings, not before a compile: Inductor takes a second to import."""
    register_store_lowerings()
