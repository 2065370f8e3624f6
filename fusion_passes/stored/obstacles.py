"""Which gradients the kernel that computes them can store in their bucket, and the reasons why
other gradients are copied."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fusion_passes.graph.collectives import data_users, without_pins
from fusion_passes.graph.custom_ops import PACK
from fusion_passes.graph.families import (
    COPY,
    ITEMS,
    RELAYOUTS,
    VIEWS,
    is_library_kernel,
    stores_unscaled,
)
from fusion_passes.torch_private.inductor import (
    graph_lowering,
    inductor_ir,
    is_split_sum,
    mixes_orders,
)


def obstacle_to_storing(
    node: fx.Node, gradient: Any, place: Any, *, is_changed: bool
) -> str | None:
    """Why the gradient's kernel cannot store it in its place; ``None`` if it can. ``gradient`` and
    ``place`` are Inductor's values; ``is_changed``: the gradient is cast or scaled when stored."""
    ir, box = inductor_ir(), box_of(gradient)
    buffer = box.data
    if _is_view(gradient) and isinstance(buffer, ir.Loops):
        return None  # The kernel that writes the place computes it.
    whole = place_of_buffer(gradient, place)
    if whole is None:
        return "it is a view of a buffer with another layout"
    if isinstance(buffer, ir.InputBuffer | ir.ConstantBuffer):
        return "it is a graph input"
    if _is_read_elsewhere(node):
        return "another node reads it too"
    if is_changed:
        is_generated = isinstance(buffer, ir.Loops | ir.ComputedBuffer)
        return None if is_generated else f"{_operator(node)} cannot cast or scale its result"
    return _layout_obstacle(node, box, whole)


def place_of_buffer(gradient: Any, place: Any) -> Any | None:
    """A view of ``place`` in the shape of the buffer that holds the gradient: a kernel that writes
    the buffer there puts the gradient into ``place``. ``None`` if the gradient views only a part of
    its buffer, or all of it in another order than that of ``place``."""
    if not _is_view(gradient):
        return place
    ir, view, buffer = inductor_ir(), gradient.data, box_of(gradient).data
    if not isinstance(view, ir.ReinterpretView) or isinstance(buffer, ir.Loops):
        return None
    shown, own, numel = view.layout, buffer.layout, math.prod(place.get_size())
    is_whole = (
        type(own) is ir.FixedLayout
        and own.dtype == shown.dtype
        and own.storage_size() == math.prod(own.size) == numel  # Dense, as the place is.
        and _fits(shown, place)
    )
    if not is_whole:
        return None
    offset = place.layout.offset
    layout = ir.FixedLayout(place.get_device(), place.get_dtype(), own.size, own.stride, offset)
    return ir.ReinterpretView(data=place.data, layout=layout)


def reason_for_copy(node: fx.Node, gradient: Any) -> str | None:
    """Why Inductor itself copies the gradient: a library kernel returned it in another layout than
    the gradient must have, and that copy stores it in its place. ``None`` if there is no copy."""
    ir, source = inductor_ir(), _source(node)
    is_generated = isinstance(box_of(gradient).data, ir.Loops | ir.ComputedBuffer)
    if is_generated and is_library_kernel(source) and not stores_unscaled(source):
        return f"{_operator(node)} returns it in another layout"
    return None


def written_by_a_library(gradient: Any) -> bool:
    """Whether the gradient's memory was not written by a generated kernel. Copying such a gradient
    takes a separate kernel; the copy of any other is fused into the kernel that writes it."""
    ir = inductor_ir()
    return not isinstance(box_of(gradient).data, ir.Loops | ir.ComputedBuffer)


def _is_view(gradient: Any) -> bool:
    return not isinstance(gradient.data, inductor_ir().StorageBox)


def box_of(gradient: Any) -> Any:
    """The storage box of the buffer that holds the gradient, or that the gradient views."""
    return gradient.data.unwrap_view() if _is_view(gradient) else gradient.data


def _loops(box: Any) -> Any:
    """The loops that compute the box's buffer, realized or not."""
    return box.data.data if isinstance(box.data, inductor_ir().ComputedBuffer) else box.data


