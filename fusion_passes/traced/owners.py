"""Maps the group names of a graph to the DDP modules that reduce over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from fusion_passes.graph.collectives import group_name_of, is_launch
from fusion_passes.layout.layout import ParameterNumber


@dataclass(frozen=True)
class Owner:
    """The DDP module, and the parameter, that a group name of the graph belongs to.

    Attributes:
        group_name: group name that all reductions of this DDP module share once they are fused.
        process_group: name of the process group; all group names of one process group share a
            queue.
        module: name of the DDP module, for people.
        parameter: name of the parameter in that module, for people.
        number: parameter number, in the module's order, which is the same on all ranks; -1 for the
            group name of the module itself.
        strides: strides of the parameter, which its gradient has in a bucket. They are equal on all
            ranks, as the order of elements must be. ``None``: the strides of the all-reduce's
            result.
    """

    group_name: str
    process_group: str
    module: str
    parameter: str
    number: ParameterNumber
    strides: tuple[int, ...] | None = None


OwnerOf = Callable[[str], Owner | None]
"""Returns the owner of a group name of the graph; ``None`` for a name that no DDP module uses."""


@dataclass(frozen=True)
class DdpGroups:
    """The group names over which the DDP modules of one graph reduce: plain values, read once.

    Attributes:
        owners: owner by group name. The names are those of the traced graph, one per gradient, and
            those of the modules, over which fused gradients are reduced.
    """

    owners: Mapping[str, Owner]

    @staticmethod
    def of(graph: fx.Graph, owner_of: OwnerOf) -> DdpGroups:
        """The group names in ``graph`` that belong to DDP modules."""
        owners: dict[str, Owner] = {}
        for name in (group_name_of(node) or "" for node in graph.nodes if is_launch(node)):
            owner = owner_of(name)
            if owner is not None:
                owners[name] = owner
                owners.setdefault(owner.group_name, owner)
        return DdpGroups(owners)

    def owner_of(self, node: fx.Node) -> Owner | None:
        """The owner of the collective that ``node`` launches; ``None`` for a collective that is
        not DDP's, and for any other node."""
        return self.owners.get(group_name_of(node) or "") if is_launch(node) else None

    def launches_in(self, graph: fx.Graph) -> list[fx.Node]:
        """The launches of DDP's collectives, in graph order."""
        return [node for node in graph.nodes if self.owner_of(node) is not None]

    def queue_of(self, launch: fx.Node) -> str:
        """The name of the process group on whose queue a launch is put. For a collective that is
        not DDP's, that is its group name in the graph."""
        owner = self.owner_of(launch)
        return owner.process_group if owner else group_name_of(launch) or ""
