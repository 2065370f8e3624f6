"""Removes dead code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import schema
from fusion_passes.traced.verify import GraphPass


@dataclass(frozen=True)
class EraseDeadCode(GraphPass):
    """Removes nodes that nothing reads: a dead node would count as a reader of a gradient.

    Before, where Inductor has removed a copy but not the node that it copied::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> neg
                                                           -> user0

    After::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0

    Only pure operators are removed: they compute the same result each time and write nothing.
    Collectives, waits and random numbers stay.
    """

    def __call__(self, graph: fx.Graph) -> bool:
        before = len(graph.nodes)
        for node in reversed(graph.nodes):
            if not node.users and _is_pure(node.target):
                graph.erase_node(node)
        return len(graph.nodes) < before


def _is_pure(target: object) -> bool:
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("aten", "prims")
        and not schema(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )
