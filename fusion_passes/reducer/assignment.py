"""The assignment of gradients to buckets: first in the reverse order of the parameters, then, after
the first iteration, in the order in which rank 0 received the gradients."""

from __future__ import annotations

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
        is_fixed: whether the layout is fixed, so that compiled backwards store into it.
    """

    def __init__(self, parameters: Parameters, caps: BucketCaps) -> None:
        self.caps = self.piece_caps = caps
        # DDP's own first order is that of the parameters, in reverse.
        self.layout = plan_layout(
            [(number,) for number in reversed(list(parameters.kinds))], parameters.kinds, caps
        )
        self.is_fixed = False
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
        gradients come, and broadcasts them. All ranks call this."""
        kinds = self._parameters.kinds
        seen = {number for piece in self._observed for number in piece}
        rest = [(number,) for number in reversed(list(kinds)) if number not in seen]
        layout = plan_layout([*self._observed, *rest], kinds, self.caps)
        if group.size() > 1:
            numbers = encode(bucket.numbers for bucket in layout.buckets)
            device = next(iter(kinds.values())).device
            sent = torch.tensor(numbers, dtype=torch.int64, device=device)
            broadcast_first(group, sent)
            layout = lay_out([[numbers] for numbers in decode(sent.tolist())], kinds)
        self._observed.clear()
        return layout
