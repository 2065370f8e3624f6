"""Holds launches and waits in their places through Inductor's scheduler."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fusion_passes.collectives import (
    data_users,
    group_name_of,
    is_held,
    is_launch,
    is_wait,
    results_of,
)
from fusion_passes.graph_edit import hold
from fusion_passes.kernels import is_library_kernel
from fusion_passes.operators import PACK
from fusion_passes.reductions import OwnerOf

_aten = torch.ops.aten
_SENT_THROUGH: Final = frozenset(
    (
        PACK,
        operator.getitem,
        _aten.permute.default,
        _aten.reshape.default,
        _aten.view.default,
        _aten.view_as_real.default,
    )
)


@dataclass(frozen=True)
class HoldPlacement:
    """Turns the order of launches, kernels and waits into dependencies.

    Inductor's scheduler sorts its nodes anew and moves them to lower the peak of memory; the order
    of the graph alone does not bind it. Before::

        all_reduce, mm, wait

    After, where ``x @ [y]`` runs ``x`` after ``y`` (torch's ``control_deps``)::

        all_reduce, mm @ [all_reduce], wait @ [all_reduce, mm]

    A launch is bound to the first library kernel (matrix product, convolution, attention) behind
    it, and a wait to the last launch and the last such kernel in front of it, or the launch that
    sends what that kernel gives. Pointwise kernels are left free: a dependency would keep Inductor
    from fusing them. Those that the bound kernel reads are named beside the launch, or Inductor
    would compute them inside of what it holds, behind the launch as well. No value changes.

    Attributes:
        owner_of: says which collectives are DDP's.
    """

    owner_of: OwnerOf

    def __call__(self, graph: fx.Graph) -> bool:
        orderings = self._orderings(list(graph.nodes))
        held: dict[fx.Node, fx.Node] = {}
        for nodes, after in orderings:
            held[nodes[0]] = hold(nodes, [held.get(node, node) for node in after])
        return bool(orderings)

    def _orderings(self, nodes: Sequence[fx.Node]) -> list[tuple[list[fx.Node], list[fx.Node]]]:
        """Pairs (nodes to hold, nodes that they must follow), in graph order. The waits of one
        launch are held together: a coalesced launch can have thousands."""
        orderings: list[tuple[list[fx.Node], list[fx.Node]]] = []
        unbound: list[fx.Node] = []
        last_launch: fx.Node | None = None
        last_kernel: fx.Node | None = None
        waits_of: dict[fx.Node, list[fx.Node]] = {}
        launch_of: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            if node.op != "call_function":
                continue
            if is_held(node):
                unbound = [launch for launch in unbound if not _follows(node, launch)]
            elif is_launch(node):
                if not self._is_owned(node):
                    continue
                unbound.append(node)
                last_launch = node
                launch_of |= dict.fromkeys(_kernels_sent(node), node)
                waits = _waits_of(node)
                waits_of |= dict.fromkeys(waits, waits)
            elif is_library_kernel(node):
                if unbound:
                    orderings.append(([node], [*unbound, *_computed_inputs(node)]))
                    unbound = []
                last_kernel = node
            elif node in waits_of:
                # The earliest wait of a launch: they are held together, in its place.
                waits = waits_of[node]
                for wait in waits:
                    del waits_of[wait]
                waits = [node, *(wait for wait in waits if wait is not node)]
                # Named here, a gradient would pass for one that is read behind its launch, and
                # Inductor would reduce a copy of it; what follows its launch follows it too.
                kernel = last_kernel and launch_of.get(last_kernel, last_kernel)
                ends = (last_launch, kernel)
                sources = list(dict.fromkeys(source for source in ends if source is not None))
                orderings.append((waits, sources))
        return orderings

    def _is_owned(self, launch: fx.Node) -> bool:
        name = group_name_of(launch)
        return name is not None and self.owner_of(name) is not None


def _follows(held: fx.Node, launch: fx.Node) -> bool:
    """Whether a node whose place is held is held behind the launch, which its results stand for
    (see :func:`fusion_passes.graph_edit.hold`)."""
    return any(held in result.users for result in results_of(launch))


def _computed_inputs(kernel: fx.Node) -> list[fx.Node]:
    """What a library kernel reads of generated kernels, which Inductor computes no sooner than
    something asks for it."""
    return [
        source
        for source in kernel.all_input_nodes
        if source.op == "call_function"
        and source.target is not operator.getitem
        and not is_library_kernel(source)
    ]


def _kernels_sent(launch: fx.Node) -> list[fx.Node]:
    """The library kernels whose results, or views of them, a launch sends."""
    kernels: list[fx.Node] = []
    pending = [launch]
    while pending:
        for source in pending.pop().all_input_nodes:
            if is_library_kernel(source):
                kernels.append(source)
            elif source.target in _SENT_THROUGH:
                pending.append(source)
    return kernels


def _waits_of(launch: fx.Node) -> list[fx.Node]:
    """The waits for a launch, of one tensor or of many."""
    users = [user for result in results_of(launch) for user in data_users(result)]
    return [user for user in users if is_wait(user)]
