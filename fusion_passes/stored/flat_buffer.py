"""Lowers stores of gradients into one flat buffer, each gradient at its place.

The kernel that computes a gradient writes it directly to its place: a library's matrix product
through ``out=``, a generated kernel by its own store. A gradient whose kernel cannot write there is
copied. On CUDA, one kernel (of up to 125 copies) copies the small ones of these gradients, and each
large one has a copy kernel of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from fusion_passes.layout.layout import Offset
from fusion_passes.stored.obstacles import (
    box_of,
    computed_from_a_library,
    may_be_bound_anew,
    obstacle_to_storing,
    place_of_buffer,
    reason_for_copy,
    written_by_a_library,
)
from fusion_passes.torch_private.inductor import (
    digit,
    graph_lowering,
    inductor_ir,
    supports_foreach,
)

GROUPED_ELEMENTS: Final = 2**20
"""Gradients with fewer elements share one copy kernel. Inductor runs a kernel of several copies in
blocks of 1,024 elements, and an H200 runs 0.45 such blocks per nanosecond: in bf16 that is 0.44 of
its bandwidth (docs/gpu.md). From about this size on, a separate copy kernel is worth its launch."""


@dataclass(eq=False)
class FlatBuffer(ABC):
    """A flat buffer that gradients are stored in during lowering.

    Attributes:
        data: Inductor's value of the buffer.
        nodes: graph nodes of the gradients.
        gradients: Inductor's values of ``nodes``.
        sums: index of a gradient to the name of its buffer, set by :meth:`fill`, for each gradient
            that is a sum and is copied only if Inductor does not fuse that buffer away.
    """

    data: Any
    nodes: Sequence[fx.Node]
    gradients: Sequence[Any]
    device: torch.device
    dtype: torch.dtype
    sums: dict[int, str] = field(default_factory=dict, init=False)

    def fill(self, places: Sequence[tuple[Offset, Sequence[int]]]) -> dict[int, str]:
        """Store the gradients at these offsets and strides, in elements.

        Returns:
            The reason for each gradient that is copied, by its index.
        """
        views = [self._view(*item) for item in zip(self.gradients, places, strict=True)]
        obstacles, relaid = {}, {}
        for number, (node, gradient) in enumerate(zip(self.nodes, self.gradients, strict=True)):
            is_changed = self.change_of(gradient) is not None
            obstacle = obstacle_to_storing(node, gradient, views[number], is_changed=is_changed)
            if obstacle is not None:
                obstacles[number] = obstacle
            elif (reason := reason_for_copy(node, gradient)) is not None:
                relaid[number] = reason
        copies = [n for n in obstacles if written_by_a_library(self.gradients[n])]
        one_kernel = supports_foreach(self.device)
        copying = []
        for number, (gradient, view) in enumerate(zip(self.gradients, views, strict=True)):
            if number in copies and not one_kernel:
                continue
            is_moved = number in copies or (
                number not in obstacles and computed_from_a_library(gradient)
            )
            is_grouped = one_kernel and is_moved and _is_small(gradient)
            writer = store_at(
                view,
                gradient,
                is_copied=number in obstacles,
                is_grouped=is_grouped,
                change=self.change_of(gradient),
            )
            self.note_writer(number, writer)
            if number not in relaid | obstacles and may_be_bound_anew(gradient):
                self.sums[number] = box_of(gradient).data.get_name()
            if is_grouped:
                copying.append(writer.get_operation_name())
        if len(copying) > 1:
            graph_lowering().register_operation_list(copying)
        self.end_stores()
        if copies and not one_kernel:
            strides = [stride for n in copies for stride in places[n][1]]
            self.copy([self.gradients[n] for n in copies], [places[n][0] for n in copies], strides)
        return relaid | obstacles

    def change_of(self, gradient: Any) -> Callable[[Any], Any] | None:
        """The function applied to a gradient when it is stored; ``None`` if it is stored as is."""
        del gradient
        return None

    @abstractmethod
    def note_writer(self, number: int, writer: Any) -> None:
        """Receive the buffer that writes a gradient's place, and the index of the gradient."""

    def end_stores(self) -> None:  # noqa: B027 - the default does nothing
        """Finish the stores of kernels; copies by an operator call are lowered after this."""

    @abstractmethod
    def copy(self, values: list[Any], offsets: list[Offset], strides: list[int]) -> None:
        """Copy gradients by one call of ``STORE``, which takes offsets and strides in this form."""

    def _view(self, gradient: Any, place: tuple[Offset, Sequence[int]]) -> Any:
        ir = inductor_ir()
        offset, strides = place
        size = list(gradient.get_size())
        layout = ir.FixedLayout(self.device, self.dtype, size, list(strides), offset)
        return ir.ReinterpretView(data=self.data, layout=layout)


def _is_small(gradient: Any) -> bool:
    return math.prod(int(size) for size in gradient.get_size()) < GROUPED_ELEMENTS


def store_at(
    view: Any,
    gradient: Any,
    *,
    is_copied: bool,
    is_grouped: bool,
    change: Callable[[Any], Any] | None = None,
) -> Any:
    """Make the kernel of a gradient write to ``view``, a view of its place. If the kernel cannot
    write there (``is_copied``), add a kernel that copies the gradient, alone or together with
    others (``is_grouped``). Inductor may fuse the two kernels if it generates both. A sum that
    Inductor may leave in another tensor always gets the second kernel.

    Returns:
        The buffer that writes the place.
    """
    ir = inductor_ir()
    is_stored_apart = may_be_bound_anew(gradient)
    if is_stored_apart:
        gradient.realize()
    if not (is_copied or is_stored_apart or change is not None):
        whole = place_of_buffer(gradient, view)
        if whole is not None:
            gradient.realize()
            buffer = box_of(gradient).data
            buffer.layout = ir.NonOwningLayout(whole)
            return buffer
    value = _in_order_of(view, gradient) if is_grouped else _computed_again(gradient)
    if change is not None:
        value = change(value)
    return ir.ConcatKernel.realize_into(value, _flat(view) if is_grouped else view)


def _computed_again(value: Any) -> Any:
    """A new pointwise value that loads the elements of ``value``, to be stored elsewhere."""
    return inductor_ir().Pointwise.create(
        device=value.get_device(),
        dtype=value.get_dtype(),
        inner_fn=value.make_loader(),
        ranges=list(value.get_size()),
    )


def _in_order_of(place: Any, value: Any) -> Any:
    """As :func:`_computed_again`, as one loop over the memory of ``place``. Inductor puts such
    one-dimensional loops into one kernel, whatever they read. When a layout changes, Inductor would
    loop over two dimensions, and share a kernel only if one dimension has the same size in all."""
    load, sizes, strides = value.make_loader(), place.get_size(), place.get_stride()

    def load_at(index: Sequence[Any]) -> Any:
        digits = [digit(index[0], *numbers) for numbers in zip(strides, sizes, strict=True)]
        return load(digits)

    return inductor_ir().Pointwise.create(
        device=value.get_device(),
        dtype=value.get_dtype(),
        inner_fn=load_at,
        ranges=[math.prod(sizes)],
    )


def _flat(place: Any) -> Any:
    """A one-dimensional view of the memory of a place, which is dense."""
    ir = inductor_ir()
    old = place.layout
    layout = ir.FixedLayout(old.device, old.dtype, [math.prod(old.size)], [1], old.offset)
    return ir.ReinterpretView(data=place.data, layout=layout)
