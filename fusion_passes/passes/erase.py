"""Removes dead readers of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fusion_passes.graph.collectives import is_wait
from fusion_passes.graph.families import CASTS, ITEMS, RELAYOUTS, SCALINGS, VIEWS
from fusion_passes.passes.verify import GraphPass
from fusion_passes.reductions.owners import DdpGroups
from fusion_passes.torch_private import OpOverload
from fusion_passes.torch_private.autograd import schema

_PASSED_THROUGH: Final = VIEWS | CASTS | SCALINGS | RELAYOUTS | ITEMS
"""What a gradient goes through on its way to its launch, and its average after the wait."""


@dataclass(frozen=True)
class EraseDeadCode(GraphPass):
    """Removes what reads a gradient or its average, and is read by nothing: it would pass for a
    reader.

    Before, where Inductor has removed a copy but not what was copied::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> neg
                                                           -> user0

    After::

        g0: f32[4, 8] -> div(2) -> all_reduce(sum) -> wait -> user0

    Only operators that compute, the same each time, and write nothing: no collective, no wait, no
    random number. Other dead code is left to Inductor, which may count on it: in lite mode, an
    ``as_strided`` that nothing reads gives the buffer its memory that an ``as_strided_scatter``
    copies, and the copy stays zero without (torch 2.13).

    Attributes:
        groups: the graph's names of DDP's groups.
    """

    groups: DdpGroups

    def __call__(self, graph: fx.Graph) -> bool:
        dead: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if _is_pure(node.target) and all(user in dead for user in node.users):
                dead.add(node)
        readers = self._gradients(graph)
        erased = []
        for node in graph.nodes:
            if node in dead and not readers.isdisjoint(node.all_input_nodes):
                readers.add(node)
                erased.append(node)
        for node in reversed(erased):
            graph.erase_node(node)
        return bool(erased)

    def _gradients(self, graph: fx.Graph) -> set[fx.Node]:
        """Gradients that are sent, with what they are views of, and what comes of them."""
        found: set[fx.Node] = set()
        for launch in graph.nodes:
            if self.groups.owner_of(launch) is None:
                continue
            found.add(launch)
            pending = launch.all_input_nodes
            while pending:
                source = pending.pop()
                found.add(source)
                if source.target in _PASSED_THROUGH:
                    pending += source.all_input_nodes
        for node in graph.nodes:
            passes_on = is_wait(node) or node.target in _PASSED_THROUGH
            if passes_on and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found


def _is_pure(target: object) -> bool:
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("aten", "prims")
        and not schema(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )
