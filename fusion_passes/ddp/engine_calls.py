"""What a call of autograd's engine asks for, and where its graph ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from fusion_passes.ddp.autograd_graph import Ends, ends_of
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.node_hooks import node_hooks
from fusion_passes.ddp.traceable import can_be_traced
from fusion_passes.torch_private import (
    has_flattened_parameters,
    has_fully_sharded_modules,
    is_flattened,
)
from fusion_passes.torch_private.autograd import compiled_forward


@dataclass(frozen=True)
class EngineCall:
    """What a call of ``torch.autograd.graph._engine_run_backward`` asks for.

    Attributes:
        keeps_graph: ``retain_graph=True``.
        creates_graph: ``create_graph=True``.
        accumulates: whether gradients go into ``.grad``: not those of ``torch.autograd.grad``.
        only_some: whether only those of given ``inputs`` do.
    """

    keeps_graph: bool
    creates_graph: bool
    accumulates: bool
    only_some: bool

    @staticmethod
    def of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> EngineCall:
        """Read a call.

        Args:
            args: gradients, retain_graph, create_graph, inputs.
            kwargs: any of these, allow_unreachable, accumulate_grad.
        """

        def value_of(index: int, name: str) -> bool:
            return bool(args[index] if len(args) > index else kwargs.get(name, False))

        return EngineCall(
            keeps_graph=value_of(1, "retain_graph"),
            creates_graph=value_of(2, "create_graph"),
            accumulates=bool(kwargs.get("accumulate_grad", False)),
            only_some=value_of(3, "inputs"),
        )


@dataclass(frozen=True)
class Reach:
    """Where an autograd graph ends.

    Attributes:
        managed: at a parameter of a managed module.
        others: at one whose gradient DDP's own reducer or FSDP must see. Both do nothing in a
            traced backward.
        hooked: the managed modules with hooks on their parameters' nodes, by name.
        unmanaged: the tensors that are neither of managed modules nor of these others.
    """

    managed: bool = False
    others: bool = False
    hooked: tuple[str, ...] = ()
    unmanaged: Sequence[Tensor] = ()

    @property
    def waits(self) -> bool:
        """Whether gradients of managed modules must not be averaged before the backward ends."""
        return self.others or bool(self.hooked)


NOTHING: Final = Reach()


def reach_of(ends: Ends) -> Reach:
    """What is where an autograd graph ends."""
    if not len(registry):
        return NOTHING
    unmanaged = [leaf for leaf in ends.leaves if not registry.manages(leaf)]
    managed, fully_sharded = len(unmanaged) < len(ends.leaves), has_fully_sharded_modules()
    hooked: tuple[str, ...] = ()
    if managed and (found := node_hooks.modules()):
        hooked = tuple(name for name in registry.reached_by(ends.leaves) if name in found)
    if not (unmanaged and (registry.unfused or fully_sharded or has_flattened_parameters())):
        return Reach(managed, False, hooked, unmanaged)
    # What fully_shard puts into a graph is a parameter like any other: in a process that uses it,
    # one that no DDP module manages is taken for its.
    nobodys = [
        leaf
        for leaf in unmanaged
        if not (
            leaf in registry.unfused
            or is_flattened(leaf)
            or (fully_sharded and isinstance(leaf, nn.Parameter))
        )
    ]
    return Reach(managed, len(nobodys) < len(unmanaged), hooked, nobodys)


def must_be_kept(call: EngineCall, outputs: Sequence[Any]) -> bool:
    """Whether ``torch.autograd.grad`` with ``retain_graph=True`` runs a managed module's backward
    that overwrites what its forward has saved, so that it must be traced, which copies that first.

    Torch compiles a backward at its first call, and as one that overwrites nothing if that is to
    keep the graph. Compiled with its forward, it knows of no call yet, and refuses to run.

    Args:
        call: what is asked for.
        outputs: tensors or gradient edges that the backward starts from.
    """
    if call.accumulates or call.creates_graph or not call.keeps_graph or not len(registry):
        return False
    regions = ends_of(outputs).by_region
    return any(
        node is not None
        and compiled_forward(node).metadata.bw_donated_idxs
        and any(registry.manages(leaf) for _, leaf in edges)
        for node, edges in regions.items()
    ) and can_be_traced(outputs)
