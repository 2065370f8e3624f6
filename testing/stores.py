"""Whether a generated wrapper, for the CPU or CUDA, fills what it sends, and leaves it alone on the
way. That holds for any graph:

* what a collective sends is written, every element of it, before the launch;
* nothing reads or writes it until it has been waited for, as each launch is;
* no kernel reads what nothing has written; one that works in place fills nothing;
* a name that stands for a place in another's memory goes on to stand for it.

What inputs and libraries bring with them is written.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from testing.codegen import MARK_READY, Call, Place, read_calls


@dataclass
class _Memory:
    """What was allocated, and which of its elements have been written.

    Attributes:
        is_reused: whether it was another's: what works in place may read what that one has left.
        written: ranges of elements, without their ends, that do not touch.
    """

    is_reused: bool = False
    written: list[tuple[int, int]] = field(default_factory=list)

    def write(self, place: Place) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.written, *place.runs()]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        self.written = merged

    def gaps(self, place: Place) -> list[tuple[int, int]]:
        """Ranges of a place that nothing has written."""
        return [gap for run in place.runs() for gap in self._gaps_between(*run)]

    def _gaps_between(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        first = max(0, bisect.bisect_right(self.written, (start, math.inf)) - 1)
        for begin, end in self.written[first:]:
            if begin >= stop:
                break
            if start < begin:
                yield start, begin
            start = max(start, end)
        if start < stop:
            yield start, stop


def check_stores(code: str) -> int:
    """Check the last graph of a generated code.

    Args:
        code: a module as Inductor writes it, in Python.

    Returns:
        The number of elements that it sends, without what libraries have allocated.

    Raises:
        AssertionError: what it sends is not all written, or is touched before it was waited for, or
            a name of it is bound anew.
    """
    sent, known = 0, dict[str, _Memory]()
    calls = read_calls(code)
    check_launches(calls)
    for call in calls:
        if call.kind in ("allocate", "reuse"):
            known[call.writes[0].memory] = _Memory(is_reused=call.kind == "reuse")
            continue
        if call.kind == "operator":  # What it gives it has allocated itself.
            for place in call.writes:
                known.pop(place.memory, None)
        reads, writes = (
            [place for place in places if place.memory in known]
            for places in (call.reads, call.writes)
        )
        if call.kind == "launch":
            for place in reads:
                gaps = known[place.memory].gaps(place)
                assert not gaps, f"nothing writes elements {gaps} of {place}, which is sent"
                sent += math.prod(place.size)
        # A generated kernel may read what it has stored before, but for a place that it works on.
        for place in {*writes} - {*reads} if call.kind == "fused" else ():
            known[place.memory].write(place)
        for place in reads if call.kind in ("fused", "kernel") else ():
            gaps = [] if known[place.memory].is_reused else known[place.memory].gaps(place)
            message = f"reads elements {gaps} of {place}, which nothing has written"
            assert not gaps, f"{call.name} {message}"
        for place in writes:
            known[place.memory].write(place)
    return sent


def check_launches(calls: Sequence[Call]) -> None:
    """Check that what is launched is waited for, and left alone until then."""
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
