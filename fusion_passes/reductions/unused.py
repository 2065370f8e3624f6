"""Adds what a graph sends beside the gradients that it has, where ranks may use other parameters in
each step; see :mod:`fusion_passes.agreement.usage`.

Before, of a module of four parameters, of which the graph has two gradients, and the other ranks
send a third::

    w0.grad: f32[8, 8] -> div -> all_reduce -> wait -> ...
    w1.grad: f32[8] -> div -> all_reduce -> wait -> ...

After::

    zeros: f32[8, 8] -> div -> all_reduce -> wait ─────────────────┐
    flags: f32[5] = [1, 1, 0, 0, 0] -> div -> all_reduce -> wait ──┤
    w0.grad: f32[8, 8] -> div -> all_reduce -> wait -> ...         │
    w1.grad: f32[8] -> div -> all_reduce -> wait -> ...            │
    deliver_(flags > 0, [zeros], module, [2]) ◄────────────────────┘

What is added is traced like DDP's hook, so that it is found, planned and fused like a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, fx

from fusion_passes.graph.collectives import ALL_REDUCE, WAIT
from fusion_passes.graph.edits import record
from fusion_passes.graph.operators import DELIVER
from fusion_passes.graph.transparent import CAST
from fusion_passes.reductions.find import GradientReduction, find_gradient_reductions
from fusion_passes.reductions.owners import DdpGroups, OwnerOf

_FULL: Final = torch.ops.aten.full.default


@dataclass(frozen=True)
class Sent:
    """A gradient, or the flags, that a graph is to send.

    Attributes:
        name: the group name for its reduction.
        dtype: of the gradient.
        reduce_dtype: in which DDP's hook would send it.
        divisor: what DDP's hook would divide it by: the number of ranks; 1 where a communication
            hook makes the average.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    divisor: int


@dataclass(frozen=True)
class SentBeside:
    """What a graph sends for a DDP module beside the gradients that it has.

    Attributes:
        trained: numbers of the parameters that have a flag each, in order.
        flags: under which they are sent.
        reached: numbers of the parameters that the backward reaches which is compiled; ``None``
            where that is not known.
        absent: what the ranks send, by number: zeros where the graph has no gradient.
    """

    trained: tuple[int, ...]
    flags: Sent
    reached: frozenset[int] | None
    absent: Mapping[int, Sent]


BesideOf = Callable[[str], SentBeside | None]
"""What the graph of a DDP module sends beside its gradients, by the module's group name; ``None``
where all ranks use all parameters."""


def send_beside(graph: fx.Graph, beside_of: BesideOf, owner_of: OwnerOf) -> None:
    """Add to each module's reductions what they lack.

    Args:
        graph: with reductions as DDP's hook traces them; changed in place.
        beside_of: says what is to be sent.
        owner_of: says which collectives are DDP's.
    """
    found = find_gradient_reductions(graph, DdpGroups.of(graph, owner_of))
    by_module: dict[str, list[GradientReduction]] = {}
    for reduction in found.reductions:
        by_module.setdefault(reduction.owner.group_name, []).append(reduction)
    for module, reductions in by_module.items():
        beside = beside_of(module)
        if beside is not None:
            _send(graph, module, reductions, beside)


def _send(
    graph: fx.Graph, module: str, reductions: Sequence[GradientReduction], beside: SentBeside
) -> None:
    present = {reduction.owner.number for reduction in reductions}
    # A graph that is a part of its backward must leave the rest to the others.
    is_whole = beside.reached is not None and beside.reached <= present
    absent = {n: s for n, s in beside.absent.items() if n not in present} if is_whole else {}
    flags = [*(number in present for number in beside.trained), False]  # In order, if it runs.
    like, before = reductions[0].gradient, reductions[0].nodes[0]
    values = [_full([(len(list(run)), v) for v, run in itertools.groupby(flags)], beside.flags)]
    values += [_full([(sent.shape, False)], sent) for sent in absent.values()]
    results = [
        _reduce(before, like, value, sent)
        for value, sent in zip(values, [beside.flags, *absent.values()], strict=True)
    ]
    if len(present) < len(beside.trained):
        output = graph.output_node()
        (used,), _ = record(output, lambda tensors: [tensors[0] > 0], results[:1])
        with graph.inserting_before(output):
            call = graph.call_function(DELIVER, (used, results[1:], module, list(absent)))
        call.meta["val"] = None


def _full(runs: Iterable[tuple[int | tuple[int, ...], bool]], sent: Sent) -> Callable[[], Tensor]:
    """Tensor code for ones and zeros, one run after the other."""
    known = [((size,) if isinstance(size, int) else size, float(value)) for size, value in runs]

    def make() -> Tensor:
        parts = [_FULL(size, v, dtype=sent.dtype, device="meta") for size, v in known]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return make


def _reduce(before: fx.Node, like: fx.Node, make: Callable[[], Tensor], sent: Sent) -> fx.Node:
    """Write a reduction as DDP's hook does; the node of its result."""

    def reduce(_: list[Tensor]) -> list[Tensor]:
        value = _cast(make(), sent.reduce_dtype)
        if sent.divisor != 1:
            value = value / sent.divisor
        return [_cast(WAIT(ALL_REDUCE(value, "sum", sent.name)), sent.dtype)]

    (result,), nodes = record(before, reduce, [like])
    for node in nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": like.meta["val"].device}
    return result


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    cast: Tensor = value if value.dtype == dtype else CAST(value, dtype)
    return cast
