"""Lets the ranks agree on a graph's collectives before the first one is launched."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fusion_passes.collectives import group_name_of, is_launch
from fusion_passes.operators import AGREE
from fusion_passes.reductions import OwnerOf


@dataclass(frozen=True)
class AgreeBeforeLaunch:
    """Puts a call in front of each DDP module's first launch that comes back once all ranks are
    known to run the same collectives of that module.

    Before::

        bucket: f32[40] -> all_reduce

    After::

        agree_(bucket, module, "concat; avg float32 1-0")
        bucket: f32[40] -> all_reduce

    The call writes nothing, says that it writes the bucket, and so stays in front of the launch.
    See :func:`fusion_passes.agreement.agree` for what it costs: nothing is sent while a module runs
    what it ran before.

    Attributes:
        collectives: for each DDP module, by the name of its group, what it is going to launch.
        owner_of: says which collectives are DDP's.
    """

    collectives: tuple[tuple[str, str], ...]
    owner_of: OwnerOf

    def __call__(self, graph: fx.Graph) -> bool:
        missing = dict(self.collectives)
        found = len(missing)
        for node in list(graph.nodes):
            if node.op != "call_function" or not is_launch(node):
                continue
            module = self._module_of(node)
            if module is None or module not in missing:
                continue
            with graph.inserting_before(node):
                call = graph.call_function(
                    AGREE, (node.all_input_nodes[0], module, missing.pop(module))
                )
            call.meta["val"] = None
        return len(missing) < found

    def _module_of(self, launch: fx.Node) -> str | None:
        name = group_name_of(launch)
        owner = self.owner_of(name) if name is not None else None
        return owner.group_name if owner else None
