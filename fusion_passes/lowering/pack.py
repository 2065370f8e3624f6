"""Lowers a bucket to one buffer that its gradients' own kernels store into.

``pack`` becomes Inductor's ``ConcatKernel``, which is no kernel at all: a buffer whose parts other
kernels write. What produces a gradient is pointed at the gradient's place in it: a library's
matrix product by ``out=``, a generated kernel by storing there. What cannot be pointed there is
copied, all such gradients of a bucket by one kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fusion_passes.collectives import data_users
from fusion_passes.operators import IN_BUCKET, PACK, STORE, WIDEN, split_strides
from fusion_passes.torch_private import (
    graph_lowering,
    inductor_ir,
    inductor_lowerings,
    register_lowering,
    supports_foreach,
)

OnPacked = Callable[[str, Mapping[int, str]], None]
"""Is told a bucket's label, and for each gradient that was copied (by number) the reason."""


def register_lowerings(on_packed: OnPacked) -> None:
    """Teaches Inductor the package's operators.

    Args:
        on_packed: called for each bucket that is lowered.
    """

    def pack(gradients: Sequence[Any], *args: Any) -> Any:
        return _lower_pack(on_packed, gradients, *args)

    register_lowering(PACK, pack)
    register_lowering(WIDEN, _lower_widen)


@dataclass
class _Store:
    """How one gradient gets into its place.

    Attributes:
        gradient: Inductor's value of it.
        place: view of the bucket, with the gradient's shape.
        numbers: its offset and strides in the bucket.
        obstacle: why its producer cannot store it there; ``None`` if it can.
    """

    gradient: Any
    place: Any
    numbers: tuple[int, tuple[int, ...]]
    obstacle: str | None


@dataclass
class _Bucket:
    """A bucket while it is lowered.

    Attributes:
        kernel: the ``ConcatKernel``.
        box: what its places are views of.
        copies: names of the operations that only copy.
    """

    kernel: Any
    box: Any
    copies: list[str] = field(default_factory=list)


def _lower_pack(
    on_packed: OnPacked,
    gradients: Sequence[Any],
    offsets: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    scale: str,
    factor: float,
    label: str,
) -> Any:
    ir, graph = inductor_ir(), graph_lowering()
    nodes = graph.current_node.args[0]
    bucket = _new_bucket(gradients[0].get_device(), dtype, nodes)
    at_store = "none" if scale.endswith(IN_BUCKET) else scale
    stores = []
    shapes = [node.meta["val"] for node in nodes]
    for node, gradient, *numbers in zip(
        nodes, gradients, offsets, split_strides(shapes, strides), strict=True
    ):
        offset, stride = numbers
        layout = ir.FixedLayout(
            bucket.kernel.get_device(), dtype, list(gradient.get_size()), list(stride), offset
        )
        place = ir.ReinterpretView(data=bucket.box, layout=layout)
        changed = at_store != "none" or gradient.get_dtype() != dtype
        obstacle = _obstacle(node, gradient, place, changed)
        stores.append(_Store(gradient, place, (offset, stride), obstacle))
    apart = [] if supports_foreach(bucket.kernel.get_device()) else [s for s in stores if _is_alien(s)]
    for store in stores:
        if store not in apart:
            _store(bucket, store, at_store, factor)
    if len(bucket.copies) > 1:
        graph.register_operation_list(bucket.copies)
    bucket.kernel.name = graph.register_buffer(bucket.kernel)
    bucket.kernel.inputs = ir.ConcatKernel.unwrap_storage(bucket.kernel.inputs)
    graph.register_operation(bucket.kernel)
    result = ir.TensorBox(bucket.box)
    if apart:
        _store_apart(result, apart, at_store, factor)
    if at_store != scale:
        product = _scaled(result, scale.removesuffix(IN_BUCKET), factor)
        ir.MutationLayoutSHOULDREMOVE.realize_into(product, result.data, unsafe_alias=True)
    on_packed(label, {i: s.obstacle for i, s in enumerate(stores) if s.obstacle is not None})
    return result


def _new_bucket(device: Any, dtype: torch.dtype, nodes: Sequence[fx.Node]) -> _Bucket:
    ir = inductor_ir()
    numel = sum(node.meta["val"].numel() for node in nodes)
    layout = ir.FixedLayout(device, dtype, [numel], [1])
    kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
    return _Bucket(kernel, ir.StorageBox(kernel))


def _store(bucket: _Bucket, store: _Store, scale: str, factor: float) -> None:
    """Points the gradient's producer at its place, or adds a kernel that stores it there; that one
    Inductor may fuse with the producer, if it generates both."""
    ir = inductor_ir()
    gradient = store.gradient
    if store.obstacle is None and gradient.get_dtype() == store.place.get_dtype() and scale == "none":
        buffer = _take_over(gradient, store.place)
    else:
        value = inductor_lowerings().to_dtype(
            _scaled(_copy_of(gradient), scale, factor), store.place.get_dtype()
        )
        buffer = ir.ConcatKernel.realize_into(value, store.place)
        if _is_alien(store):
            bucket.copies.append(buffer.get_operation_name())
    bucket.kernel.inputs.append(buffer)


