"""Lowers what stores gradients in a reducer's memory: their own kernels write there.

The memory is what an operator returns. What produces a gradient is pointed at the gradient's place
in it: a library's matrix product by ``out=``, a generated kernel by storing there. What cannot be
pointed there is copied. The call that tells the reducer runs behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from fusion_passes.lowering.obstacles import (
    computed_from_a_library,
    obstacle_to_storing,
    reason_for_copy,
    written_by_a_library,
)
from fusion_passes.lowering.pack import store_at
from fusion_passes.reducer.operators import BUCKET, COPY_IN, MARK_READY, STORE_GRADIENTS
from fusion_passes.torch_private.inductor import (
    graph_lowering,
    inductor_ir,
    register_lowering,
    run_after,
    supports_foreach,
)

OnStored: TypeAlias = Callable[[Sequence[int], Mapping[int, str]], None]
"""Receives the places of a piece, and for each gradient that is copied (by number) the reason."""


def register_store_lowerings(on_stored: OnStored) -> None:
    """Teach Inductor the operators of :mod:`fusion_passes.reducer.operators`.

    Args:
        on_stored: called for each piece that is lowered.
    """

    def store(
        bucket: Any,
        gradients: Sequence[Any],
        offsets: Sequence[int],
        strides: Sequence[int],
        places: Sequence[int],
    ) -> None:
        bucket.realize()
        pieces = _Memory(bucket, graph_lowering().current_node.args[1], gradients)
        numbers = iter(strides)
        strides_of = [[next(numbers) for _ in gradient.get_size()] for gradient in gradients]
        on_stored(places, pieces.fill(list(zip(offsets, strides_of, strict=True))))
        pieces.call_behind(MARK_READY, list(places))

    register_lowering(BUCKET, _lower_bucket)
    register_lowering(STORE_GRADIENTS, store)


def _lower_bucket(
    places: Sequence[int],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    ir = inductor_ir()
    made = ir.FallbackKernel.create(BUCKET, list(places), list(offsets), numel, dtype, device)
    return made if isinstance(made, ir.TensorBox) else ir.TensorBox.create(made)


class _Memory:
    """A reducer's memory, into which gradients are being lowered.

    Args:
        bucket: Inductor's value of it, realized.
        nodes: of the gradients.
        gradients: Inductor's values of them.
    """

    def __init__(self, bucket: Any, nodes: Sequence[fx.Node], gradients: Sequence[Any]) -> None:
        self._bucket = bucket
        self._nodes = nodes
        self._gradients = gradients
        self._writers: list[Any] = []

    def fill(self, places: Sequence[tuple[int, Sequence[int]]]) -> dict[int, str]:
        """Store the gradients.

        Args:
            places: offset and strides of each, in elements.

        Returns:
            Why a gradient is copied, by its number, for those that are.
        """
        views = [self._view(*item) for item in zip(self._gradients, places, strict=True)]
        obstacles, relaid = {}, {}
        for number, (node, gradient) in enumerate(zip(self._nodes, self._gradients, strict=True)):
            obstacle = obstacle_to_storing(node, gradient, views[number], is_changed=False)
            if obstacle is not None:
                obstacles[number] = obstacle
            elif (reason := reason_for_copy(node, gradient)) is not None:
                relaid[number] = reason
        copies = [n for n in obstacles if written_by_a_library(self._gradients[n])]
        one_kernel = supports_foreach(self._bucket.get_device())
        copying = []
        for number, view in enumerate(views):
            if number in copies and not one_kernel:
                continue
            is_grouped = one_kernel and (
                number in copies
                or (number not in obstacles and computed_from_a_library(self._gradients[number]))
            )
            writer = self._store(number, view, number in obstacles, is_grouped)
            if is_grouped:
                copying.append(writer.get_operation_name())
        if len(copying) > 1:
            graph_lowering().register_operation_list(copying)
        if copies and not one_kernel:
            values = [self._gradients[n] for n in copies]
            offsets = [places[n][0] for n in copies]
            strides = [stride for n in copies for stride in places[n][1]]
            self.call_behind(COPY_IN, values, offsets, strides)
        return relaid | obstacles

    def call_behind(self, operator: Any, *args: Any) -> None:
        """Call an operator that writes the memory, when all that was stored so far is there."""
        graph, ir = graph_lowering(), inductor_ir()
        before = len(graph.operations)
        ir.FallbackKernel.create(operator, self._bucket, *args)
        for operation in graph.operations[before:]:
            if isinstance(operation, ir.FallbackKernel):
                for writer in self._writers:
                    run_after(operation.get_operation_name(), writer.get_name())

    def _view(self, gradient: Any, place: tuple[int, Sequence[int]]) -> Any:
        ir = inductor_ir()
        offset, strides = place
        layout = ir.FixedLayout(
            self._bucket.get_device(),
            self._bucket.get_dtype(),
            list(gradient.get_size()),
            list(strides),
            offset,
        )
        return ir.ReinterpretView(data=self._bucket.data, layout=layout)

    def _store(self, number: int, view: Any, is_copied: bool, is_grouped: bool) -> Any:
        gradient = self._gradients[number]
        writer = store_at(view, gradient, is_copied=is_copied, is_grouped=is_grouped)
        run_after(writer.get_operation_name(), self._bucket.data.data.get_name())
        self._writers.append(writer)
        return writer
