"""Takes out of a graph what cannot be fused of DDP's reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from fusion_passes.graph.collectives import is_wait
from fusion_passes.passes.contract import GraphPass
from fusion_passes.passes.verify import GraphFacts, reduced_by
from fusion_passes.reductions.find import Rejection


@dataclass(frozen=True)
class ReduceLater(GraphPass):
    """Leaves reductions that are not fused to the end of the backward.

    Before::

        g0: f32[2*s0, 4] -> div(2) -> all_reduce(sum) -> wait -> user0

    After::

        g0: f32[2*s0, 4] -> div(2) -> user0

    Other ranks may have fused the same gradients: their graphs can differ, as their batches do.
    What is reduced when the backward has ended is agreed on then; what a graph reduces by itself
    would meet whatever the others launch.

    Attributes:
        launches: of DDP's gradients.
        reduced: the elements that they reduce, as
            :attr:`fusion_passes.passes.verify.GraphFacts.reduced`.
    """

    launches: tuple[fx.Node, ...]
    reduced: Counter[tuple[str, str, torch.dtype]]

    why_always: ClassVar[str] = "without it, ranks whose graphs differ would hang"

    @staticmethod
    def of(rejections: Sequence[Rejection]) -> ReduceLater:
        """The pass for those of these that reduce gradients of DDP's."""
        ours = [(item.node, item.owner) for item in rejections if item.owner is not None]
        reduced = sum((reduced_by(node, owner) for node, owner in ours), Counter())
        return ReduceLater(tuple(node for node, _ in ours), reduced)

    def __call__(self, graph: fx.Graph) -> bool:
        for launch in self.launches:
            (gradient,) = launch.all_input_nodes
            for user in list(launch.users):
                if is_wait(user):
                    user.replace_all_uses_with(gradient)
                    graph.erase_node(user)
            launch.replace_all_uses_with(gradient)
            graph.erase_node(launch)
        return bool(self.launches)

    def facts_after(self, before: GraphFacts) -> GraphFacts:
        """The graph reduces less."""
        return replace(before, reduced=before.reduced - self.reduced)
