"""Checks that a generated wrapper, for the CPU or CUDA, writes the memory that it sends and leaves
it alone until the wait. The rules hold for any graph:

* what a collective sends is written, every element of it, before the launch;
* nothing reads or writes it until it has been waited for, as each launch is;
* no kernel reads what nothing has written; one that works in place fills nothing;
* a name that stands for a place in another's memory goes on to stand for it.

Memory of inputs and of library results counts as written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tests.support.codegen import MARK_READY, Call, Place, read_calls


def check_stores(code: str) -> int:
    """Check the last graph of a generated code, a module as Inductor writes it in Python.

    Returns:
        The number of elements that it sends, without those that libraries allocated.

    Raises:
        AssertionError: what it sends is not all written, or is touched before it was waited for, or
            a name of it is bound anew.
    """
    calls = read_calls(code)
    check_launches(calls)
    sent, written, reused = 0, dict[str, Tensor](), set[str]()
    for call in calls:
        if call.kind in ("allocate", "reuse"):
            (place,) = call.writes
            written[place.memory] = torch.zeros(_extent(place), dtype=torch.bool)
            if call.kind == "reuse":  # In-place operators may read what was there before.
                reused.add(place.memory)
            continue
        if call.kind == "operator":  # It allocated its own result.
            for place in call.writes:
                written.pop(place.memory, None)
        reads, writes = (
            [place for place in places if place.memory in written]
            for places in (call.reads, call.writes)
        )
        # A generated kernel may read what it stored before, except in a place that it works on.
        _note({*writes} - {*reads} if call.kind == "fused" else (), written)
        if call.kind == "launch":
            sent += sum(math.prod(place.size) for place in reads)
            _check(call.name, reads, written)
        elif call.kind in ("fused", "kernel"):
            _check(call.name, [place for place in reads if place.memory not in reused], written)
        _note(writes, written)
    return sent


def _extent(place: Place) -> int:
    """Elements from the first to the last one."""
    steps = zip(place.size, place.stride, strict=True)
    return 0 if 0 in place.size else 1 + sum((size - 1) * stride for size, stride in steps)


def _note(places: Iterable[Place], written: Mapping[str, Tensor]) -> None:
    for place in places:
        written[place.memory].as_strided(place.size, place.stride, place.offset).fill_(True)


def _check(name: str, places: Iterable[Place], written: Mapping[str, Tensor]) -> None:
    """Check that the places which a call with this name reads are written."""
    for place in places:
        where = (place.size, place.stride, place.offset)
        is_written = written[place.memory].as_strided(*where)
        if not is_written.all():
            gaps = torch.arange(len(written[place.memory])).as_strided(*where)[~is_written]
            elements = f"{len(gaps)} elements in {gaps.min()}:{gaps.max() + 1} of {place}"
            raise AssertionError(f"{name} reads {elements}, which nothing has written")


def check_launches(calls: Sequence[Call]) -> None:
    """Check that each launch is waited for, and that its memory is left alone until then."""
    on_the_way: set[str] = set()
    for call in calls:
        given = {place.memory for place in call.reads}
        if call.kind == "wait":
            assert given <= on_the_way, f"{call.line} waits for what was not launched"
            on_the_way -= given
        touched = given | {place.memory for place in call.writes}
        assert not on_the_way & touched, f"{call.line} touches what is on the way"
        if call.kind == "launch" and call.name != MARK_READY:
            on_the_way |= given
    assert not on_the_way, f"nobody waits for {on_the_way}"
