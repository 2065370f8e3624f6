"""The interface of a pass, and the invariants that hold after every pass. A broken invariant is a
bug of the package, never a user's error: the compile stops before a wrong gradient is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fusion_passes.graph.collectives import (
    data_users,
    decode_all_reduce,
    group_name_of,
    is_launch,
    is_wait,
    results_of,
)
from fusion_passes.graph.text import value_text
from fusion_passes.traced.owners import DdpGroups


class BrokenInvariantError(AssertionError):
    """A pass made a graph that means something else than the graph it was given."""


@dataclass(frozen=True)
class GraphFacts:
    """Facts that a pass keeps, except for the changes that its :meth:`GraphPass.facts_after`
    declares.

    Attributes:
        outputs: dtype, shape and strides of each output.
        reduced: number of elements reduced, by (group name of the DDP module, reduce op, dtype).
        foreign: collectives that are not DDP's, in issue order, by group name.
        unwaited: names of DDP's collectives with a result that is read before it is waited for, or
            never waited for.
    """

    outputs: tuple[str, ...]
    reduced: Counter[tuple[str, str, torch.dtype]]
    foreign: dict[str, tuple[str, ...]]
    unwaited: frozenset[str]


class GraphPass(ABC):
    """A pass over a graph: a frozen dataclass whose fields are its options, all of them plain
    values. By the name of its class, ``TORCHINDUCTOR_DISABLED_PASSES`` switches the pass off, and
    the pass is timed and traced."""

    @abstractmethod
    def __call__(self, graph: fx.Graph) -> bool:
        """Rewrite ``graph`` in place.

        Returns:
            True exactly when the graph has changed.
        """

    def facts_after(self, before: GraphFacts) -> GraphFacts:
        """The facts that must hold after the pass: for most passes, those from before it."""
        return before


def graph_facts(graph: fx.Graph, groups: DdpGroups) -> GraphFacts:
    """Read the facts off a graph."""
    reduced: Counter[tuple[str, str, torch.dtype]] = Counter()
    foreign: dict[str, list[str]] = {}
    unwaited = set()
    outputs: tuple[str, ...] = ()
    for node in graph.nodes:
        if node.op == "output":
            outputs = tuple(value_text(item.meta.get("val")) for item in node.all_input_nodes)
        if not is_launch(node):
            continue
        owner = groups.owner_of(node)
        if owner is None:
            foreign.setdefault(str(group_name_of(node)), []).append(f"{node.name}: {node.target}")
            continue
        if not _is_waited_for(node):
            unwaited.add(node.name)
        for value in _tensors(node.meta["val"]):
            reduced[owner.group_name, str(_reduce_op(node)), value.dtype] += value.numel()
    return GraphFacts(
        outputs,
        reduced,
        {name: tuple(nodes) for name, nodes in foreign.items()},
        frozenset(unwaited),
    )


def verify(graph: fx.Graph, before: GraphFacts, groups: DdpGroups) -> GraphFacts:
    """Check the invariants on a graph that a pass has rewritten. ``before`` are the facts that must
    hold for the graph; return its facts.

    Raises:
        BrokenInvariantError: its text names the invariant and shows both sides.
    """
    try:
        graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise BrokenInvariantError(f"the graph is not well formed: {error}") from error
    after = graph_facts(graph, groups)
    _same("the graph returns other values", before.outputs, after.outputs)
    _same("other elements are reduced", +before.reduced, +after.reduced)
    _same("a collective that is not DDP's was changed or moved", before.foreign, after.foreign)
    _same("a reduction is not waited for", before.unwaited & after.unwaited, after.unwaited)
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise BrokenInvariantError(f"{node.name} has no value in its metadata")
    return after


def _same(invariant: str, before: object, after: object) -> None:
    if before != after:
        raise BrokenInvariantError(f"{invariant}: before {before}, after {after}")


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _reduce_op(node: fx.Node) -> object:
    call = decode_all_reduce(node)
    return call.reduce_op if call else node.args[1]


def _is_waited_for(launch: fx.Node) -> bool:
    """Whether the results of the collective are read, and only by waits."""
    # One pinned node can wait for thousands of results.
    readers = dict.fromkeys(user for result in results_of(launch) for user in data_users(result))
    return bool(readers) and all(is_wait(reader) for reader in readers)
