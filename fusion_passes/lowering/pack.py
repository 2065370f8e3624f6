"""Lowers a bucket to one buffer that its gradients' own kernels store into.

``pack`` becomes Inductor's ``ConcatKernel``, which is no kernel at all: a buffer whose parts other
kernels write. What produces a gradient is pointed at the gradient's place in it: a library's
matrix product by ``out=``, a generated kernel by storing there. What cannot be pointed there is
copied, all such gradients of a bucket by one kernel (of up to 125 copies, on CUDA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE_COALESCED, ALL_REDUCE_COALESCED_IN_PLACE
from fusion_passes.graph.operators import (
    AGREE,
    DELIVER,
    DONATE,
    PACK,
    STORE,
    WIDEN,
    split_strides,
)
from fusion_passes.graph.scaling import scaled
from fusion_passes.lowering.donate import lower_donate
from fusion_passes.lowering.obstacles import (
    computed_from_a_library,
    may_be_bound_anew,
    obstacle_to_storing,
    reason_for_copy,
    written_by_a_library,
)
from fusion_passes.torch_private.inductor import (
    digit,
    graph_lowering,
    inductor_ir,
    inductor_lowerings,
    register_lowering,
    supports_foreach,
)
from fusion_passes.torch_private.older_torch import fix_strides_of_lists

OnPacked = Callable[[str, Mapping[int, str]], None]
"""Receives a bucket's label, and for each gradient that was copied (by number) the reason."""


def register_lowerings(on_packed: OnPacked) -> None:
    """Teach Inductor the package's operators, and an older torch the strides of
    coalesced gradients.

    Args:
        on_packed: called for each bucket that is lowered.
    """

    def pack(
        gradients: Sequence[Any],
        offsets: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        scale: str,
        factor: float,
        in_bucket: bool,
        label: str,
    ) -> Any:
        nodes: list[fx.Node] = graph_lowering().current_node.args[0]
        bucket = _Bucket(nodes, gradients, dtype, scale, factor, in_bucket)
        places = split_strides([node.meta["val"] for node in nodes], strides)
        copied = bucket.fill(list(zip(offsets, places, strict=True)))
        on_packed(label, copied)
        return bucket.value

    register_lowering(PACK, pack)
    register_lowering(WIDEN, _lower_widen)
    register_lowering(AGREE, _lower_agree)
    register_lowering(DELIVER, _lower_deliver)
    register_lowering(DONATE, lower_donate)
    for coalesced in (ALL_REDUCE_COALESCED, ALL_REDUCE_COALESCED_IN_PLACE):
        fix_strides_of_lists(coalesced)


