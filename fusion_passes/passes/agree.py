"""Lets the ranks agree on a graph's collectives before the first one is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fusion_passes.graph.operators import AGREE
from fusion_passes.passes.contract import GraphPass
from fusion_passes.reductions.owners import DdpGroups


@dataclass(frozen=True)
class AgreeBeforeLaunch(GraphPass):
    """Puts a call before each DDP module's first launch that comes back once all ranks are
    known to run the same collectives of that module.

    Before::

        bucket: f32[40] -> all_reduce

    After::

        agree_(bucket, module, "concat; avg float32 1-0")
        bucket: f32[40] -> all_reduce

    The call writes nothing, says that it writes the bucket, and so stays before the launch.
    See :mod:`fusion_passes.agreement.protocol` for what it costs: nothing is sent while a module
    runs what the ranks have agreed on.

    Attributes:
        collectives: for each DDP module, by the name of its group, what it is going to launch.
        groups: the graph's names of DDP's groups.
        is_optional: whether the graph also runs in backwards that are not averaged.
    """

    collectives: tuple[tuple[str, str], ...]
    groups: DdpGroups
    is_optional: bool = False

    why_always: ClassVar[str] = "without it, ranks whose graphs differ would hang"

    def __call__(self, graph: fx.Graph) -> bool:
        missing = dict(self.collectives)
        found = len(missing)
        for node in list(graph.nodes):
            owner = self.groups.owner_of(node)
            if owner is None or owner.group_name not in missing:
                continue
            module = owner.group_name
            text = missing.pop(module)
            optional = (True,) if self.is_optional else ()
            with graph.inserting_before(node):
                call = graph.call_function(
                    AGREE, (node.all_input_nodes[0], module, text, *optional)
                )
            call.meta["val"] = None
        return len(missing) < found
