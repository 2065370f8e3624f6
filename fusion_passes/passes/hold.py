"""Holds launches and waits in their places through Inductor's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from fusion_passes.collectives import group_name_of, is_held, is_launch, is_wait
from fusion_passes.reductions import OwnerOf
from fusion_passes.torch_private import preserve_node_ordering

_KERNEL_NAMES: Final = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::convolution_backward",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
    )
)
_KERNEL_PREFIXES: Final = ("aten::_scaled_dot_product_", "mkldnn::", "mkl::")


@dataclass(frozen=True)
class HoldPlacement:
    """Turns the order of launches, kernels and waits into dependencies.

    Inductor's scheduler sorts its nodes anew and moves them to lower the peak of memory; the order
    of the graph alone does not bind it. Before::

        all_reduce, mm, wait

    After, where ``x @ [y]`` runs ``x`` after ``y`` (torch's ``control_deps``)::

        all_reduce, mm @ [all_reduce], wait @ [all_reduce, mm]

    A launch is bound to the first library kernel (matrix product, convolution, attention) behind
    it, and a wait to the last launch and the last such kernel in front of it. Pointwise kernels
    are left free: a dependency would keep Inductor from fusing them. No value changes.

    Attributes:
        owner_of: says which collectives are DDP's.
    """

    owner_of: OwnerOf

    def __call__(self, graph: fx.Graph) -> bool:
        after = self._orderings(list(graph.nodes))
        if after:
            preserve_node_ordering(graph, after)
        return bool(after)

    def _orderings(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """The nodes that each held node must follow, in graph order."""
        after: dict[fx.Node, list[fx.Node]] = {}
        unbound: list[fx.Node] = []
        last_launch: fx.Node | None = None
        last_kernel: fx.Node | None = None
        owned_waits: set[fx.Node] = set()
        for node in nodes:
            if node.op != "call_function" or is_held(node):
                continue
            if is_launch(node):
                if not self._is_owned(node):
                    continue
                unbound.append(node)
                last_launch = node
                owned_waits.update(_waits_of(node))
            elif _is_library_kernel(node):
                if unbound:
                    after[node] = unbound
                    unbound = []
                last_kernel = node
            elif node in owned_waits:
                sources = (last_launch, last_kernel)
                after[node] = [source for source in sources if source is not None]
        return after

    def _is_owned(self, launch: fx.Node) -> bool:
        name = group_name_of(launch)
        return name is not None and self.owner_of(name) is not None


def _waits_of(launch: fx.Node) -> list[fx.Node]:
    results = [launch, *launch.users]
    return [user for result in results for user in result.users if is_wait(user)]


def _is_library_kernel(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = node.target._schema.name
    return name in _KERNEL_NAMES or name.startswith(_KERNEL_PREFIXES)
