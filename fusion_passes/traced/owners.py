"""Whose a collective is: the group names of a graph, and the DDP modules that reduce on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from fusion_passes.graph.collectives import group_name_of, is_launch


@dataclass(frozen=True)
class Owner:
    """Who a group name of the graph belongs to.

    Attributes:
        group_name: the name that all reductions of this DDP module share once they are fused.
        process_group: the process group's own name: names of one group issue on one queue.
        module: the DDP module, for people.
        parameter: the parameter's name in that module, for people.
        backend: name of the process group's backend for the module's device: ``"gloo"``.
        world_size: number of ranks of the process group.
        number: the parameter's, in the order in which the module counts them; the same on all
            ranks.
        strides: of the parameter in memory, in which its gradient lies in a bucket: the same on
            all ranks, as the order of elements must be; ``None`` for those of the result.
    """

    group_name: str
    process_group: str
    module: str
    parameter: str
    backend: str
    world_size: int
    number: int
    strides: tuple[int, ...] | None = None


OwnerOf = Callable[[str], Owner | None]
"""The owner of a group name of the graph; ``None`` for a name that no DDP module uses."""


@dataclass(frozen=True)
class DdpGroups:
    """The group names on which the DDP modules of one graph reduce: plain values, read once.

    Attributes:
        owners: by group name: the names in the graph as it was traced, one a gradient, and those
            of the modules, on which fused gradients are reduced.
    """

    owners: Mapping[str, Owner]

    @staticmethod
    def of(graph: fx.Graph, owner_of: OwnerOf) -> DdpGroups:
        """The names in ``graph`` that belong to DDP modules."""
        owners: dict[str, Owner] = {}
        for node in graph.nodes:
            name = group_name_of(node) if is_launch(node) else None
            owner = owner_of(name) if name is not None else None
            if name is not None and owner is not None:
                owners[name] = owner
                owners.setdefault(owner.group_name, owner)
        return DdpGroups(owners)

    def owner_of(self, node: fx.Node) -> Owner | None:
        """The owner of the collective that ``node`` launches; ``None`` for a collective that is
        not DDP's, and for any other node."""
        name = group_name_of(node) if is_launch(node) else None
        return self.owners.get(name) if name is not None else None

    def queue_of(self, launch: fx.Node) -> str:
        """The process group on whose queue a collective is put, DDP's or not; the name in the
        graph where nobody knows better."""
        owner = self.owner_of(launch)
        return owner.process_group if owner else group_name_of(launch) or ""