def computed_from_a_library(gradient: Any) -> bool:
    """Whether a pointwise kernel computes the gradient from results of library kernels (and inputs
    of the graph) alone, for example a cast of a matrix product. Then there is no other generated
    kernel that it could be fused into."""
    ir, graph, box = inductor_ir(), graph_lowering(), box_of(gradient)
    if not isinstance(_loops(box), ir.Pointwise):
        return False
    names = box.data.get_read_names()
    written = [graph.try_get_buffer(name) for name in names if name not in graph.graph_inputs]
    return bool(written) and all(isinstance(buffer, ir.ExternKernelOut) for buffer in written)


def may_be_bound_anew(gradient: Any) -> bool:
    """Whether Inductor's mix-order reduction may rebind the gradient's buffer to another tensor
    instead of writing it: see :func:`fusion_passes.torch_private.inductor.mixes_orders`. Inductor
    picks these kernels later, by size thresholds that differ between versions of torch."""
    if not mixes_orders(gradient.get_device()):
        return False
    ir, graph, box = inductor_ir(), graph_lowering(), box_of(gradient)
    loops = _loops(box)
    if isinstance(loops, ir.Reduction):
        return True
    # The second half of a sum that is split in a few parts is no Reduction: it adds the parts.
    return isinstance(loops, ir.Loops) and any(
        is_split_sum(graph.try_get_buffer(name)) for name in box.data.get_read_names()
    )


def _layout_obstacle(node: fx.Node, box: Any, place: Any) -> str | None:
    """Why the kernel cannot write the gradient, unchanged, to its place; ``None`` if it can."""
    ir = inductor_ir()
    buffer = box.data
    if isinstance(buffer, ir.Loops):
        return None
    if isinstance(buffer, ir.ExternKernelAlloc | ir.MultiOutput):
        return f"{_operator(node)} allocates its own result"
    if isinstance(buffer, ir.MultiTemplateBuffer):
        fits = ir.ConcatKernel.can_realize_into_without_copy(box, place)
        return None if fits else "max_autotune chooses its kernel later"
    if not isinstance(buffer, ir.ComputedBuffer | ir.ExternKernelOut | ir.TemplateBuffer):
        return f"its kernel is of an unsupported kind, {type(buffer).__name__}"
    return None if _fits(buffer.layout, place) else "its kernel needs another layout"


def _fits(layout: Any, place: Any) -> bool:
    ir = inductor_ir()
    if isinstance(layout, ir.FlexibleLayout):
        return True
    if type(layout) is not ir.FixedLayout or layout.offset != 0:
        return False
    strides = zip(layout.size, layout.stride, place.get_stride(), strict=True)
    return all(size == 1 or theirs == ours for size, theirs, ours in strides)


def _is_read_elsewhere(node: fx.Node) -> bool:
    """Whether anything but the bucket, which is reduced in place, reads the memory of the node's
    value. Some operators return the memory of an input, so inputs are checked too."""
    reads = sum(source is node for user in data_users(node) for source in _sources(user))
    if reads > 1:
        return True
    memory = _memory(node)
    return any(
        _memory(source) is memory and _is_read_elsewhere(source)
        for source in node.all_input_nodes
        if source.op != "get_attr"
    )


def _sources(user: fx.Node) -> list[Any]:
    """The nodes that ``user`` reads, once each; for a ``pack``, one entry for each read."""
    if user.target is PACK:
        return list(user.args[0])  # type: ignore[arg-type]
    return list(user.all_input_nodes)


def _memory(node: fx.Node) -> Any:
    """The object that holds the memory of the node's value, to be compared by identity."""
    value = graph_lowering().env.get(node)
    data = getattr(value, "data", None)
    if data is None:
        return object()
    return data.data if isinstance(data, inductor_ir().StorageBox) else data.unwrap_view().data


def _operator(node: fx.Node) -> str:
    return str(_source(node).target).removesuffix(".default")


def _source(node: fx.Node) -> fx.Node:
    """The node that computes the value of ``node``. The nodes between the two only take the value
    out of a list, view it, or change its layout."""
    while node.target in ITEMS | RELAYOUTS | VIEWS:
        node = node.all_input_nodes[-1 if node.target is COPY else 0]  # Other inputs are sizes.
    return without_pins(node)
