"""What a call of autograd's engine asks for, and where its graph ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from fusion_passes.ddp.autograd_graph import leaves_behind
from fusion_passes.ddp.modules import registry
from fusion_passes.torch_private import (
    has_flattened_parameters,
    has_fully_sharded_modules,
    is_compiled_forward,
    is_flattened,
)


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
    """

    managed: bool = False
    others: bool = False


NOTHING: Final = Reach()


def reach_of(outputs: Sequence[Any]) -> Reach:
    """Where the autograd graph of ``outputs`` ends.

    Depth first, so that a graph that ends at a managed parameter is left after a few nodes where
    there is nothing else to look for. Another is walked whole, about a microsecond a node.
    """
    if not len(registry):
        return NOTHING
    fully_sharded = has_fully_sharded_modules()
    looks_for_others = registry.has_unfused or fully_sharded or has_flattened_parameters()
    managed = others = False
    for leaf in leaves_behind(outputs):
        if registry.manages(leaf):
            managed = True
        # What fully_shard puts into a graph is a parameter like any other: in a process that uses
        # it, one that no DDP module manages is taken for its.
        elif looks_for_others and (
            registry.is_unfused(leaf)
            or is_flattened(leaf)
            or (fully_sharded and isinstance(leaf, nn.Parameter))
        ):
            others = True
        if managed and (others or not looks_for_others):
            break
    return Reach(managed, others)


def edges_by_region(
    outputs: Sequence[Any], counts: Callable[[nn.Parameter], bool]
) -> dict[Any, list[tuple[int, nn.Parameter]]]:
    """The parameters in which a backward ends, with their places among the inputs of the compiled
    forward that they come from; those that come from elsewhere under ``None``.

    Args:
        outputs: tensors or gradient edges that the backward starts from.
        counts: says which parameters are meant.
    """
    pending = [
        getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs
    ]
    seen: set[Any] = set()
    found: dict[Any, list[tuple[int, nn.Parameter]]] = {}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        region = node if is_compiled_forward(node) else None
        for index, (following, _) in enumerate(node.next_functions):
            variable = getattr(following, "variable", None)
            if variable is None:
                pending.append(following)
            elif counts(variable):
                found.setdefault(region, []).append((index, variable))
    return found
