"""Lowers the operators that store gradients in a reducer's memory. ``bucket`` becomes a call that
returns the memory, and the gradients' own kernels write into it: see
:mod:`fusion_passes.stored.flat_buffer`. The call that notifies the reducer runs after them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import fx

from fusion_passes.graph.custom_ops import STORE, split_strides
from fusion_passes.layout.layout import InputPosition, Offset
from fusion_passes.stored.flat_buffer import FlatBuffer
from fusion_passes.stored.obstacles import may_be_bound_anew
from fusion_passes.stored.operators import BUCKET, MARK_READY, STORE_GRADIENTS
from fusion_passes.torch_private.inductor import (
    give_as_code_is_written,
    graph_lowering,
    inductor_ir,
    is_fused_away,
    last_collective,
    lower_as,
    register_lowering,
    run_behind,
)

OWN_TENSOR: Final = "Inductor's mix-order reduction may return it in a new tensor"


def register_store_lowerings() -> None:
    """Register Inductor lowerings of the operators of :mod:`fusion_passes.stored.operators`."""
    register_lowering(BUCKET, _lower_bucket)
    register_lowering(STORE_GRADIENTS, _lower_store)


def _lower_bucket(
    positions: str, offsets: str, numel: int, dtype: torch.dtype, device: torch.device
) -> Any:
    ir = inductor_ir()
    made = ir.FallbackKernel.create(BUCKET, positions, offsets, numel, dtype, device)
    return made if isinstance(made, ir.TensorBox) else ir.TensorBox.create(made)


def _lower_store(
    bucket: Any,
    gradients: Sequence[Any],
    offsets: Sequence[Offset],
    strides: Sequence[int],
    positions: Sequence[InputPosition],
) -> None:
    bucket.realize()
    nodes: list[fx.Node] = graph_lowering().current_node.args[1]
    buffer = _ReducerBuffer(bucket, nodes, gradients)
    places = split_strides([node.meta["val"] for node in nodes], strides)
    copied = buffer.fill(list(zip(offsets, places, strict=True)))
    arguments: list[Any] = [json.dumps(list(positions))]
    sums = buffer.sums
    if reported := [*copied, *sums]:
        # A graph from a cache is not lowered again, so it reports its copies when it runs.
        arguments += [[positions[number] for number in reported], ""]
    marked = buffer.call_behind(MARK_READY, *arguments)
    buffer.return_written(graph_lowering().current_node.args[0], offsets)

    def why() -> str:
        of_sums = ["" if is_fused_away(name) else OWN_TENSOR for name in sums.values()]
        return "|".join([*copied.values(), *of_sums])

    if reported:
        give_as_code_is_written(marked, why)


class _ReducerBuffer(FlatBuffer):
    """A buffer that the reducer allocates. ``bucket`` is its realized Inductor value."""

    def __init__(self, bucket: Any, nodes: Sequence[fx.Node], gradients: Sequence[Any]) -> None:
        super().__init__(bucket.data, nodes, gradients, bucket.get_device(), bucket.get_dtype())
        self._bucket = bucket
        self._writers: dict[int, Any] = {}

    def note_writer(self, number: int, writer: Any) -> None:
        run_behind(writer.get_operation_name(), buffer=self.data.data.get_name())
        self._writers[number] = writer

    def return_written(self, bucket: fx.Node, offsets: Sequence[Offset]) -> None:
        """Have the graph return a gradient as the buffer that its kernel wrote, instead of a new
        view of the memory, which takes the host as long as the allocation of a tensor."""
        written = {
            (offsets[number], *writer.get_size(), *writer.get_stride()): writer
            for number, writer in self._writers.items()
            if not may_be_bound_anew(self.gradients[number])
        }
        for view in bucket.users:
            if view.target is torch.ops.aten.as_strided.default:
                _, size, strides, offset = cast("tuple[Any, ...]", view.args)
                writer = written.get((offset, *size, *strides))
                if writer is not None:
                    lower_as(view, inductor_ir().TensorBox.create(writer))

    def copy(self, values: list[Any], offsets: list[Offset], strides: list[int]) -> None:
        self.call_behind(STORE, values, offsets, strides)

    def call_behind(self, operator: Any, *args: Any) -> Any:
        """Call an operator that writes the memory, after all stores so far and after the launch of
        the graph's last collective before it: the call may launch a bucket, and ranks with other
        graphs launch in the same order. Return Inductor's operation for the call."""
        graph, ir = graph_lowering(), inductor_ir()
        collective = last_collective()
        before = [*self._writers.values(), *([] if collective is None else [collective])]
        known = len(graph.operations)
        ir.FallbackKernel.create(operator, self._bucket, *args)
        calls = [op for op in graph.operations[known:] if isinstance(op, ir.FallbackKernel)]
        for call in calls:
            for item in before:
                run_behind(call.get_operation_name(), buffer=item.get_name())
        return calls[-1]
