"""Gives each compile whose forward has parameters of managed modules a pass of its own, which
stores their gradients in the memory of reducers. What the pass knows of them is its identity in
Inductor's caches: shapes, places and caps, and no names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fusion_passes.graph.sparse import give_own_memory
from fusion_passes.graph.text import graph_text
from fusion_passes.install.fuse_pass import source_hash
from fusion_passes.install.pass_slot import SLOT, pass_list, pass_value
from fusion_passes.lowering.store import register_store_lowerings
from fusion_passes.passes.store import StoreGradients
from fusion_passes.plan.caps import BucketCaps
from fusion_passes.plan.pieces import StoredInput
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import CustomGraphPass, inductor_config
from fusion_passes.torch_private.autograd import is_tensor_subclass
from fusion_passes.torch_private.inductor import donates_buffers, run_observed, trace_artifact
from fusion_passes.version import __version__


class StorePass(CustomGraphPass):
    """Runs :class:`StoreGradients` among Inductor's post-grad passes."""

    def __init__(self, stores: StoreGradients) -> None:
        self._stores = stores

    def __call__(self, graph: fx.Graph) -> None:
        _teach_inductor()
        assert graph.owning_module is not None, "a post-grad graph belongs to a module"
        give_own_memory(graph)
        if run_observed(graph.owning_module, type(self._stores).__name__, self._stores):
            trace_artifact("ddp_fusion_stored", lambda: graph_text(graph))

    def uuid(self) -> str:
        """Identity of what this pass does to a graph: the FX graph cache's key holds it."""
        # A backward that may overwrite what its forward has saved must not come back for one that
        # may not: the key of torch's own cache does not hold this setting (torch 2.11 to 2.14).
        return f"{__version__} {source_hash()} {donates_buffers()} {self._stores.identity()}"


def options_to_store(
    graph: fx.Graph, inputs: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """What options of Inductor have the backward of a forward store gradients; none, where the
    forward has no parameters whose gradients can be stored.

    Args:
        graph: of the forward, as Dynamo has traced it.
        inputs: what it was traced with: parameters are the module's own.
        options: of this compile, so far.
    """
    stores = find_stored(graph, inputs) if torch.is_grad_enabled() else None
    if stores is None:
        return {}
    passes = pass_list(options.get(SLOT, getattr(inductor_config, SLOT)))
    return {SLOT: pass_value([*passes, StorePass(stores)])}


def find_stored(graph: fx.Graph, inputs: Sequence[Any]) -> StoreGradients | None:
    """Find the parameters of managed modules among the inputs of a forward.

    Returns:
        ``None`` if there are none, or AOTAutograd would number the inputs otherwise.
    """
    if len(graph.find_nodes(op="placeholder")) != len(inputs) or any(
        map(is_tensor_subclass, inputs)
    ):
        return None
    modules: dict[Reducer, int] = {}
    found: dict[int, StoredInput] = {}
    place, has_some = -1, False
    for index, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            continue
        place += 1
        owners = reducers.owners_of(value)
        if len(owners) != 1 or id(value) in found:
            continue
        reducer, number = owners[0]
        has_some = True
        if reducer.parameters.kinds[number].is_sparse:
            continue
        found[id(value)] = StoredInput(
            index,
            place,
            modules.setdefault(reducer, len(modules)),
            tuple(value.shape),
            tuple(reducer.parameters.strides[number]),
            value.dtype,
            value.device,
            reducer.layout.places[number] if reducer.has_rebuilt_buckets else None,
        )
    if not has_some:
        return None
    caps: list[BucketCaps] = [reducer.piece_caps for reducer in modules]  # type: ignore[misc]
    return StoreGradients(tuple(found.values()), len(inputs), tuple(caps))


@process_state.once("whether Inductor knows how gradients are stored", Lifetime.PROCESS)
def _teach_inductor() -> None:
    register_store_lowerings(lambda _, __: None)
