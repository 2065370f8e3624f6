"""The assignment of gradients to buckets: first in the reverse order of the parameters, then, after
the first iteration, in the order in which rank 0 received the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion_passes.layout.caps import BucketCaps
from fusion_passes.layout.layout import Layout, Piece, decode, encode, lay_out, plan_layout
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.torch_private.process_groups import broadcast_first


class BucketAssignment:
    """The layout of one module.

    Attributes:
        caps: the caps of the buckets.
        piece_caps: the caps of the pieces that a graph stores together if it is compiled before the
            layout is fixed.
        layout: the layout of the next iteration.
        graph_layout: the layout for which graphs are compiled; ``None`` before it is fixed.
        is_fixed: whether the layout is fixed, so that compiled backwards store into it.
        pieces: the pieces of all parameters that the layout was rebuilt from.
    """

    def __init__(self, parameters: Parameters, caps: BucketCaps) -> None:
        self.caps = self.piece_caps = caps
        # DDP's own first order is that of the parameters, in reverse.
        self.layout = plan_layout(
            [(number,) for number in reversed(list(parameters.kinds))], parameters.kinds, caps
        )
        self.graph_layout: Layout | None = None
        self.is_fixed = False
        self.pieces: Sequence[Piece] = ()
        self._parameters = parameters
        self._observed: list[Piece] = []

    def observe(self, numbers: Piece) -> None:
        """Record, in the first iteration, that these gradients arrived next, and together."""
        if self.is_fixed:
            return
        known = {n for piece in self._observed for n in piece}
        if known.isdisjoint(numbers):
            self._observed.append(tuple(numbers))

    def rebuilt(self, group: Any) -> Layout:
        """Agree on a layout: rank 0 lays the buckets out by the order in which it has seen
        gradients come, and broadcasts its pieces and the buckets. All ranks call this."""
        kinds = self._parameters.kinds
        seen = {number for piece in self._observed for number in piece}
        rest = [(number,) for number in reversed(list(kinds)) if number not in seen]
        self.pieces = [*self._observed, *rest]
        self._observed.clear()
        layout = plan_layout(self.pieces, kinds, self.caps)
        if group.size() > 1:
            buckets = encode(bucket.numbers for bucket in layout.buckets)
            device = next(iter(kinds.values())).device
            both = torch.tensor([encode(self.pieces), buckets], dtype=torch.int64, device=device)
            broadcast_first(group, both)
            self.pieces, members = map(decode, both.tolist())
            layout = lay_out([[numbers] for numbers in members], kinds)
        return layout
