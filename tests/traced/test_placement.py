"""Where collectives are launched and waited for, and the texts about it."""

from __future__ import annotations

import torch

from fusion_passes.traced.place import Placement, placements_of
from tests.support.graphs import (
    Backward,
    TensorSpec,
    concat,
    groups_of,
    place,
    reduce,
    tensor,
    trace,
)


def _placements(function: Backward, *inputs: TensorSpec) -> tuple[Placement, ...]:
    graph = trace(function, list(inputs)).graph
    concat()(graph)(graph)
    launches = groups_of(graph).launches_in(graph)
    place()(graph)(graph)
    return placements_of(graph, launches)


def test_what_only_the_output_reads_is_waited_for_at_the_end() -> None:
    def backward(x, y):
        return reduce(torch.mm(x, y), "a"), torch.mm(y, x)

    (placement,) = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert placement.why_waited() == "at the end"
    assert (placement.overlapped, placement.following) == (1, 1)


def test_what_the_graph_reads_is_waited_for_early() -> None:
    def backward(x, y):
        a = reduce(torch.mm(x, y), "a")
        used = torch.sin(torch.mm(y, x) + a)
        return a, torch.mm(torch.mm(used, x), y)

    (placement,) = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert placement.why_waited() == (
        "early, because add (aten.add.Tensor) reads it: "
        "1 of the 3 library kernels after its launch run before"
    )


def test_the_first_of_several_readers_counts() -> None:
    def backward(x, y):
        a, b = reduce(torch.neg(x), "a"), reduce(torch.sin(x), "b")
        first = torch.mm(b, y)
        return torch.mm(first, a), torch.mm(first, first)

    (placement,) = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert placement.reader is not None
    assert placement.reader.name == "mm"
    assert (placement.overlapped, placement.following) == (0, 3)


def test_a_collective_of_its_group_can_hold_a_launch_back() -> None:
    """Both are in the queue of one process group, whose order is kept."""

    def backward(x, y):
        early, late = torch.neg(x), torch.mm(x, y)
        return reduce(late, "a", module="ddp0"), reduce(early, "b", module="ddp1")

    first, second = _placements(backward, tensor(2, 2), tensor(2, 2))
    assert (first.following, second.following) == (0, 0), "behind the product"