def _take_over(gradient: Any, place: Any) -> Any:
    """Lets the gradient's kernel write to ``place``, which it can."""
    ir = inductor_ir()
    box = _box(gradient)
    if box is None:
        return ir.ConcatKernel.realize_into(gradient, place)
    box.realize()
    box.data.layout = ir.NonOwningLayout(place)
    return box.data


def _copy_of(value: Any) -> Any:
    """A value of its own, computed from ``value`` where it is stored."""
    ir = inductor_ir()
    return ir.Pointwise.create(
        device=value.get_device(),
        dtype=value.get_dtype(),
        inner_fn=value.make_loader(),
        ranges=list(value.get_size()),
    )


def _store_apart(bucket: Any, stores: Sequence[_Store], scale: str, factor: float) -> None:
    """One call that copies several gradients."""
    offsets = [store.numbers[0] for store in stores]
    strides = [number for store in stores for number in store.numbers[1]]
    gradients = [store.gradient for store in stores]
    inductor_ir().FallbackKernel.create(STORE, bucket, gradients, offsets, strides, scale, factor)


def _scaled(value: Any, scale: str, factor: float) -> Any:
    lowerings = inductor_lowerings()
    if scale == "none":
        return value
    return (lowerings.div if scale == "div" else lowerings.mul)(value, factor)


def _lower_widen(bucket: Any, dtype: torch.dtype, scale: str, factor: float) -> Any:
    value = _scaled(inductor_lowerings().to_dtype(bucket, dtype), scale, factor)
    value.realize()
    # Fused with a kernel that needs no collective, it would make that one wait too.
    graph_lowering().no_fuse_buffer_names.add(value.get_name())
    return value


# --- What can be stored without a copy ---------------------------------------------------------


def _obstacle(node: fx.Node, gradient: Any, place: Any, changed: bool) -> str | None:
    """Why the gradient's kernel cannot store it in the bucket; ``None`` if it can.

    Args:
        node: the gradient's node.
        gradient: Inductor's value of it.
        place: where it is to be stored.
        changed: whether it is cast or scaled on the way.
    """
    ir = inductor_ir()
    box = _box(gradient)
    if box is None:
        inner = gradient.data.unwrap_view()
        computed = isinstance(inner, ir.StorageBox) and isinstance(inner.data, ir.Loops)
        return None if computed else "it is a view of a tensor that is laid out in another way"
    buffer = box.data
    if isinstance(buffer, ir.InputBuffer | ir.ConstantBuffer):
        return "it is an input of the graph"
    if _is_read_elsewhere(node):
        return "something else reads it too"
    if isinstance(buffer, ir.Loops) or (changed and isinstance(buffer, ir.ComputedBuffer)):
        return None
    if isinstance(buffer, ir.ExternKernelAlloc | ir.MultiOutput):
        return f"{_operator(node)} allocates its result itself"
    if changed:
        return f"{_operator(node)} neither casts nor scales its result"
    return _layout_obstacle(buffer, box, place)


def _layout_obstacle(buffer: Any, box: Any, place: Any) -> str | None:
    ir = inductor_ir()
    if isinstance(buffer, ir.MultiTemplateBuffer):
        fits = ir.ConcatKernel.can_realize_into_without_copy(box, place)
        return None if fits else "its kernel is still to be chosen by max_autotune"
    if not isinstance(buffer, ir.ComputedBuffer | ir.ExternKernelOut | ir.TemplateBuffer):
        return f"its kernel is a {type(buffer).__name__}"
    layout = buffer.layout
    if isinstance(layout, ir.FlexibleLayout):
        return None
    if type(layout) is not ir.FixedLayout or layout.offset != 0:
        return f"its kernel stores by a {type(layout).__name__}"
    ours, theirs = (
        [stride for size, stride in zip(layout.size, strides, strict=True) if size != 1]
        for strides in (place.get_stride(), layout.stride)
    )
    return None if ours == theirs else f"its kernel stores with strides {layout.stride}"


def _is_alien(store: _Store) -> bool:
    """Whether a gradient is to be copied from memory that no generated kernel has written: such a
    copy is a kernel of its own."""
    ir = inductor_ir()
    if store.obstacle is None:
        return False
    box = _box(store.gradient)
    if box is None:
        box = store.gradient.data.unwrap_view()
    return not isinstance(box.data, ir.Loops | ir.ComputedBuffer)


def _is_read_elsewhere(node: fx.Node) -> bool:
    """Whether anything but the bucket sees the memory in which the node's value lies: the bucket is
    reduced in place. Some operators give their input's memory on as their own."""
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
    if user.target is PACK:
        return list(user.args[0])  # type: ignore[arg-type]
    return list(user.all_input_nodes)


def _memory(node: fx.Node) -> Any:
    """What holds the node's value, to be compared by identity."""
    value = graph_lowering().env.get(node)
    if not hasattr(value, "data"):
        return object()
    box = _box(value)
    return box.data if box is not None else value.data.unwrap_view().data


def _box(value: Any) -> Any:
    """The box of a value that is no view."""
    data = value.data
    return data if isinstance(data, inductor_ir().StorageBox) else None


def _operator(node: fx.Node) -> str:
    source = node
    while source.target is operator.getitem:
        source = source.args[0]  # type: ignore[assignment]
    return str(source.target).removesuffix(".default")
