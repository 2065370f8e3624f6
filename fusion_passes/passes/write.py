"""Writes the results of a bucket into existing gradients by one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fusion_passes.graph.collectives import is_all_reduce, is_wait
from fusion_passes.graph.operators import WIDEN
from fusion_passes.graph.transparent import (
    CASTS,
    ITEMS,
    RELAYOUTS,
    SCALINGS,
    SCALINGS_OF_LISTS,
    VIEWS,
)
from fusion_passes.passes.contract import GraphPass
from fusion_passes.reductions.owners import DdpGroups

_aten = torch.ops.aten
# What can stand between a wait and an existing gradient: whatever leaves it that gradient.
_BETWEEN: Final = VIEWS | RELAYOUTS | CASTS | SCALINGS | SCALINGS_OF_LISTS | ITEMS | {WIDEN}


@dataclass(frozen=True)
class WriteGradsTogether(GraphPass):
    """One ``_foreach_copy_`` for each bucket whose results go into existing gradients.

    Before, for a bucket with two::

        wait: f32[40] -> as_strided -> copy_(grad0: f32[4, 8], .)
                      -> as_strided -> copy_(grad1: f32[8], .)

    After::

        _foreach_copy_([grad0, grad1], [as_strided, as_strided])
        return (grad0, grad1)

    On a GPU that is one kernel, where Inductor would launch one for each gradient. Only graph
    inputs that are written once, and whose new value nothing in the graph reads, are written
    together; others keep their ``copy_``.

    Attributes:
        groups: the graph's names of DDP's groups.
    """

    groups: DdpGroups

    def __call__(self, graph: fx.Graph) -> bool:
        position = {node: index for index, node in enumerate(graph.nodes)}
        groups = [
            sorted(copies, key=position.__getitem__)
            for launch in graph.nodes
            if is_all_reduce(launch) and self.groups.owner_of(launch) is not None
            if len(copies := _copies_after(launch)) > 1
        ]
        for copies in groups:
            _write_together(copies)
        return bool(groups)


def _copies_after(launch: fx.Node) -> list[fx.Node]:
    """The copies of a bucket's results into existing gradients."""
    copies: dict[fx.Node, None] = {}
    pending = [launch]
    while pending:
        node = pending.pop()
        for user in node.users:
            if _is_plain_write(user):
                copies[user] = None
            elif is_wait(user) or user.target in _BETWEEN:
                pending.append(user)
    return list(copies)


def _is_plain_write(node: fx.Node) -> bool:
    if node.target is not _aten.copy_.default or len(node.args) != 2:
        return False
    target = node.args[0]
    if not isinstance(target, fx.Node) or target.op != "placeholder":
        return False
    writes = [user for user in target.users if user.target is _aten.copy_.default]
    return writes == [node] and all(user.op == "output" for user in node.users)


def _write_together(copies: list[fx.Node]) -> None:
    graph, last = copies[-1].graph, copies[-1]
    targets = [copy.args[0] for copy in copies]
    with graph.inserting_after(last):
        together = graph.call_function(
            _aten._foreach_copy_.default, (targets, [copy.args[1] for copy in copies])
        )
    together.meta["val"] = None
    for copy, target in zip(copies, targets, strict=True):
        copy.replace_all_uses_with(target)  # type: ignore[arg-type]
        graph.erase_node(copy)