class _Bucket:
    """A bucket that is being lowered."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        gradients: Sequence[Any],
        dtype: torch.dtype,
        scale: str,
        factor: float,
        in_bucket: bool,
    ) -> None:
        ir = inductor_ir()
        self._nodes = nodes
        self._gradients = gradients
        self._dtype = dtype
        self._device = gradients[0].get_device()
        self._factor = factor
        self._at_store = "none" if in_bucket else scale
        self._in_bucket = scale if in_bucket else "none"
        # A gradient that was traced with symbols, before others have said what they are.
        numel = sum(int(node.meta["val"].numel()) for node in nodes)
        layout = ir.FixedLayout(self._device, dtype, [numel], [1])
        self._kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
        self._box = ir.StorageBox(self._kernel)
        self.value = ir.TensorBox(self._box)

    def fill(self, places: Sequence[tuple[int, tuple[int, ...]]]) -> dict[int, str]:
        """Store the gradients.

        Args:
            places: offset and strides of each, in elements.

        Returns:
            Why a gradient is copied, by its number, for those that are.
        """
        views = [self._view(*item) for item in zip(self._gradients, places, strict=True)]
        obstacles = {
            number: obstacle
            for number, view in enumerate(views)
            if (obstacle := self._obstacle(number, view)) is not None
        }
        relaid = {
            number: reason
            for number, node in enumerate(self._nodes)
            if (reason := reason_for_copy(node, self._gradients[number])) is not None
        }
        copies = [n for n in obstacles if written_by_a_library(self._gradients[n])]
        one_kernel = supports_foreach(self._device)
        copying: list[str] = []
        for number, view in enumerate(views):
            if number in copies and not one_kernel:
                continue
            is_grouped = one_kernel and (
                number in copies
                or (number not in obstacles and computed_from_a_library(self._gradients[number]))
            )
            buffer = self._store(number, view, number in obstacles, is_grouped)
            if is_grouped:
                copying.append(buffer.get_operation_name())
        if len(copying) > 1:
            graph_lowering().register_operation_list(copying)
        self._register()
        if copies and not one_kernel:
            self._copy([(self._gradients[n], *places[n]) for n in copies])
        self._scale_in_place()
        return relaid | obstacles

    def _view(self, gradient: Any, place: tuple[int, tuple[int, ...]]) -> Any:
        ir = inductor_ir()
        offset, strides = place
        size = list(gradient.get_size())
        layout = ir.FixedLayout(self._device, self._dtype, size, list(strides), offset)
        return ir.ReinterpretView(data=self._box, layout=layout)

    def _is_changed(self, gradient: Any) -> bool:
        return self._at_store != "none" or gradient.get_dtype() != self._dtype

    def _obstacle(self, number: int, view: Any) -> str | None:
        gradient = self._gradients[number]
        return obstacle_to_storing(
            self._nodes[number], gradient, view, is_changed=self._is_changed(gradient)
        )

    def _store(self, number: int, view: Any, is_copied: bool, is_grouped: bool) -> Any:
        gradient = self._gradients[number]
        change = self._change if self._is_changed(gradient) else None
        buffer = store_at(view, gradient, is_copied=is_copied, is_grouped=is_grouped, change=change)
        self._kernel.inputs.append(buffer)
        return buffer

    def _change(self, value: Any) -> Any:
        """What is stored of a gradient: scaled, then cast."""
        value = scaled(value, self._at_store, self._factor, inductor_lowerings())
        return inductor_lowerings().to_dtype(value, self._dtype)

    def _register(self) -> None:
        graph = graph_lowering()
        self._kernel.name = graph.register_buffer(self._kernel)
        self._kernel.inputs = inductor_ir().ConcatKernel.unwrap_storage(self._kernel.inputs)
        graph.register_operation(self._kernel)

    def _copy(self, gradients: Sequence[tuple[Any, int, tuple[int, ...]]]) -> None:
        """One call that copies several gradients."""
        values, offsets, strides = zip(*gradients, strict=True)
        inductor_ir().FallbackKernel.create(
            STORE,
            self.value,
            list(values),
            list(offsets),
            [number for numbers in strides for number in numbers],
            self._at_store,
            self._factor,
        )

    def _scale_in_place(self) -> None:
        if self._in_bucket != "none":
            lowerings = inductor_lowerings()
            product = scaled(self.value, self._in_bucket, self._factor, lowerings)
            inductor_ir().MutationLayoutSHOULDREMOVE.realize_into(
                product, self._box, unsafe_alias=True
            )


def store_at(
    view: Any,
    gradient: Any,
    *,
    is_copied: bool,
    is_grouped: bool,
    change: Callable[[Any], Any] | None = None,
) -> Any:
    """Point a gradient's kernel at its place, or add one that stores it there; that one Inductor
    may fuse with the gradient's, if it generates both. It does so with each sum that it computes by
    a kernel of its own.

    Args:
        view: Inductor's view of the place.
        gradient: Inductor's value of the gradient.
        is_copied: whether its own kernel cannot store it there.
        is_grouped: whether one kernel stores several.
        change: what is stored of it; by default all as it is.

    Returns:
        The buffer that stands for the place.
    """
    ir = inductor_ir()
    is_stored_apart = may_be_bound_anew(gradient)
    if is_stored_apart:
        gradient.realize()
    if isinstance(gradient.data, ir.StorageBox) and not (
        is_copied or is_stored_apart or change is not None
    ):
        gradient.data.realize()
        buffer = gradient.data.data
        buffer.layout = ir.NonOwningLayout(view)
        return buffer
    value = _in_order_of(view, gradient) if is_grouped else _computed_again(gradient)
    if change is not None:
        value = change(value)
    return ir.ConcatKernel.realize_into(value, _flat(view) if is_grouped else view)


def _lower_widen(bucket: Any, dtype: torch.dtype, scale: str, factor: float) -> Any:
    lowerings = inductor_lowerings()
    value = scaled(lowerings.to_dtype(bucket, dtype), scale, factor, lowerings)
    value.realize()
    # Fused with a kernel that needs no collective, it would make that one wait too.
    graph_lowering().no_fuse_buffer_names.add(value.get_name())
    return value


def _lower_agree(sent: Any, module: str, collectives: str, *is_optional: bool) -> None:
    sent.realize()
    inductor_ir().FallbackKernel.create(AGREE, sent, module, collectives, *is_optional)


def _lower_deliver(used: Any, averages: Sequence[Any], *names: Any) -> None:
    for tensor in (used, *averages):
        tensor.realize()
    inductor_ir().FallbackKernel.create(DELIVER, used, list(averages), *names)


def _computed_again(value: Any) -> Any:
    """A value of its own, computed from ``value`` where it is stored."""
    return inductor_ir().Pointwise.create(
        device=value.get_device(),
        dtype=value.get_dtype(),
        inner_fn=value.make_loader(),
        ranges=list(value.get_size()),
    )


def _in_order_of(place: Any, value: Any) -> Any:
    """As :func:`_computed_again`, in one loop over the memory of ``place``. Inductor puts such
    loops into one kernel, whatever they read; loops over two dimensions, as it makes them where a
    layout changes, only if one of the two has the same size in all."""
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
    """The memory of a place, which is dense, as one dimension."""
    ir = inductor_ir()
    old = place.layout
    layout = ir.FixedLayout(old.device, old.dtype, [math.prod(old.size)], [1], old.offset)
    return ir.ReinterpretView(data=place.data, layout=layout)
