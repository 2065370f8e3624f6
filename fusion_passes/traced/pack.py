"""Lowers a bucket of a traced graph to one buffer that its gradients' own kernels store into.

``pack`` becomes Inductor's ``ConcatKernel``, which is no kernel at all: it is a buffer whose parts
other kernels write (see :mod:`fusion_passes.stored.flat_buffer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusion_passes.graph.collectives import ALL_REDUCE_COALESCED, ALL_REDUCE_COALESCED_IN_PLACE
from fusion_passes.graph.custom_ops import PACK, STORE, WIDEN, divided, split_strides
from fusion_passes.layout.layout import Offset
from fusion_passes.stored.flat_buffer import FlatBuffer
from fusion_passes.torch_private.inductor import (
    graph_lowering,
    inductor_ir,
    inductor_lowerings,
    register_lowering,
)
from fusion_passes.torch_private.older_torch import fix_strides_of_lists

OnPacked = Callable[[str, Mapping[int, str]], None]
"""Receives a bucket's label, and the reason for each gradient that was copied, by its index."""


def register_lowerings(on_packed: OnPacked) -> None:
    """Register the lowerings of the package's operators with Inductor, and give coalesced gradients
    their strides on an older torch. ``on_packed`` is called for each bucket that is lowered."""

    def lower_pack(
        gradients: Sequence[Any],
        offsets: Sequence[Offset],
        strides: Sequence[int],
        dtype: torch.dtype,
        divisor: float,
        in_bucket: bool,
        label: str,
    ) -> Any:
        nodes: list[fx.Node] = graph_lowering().current_node.args[0]
        bucket = _PackBuffer(nodes, gradients, dtype, divisor, in_bucket)
        places = split_strides([node.meta["val"] for node in nodes], strides)
        copied = bucket.fill(list(zip(offsets, places, strict=True)))
        bucket.divide_in_place()
        on_packed(label, copied)
        return bucket.value

    register_lowering(PACK, lower_pack)
    register_lowering(WIDEN, _lower_widen)
    for coalesced in (ALL_REDUCE_COALESCED, ALL_REDUCE_COALESCED_IN_PLACE):
        fix_strides_of_lists(coalesced)


class _PackBuffer(FlatBuffer):
    def __init__(
        self,
        nodes: Sequence[fx.Node],
        gradients: Sequence[Any],
        dtype: torch.dtype,
        divisor: float,
        in_bucket: bool,
    ) -> None:
        ir, device = inductor_ir(), gradients[0].get_device()
        # int(): a gradient may be traced with symbolic sizes that got their values later.
        numel = sum(int(node.meta["val"].numel()) for node in nodes)
        layout = ir.FixedLayout(device, dtype, [numel], [1])
        self._kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
        super().__init__(ir.StorageBox(self._kernel), nodes, gradients, device, dtype)
        self._at_store, self._in_bucket = (1.0, divisor) if in_bucket else (divisor, 1.0)
        self.value = ir.TensorBox(self.data)

    def change_of(self, gradient: Any) -> Callable[[Any], Any] | None:
        """A function that divides a gradient, then casts it; ``None`` if it needs neither."""
        if self._at_store == 1 and gradient.get_dtype() == self.dtype:
            return None

        def change(value: Any) -> Any:
            lowerings = inductor_lowerings()
            value = divided(value, self._at_store, lowerings)
            return lowerings.to_dtype(value, self.dtype)

        return change

    def note_writer(self, number: int, writer: Any) -> None:
        del number
        self._kernel.inputs.append(writer)

    def end_stores(self) -> None:
        graph = graph_lowering()
        self._kernel.name = graph.register_buffer(self._kernel)
        self._kernel.inputs = inductor_ir().ConcatKernel.unwrap_storage(self._kernel.inputs)
        graph.register_operation(self._kernel)

    def copy(self, values: list[Any], offsets: list[Offset], strides: list[int]) -> None:
        arguments = (self.value, values, offsets, strides, self._at_store)
        inductor_ir().FallbackKernel.create(STORE, *arguments)

    def divide_in_place(self) -> None:
        """Divide the whole bucket in one pass, if its scaling is ``"bucket"``."""
        if self._in_bucket != 1:
            quotient = divided(self.value, self._in_bucket, inductor_lowerings())
            inductor_ir().MutationLayoutSHOULDREMOVE.realize_into(
                quotient, self.data, unsafe_alias=True
            )


def _lower_widen(bucket: Any, dtype: torch.dtype, divisor: float) -> Any:
    lowerings = inductor_lowerings()
    value = divided(lowerings.to_dtype(bucket, dtype), divisor, lowerings)
    value.realize()
    # A kernel that does not need the collective would wait for it too if it were fused with this.
    graph_lowering().no_fuse_buffer_names.add(value.get_name())
    return value
