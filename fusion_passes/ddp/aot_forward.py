"""Which parameters of DDP modules are reduced in the backward that is compiled with a forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, fx

from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_backward import aot_backwards
from fusion_passes.ddp.aot_obstacles import obstacle_in_module
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.prepared import Described, numbered
from fusion_passes.ddp.sparse import dense_parameters
from fusion_passes.reductions.insert import ReducedInput
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import is_tensor_subclass


@dataclass(frozen=True)
class ReducedInputs:
    """The parameters of DDP modules among the inputs of a forward that is being compiled.

    Attributes:
        inputs: those whose gradients are reduced in its backward.
        num_inputs: of the forward.
        needs_all: whether the backward must give all of them a gradient: ranks may use other
            parameters of a static graph, which is seen after a backward, and from then on the same.
    """

    inputs: tuple[ReducedInput, ...]
    num_inputs: int
    needs_all: bool = False


def _forget(compiled: ContextVar[ReducedInputs | None]) -> None:
    compiled.set(None)


_compiling: Final = process_state.keep(
    ContextVar[ReducedInputs | None]("reduced inputs", default=None),
    "the parameters whose gradients the backward reduces that is being compiled",
    Lifetime.CALL,
    reset=_forget,
)


def reduced_inputs() -> ReducedInputs | None:
    """Those of the forward that is being compiled; ``None`` where its backward reduces nothing."""
    return _compiling.get()


@contextlib.contextmanager
def compiling(inputs: ReducedInputs) -> Iterator[None]:
    """Around the compile of a forward whose backward is to reduce gradients."""
    token = _compiling.set(inputs)
    try:
        yield
    finally:
        _compiling.reset(token)


def find_reduced_inputs(
    graph: fx.Graph, inputs: Sequence[Any], config: FusionConfig
) -> ReducedInputs | None:
    """Find the parameters whose gradients the backward of a forward can reduce.

    Args:
        graph: of the forward, as Dynamo has traced it.
        inputs: what it was traced with.
        config: the options.

    Returns:
        ``None`` if there are none.
    """
    if len(graph.find_nodes(op="placeholder")) != len(inputs) or any(
        map(is_tensor_subclass, inputs)
    ):
        return None
    index_of = {id(value): index for index, value in enumerate(inputs) if isinstance(value, Tensor)}
    found: list[ReducedInput] = []
    needs_all = False
    for ddp in registry.modules():
        trained = dense_parameters(ddp)
        present = [number for number in trained if id(trained[number]) in index_of]
        if not present:
            continue
        module = registry.module_of(ddp)
        obstacle = obstacle_in_module(ddp, trained.values(), config) or aot_backwards.refusal(ddp)
        aot_backwards.obstacles[ddp] = obstacle
        if obstacle:
            return None
        needs_all |= ddp.static_graph
        found += [
            ReducedInput(
                index_of[id(parameter)],
                module.name_for(number),
                module.world_size,
                tuple(parameter.shape),
                module.strides[number],
            )
            for number, parameter in trained.items()
            if number in present
        ]
    if not found or len({item.index for item in found}) < len(found):
        return None
    known = ReducedInputs(tuple(sorted(found, key=lambda i: i.index)), len(inputs), needs_all)
    _note_prepared(known, inputs, config)
    return known


def _note_prepared(known: ReducedInputs, inputs: Sequence[Any], config: FusionConfig) -> None:
    tensors = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
    # An autograd node has an edge for each tensor among its inputs, and none for a symbolic size.
    edge_of = {index: edge for edge, index in enumerate(tensors)}
    places = [(edge_of[item.index], numbered(inputs[item.index])) for item in known.inputs]
    aot_backwards.prepared.add(Described.of(places, config))
