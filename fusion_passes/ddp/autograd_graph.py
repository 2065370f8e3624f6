"""Walks the autograd graph of a backward's outputs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion_passes.torch_private import is_compiled_forward
from fusion_passes.torch_private.autograd import AccumulateGrad


def nodes_behind(outputs: Sequence[Any]) -> Iterator[Any]:
    """The nodes of the graph, depth first, each once; about a microsecond a node.

    Args:
        outputs: tensors or gradient edges that the backward starts from.
    """
    pending = _first_nodes(outputs)
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


@dataclass(frozen=True)
class Ends:
    """The tensors in which a graph accumulates gradients.

    Attributes:
        by_region: those that are inputs of a compiled forward, with their places among these, by
            the forward's autograd node; under ``None`` those that come from elsewhere. Each as
            often as it is come upon.
    """

    by_region: dict[Any, list[tuple[int, Tensor]]]

    @functools.cached_property
    def leaves(self) -> list[Tensor]:
        """All of them."""
        return [leaf for edges in self.by_region.values() for _, leaf in edges]


def ends_of(outputs: Sequence[Any]) -> Ends:
    """Where the graph ends; about a microsecond a node.

    Args:
        outputs: tensors or gradient edges that the backward starts from.
    """
    pending = _first_nodes(outputs)
    first = [(-1, node.variable) for node in pending if isinstance(node, AccumulateGrad)]
    found: dict[Any, list[tuple[int, Tensor]]] = {None: first} if first else {}
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        edges = []
        for index, (following, _) in enumerate(node.next_functions):
            if isinstance(following, AccumulateGrad):
                edges.append((index, following.variable))
            elif following is not None:
                pending.append(following)
        if edges:
            found.setdefault(node if is_compiled_forward(node) else None, []).extend(edges)
    return Ends(found)


def _first_nodes(outputs: Sequence[Any]) -> list[Any]:
    return [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
