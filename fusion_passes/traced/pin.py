"""Pins launches and waits, so that Inductor's scheduler keeps their order."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import fx

from fusion_passes.graph.collectives import (
    data_users,
    is_launch,
    is_pinned,
    is_wait,
    results_of,
)
from fusion_passes.graph.custom_ops import PACK
from fusion_passes.graph.edits import pin
from fusion_passes.graph.families import ITEMS, VIEWS, is_library_kernel
from fusion_passes.traced.owners import DdpGroups
from fusion_passes.traced.verify import GraphPass

# If only these operators stand between a kernel and a collective, the collective reduces the memory
# that the kernel writes. Casts, scalings and copies write other memory.
_SENT_THROUGH: Final = VIEWS | ITEMS | {PACK}


@dataclass(frozen=True)
class PinOrder(GraphPass):
    """Turns the order of launches, kernels and waits into dependencies.

    Inductor's scheduler sorts its nodes anew and moves them to lower the peak of memory; the order
    of the graph alone does not bind it. Before::

        all_reduce, mm, wait

    After, where ``x @ [y]`` runs ``x`` after ``y`` (torch's ``control_deps``)::

        all_reduce, mm @ [all_reduce], wait @ [all_reduce, mm]

    The first library kernel (matrix product, convolution, attention) after a launch depends on that
    launch. A wait depends on the last launch and on the last library kernel before it; if a launch
    sends the result of that kernel, the wait depends on that launch in place of the kernel.
    Pointwise kernels stay free: a dependency would keep Inductor from fusing them. The pointwise
    kernels that a pinned kernel reads become its dependencies beside the launch; otherwise Inductor
    would compute them inside the pinned subgraph, which also runs after the launch. No value
    changes.

    Attributes:
        groups: group names of DDP's modules in the graph.
    """

    groups: DdpGroups

    def __call__(self, graph: fx.Graph) -> bool:
        orderings = self._orderings(list(graph.nodes))
        pinned: dict[fx.Node, fx.Node] = {}
        for nodes, after in orderings:
            pinned[nodes[0]] = pin(nodes, [pinned.get(node, node) for node in after])
        return bool(orderings)

    def _orderings(self, nodes: Sequence[fx.Node]) -> list[tuple[list[fx.Node], list[fx.Node]]]:
        """Pairs (nodes to pin, nodes that they must follow), in graph order. The waits for one
        launch are pinned together: a coalesced launch can have thousands."""
        orderings: list[tuple[list[fx.Node], list[fx.Node]]] = []
        unbound: list[fx.Node] = []
        last_launch: fx.Node | None = None
        last_kernel: fx.Node | None = None
        waits_of: dict[fx.Node, list[fx.Node]] = {}
        launch_of: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            if node.op != "call_function":
                continue
            if is_pinned(node):
                unbound = [launch for launch in unbound if not _follows(node, launch)]
            elif is_launch(node):
                if self.groups.owner_of(node) is None:
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
                # The earliest wait for a launch: all waits for it are pinned together, here.
                waits = waits_of[node]
                for wait in waits:
                    del waits_of[wait]
                waits = [node, *(wait for wait in waits if wait is not node)]
                # A kernel that is named here counts as read after its result was launched, and
                # Inductor would reduce a copy. A node after the launch is after the kernel too.
                kernel = last_kernel and launch_of.get(last_kernel, last_kernel)
                ends = (last_launch, kernel)
                sources = list(dict.fromkeys(source for source in ends if source is not None))
                orderings.append((waits, sources))
        return orderings


def _follows(pinned: fx.Node, launch: fx.Node) -> bool:
    """Whether a pinned node is pinned after the launch: its dependencies name a launch by one of
    its results (see :func:`fusion_passes.graph.edits.pin`)."""
    return any(pinned in result.users for result in results_of(launch))


def _computed_inputs(kernel: fx.Node) -> list[fx.Node]:
    """The inputs of a library kernel that generated kernels compute: Inductor computes them no
    sooner than a node asks for them. Waits are not among them, since they compute nothing."""
    return [
        source
        for source in kernel.all_input_nodes
        if source.op == "call_function"
        and source.target is not operator.getitem
        and not is_library_kernel(source)
        and not is_wait(source)
    ]


def _kernels_sent(launch: fx.Node) -> list[fx.Node]:
    """The library kernels whose results, or views of their results, a launch sends."""
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
    """The waits for the results of a launch, which sends one tensor or several."""
    users = [user for result in results_of(launch) for user in data_users(result)]
    return [user for user in users if is_wait(user)]
