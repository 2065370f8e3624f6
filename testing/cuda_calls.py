"""The calls of a generated wrapper as short lines that can be compared.

A buffer has the name of its memory: ``bucket`` where a collective reduces it, an input's name, or
``t`` with a number. A place is ``bucket[offset: shape]``. What follows ``->`` is written::

    triton_per(x, bias) -> t0, bucket[0: 256]
    mm(t0.T, x) -> bucket[256: 256, 64]
    all_reduce_(bucket, 'avg', 'cards')
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from testing.codegen import Call, Place, read_calls


def call_lines(code: str, inputs: Sequence[str] = ()) -> list[str]:
    """The calls of the last graph in a generated code, and what it allocates for buckets;
    ``inputs`` are names for those of the graph."""
    calls = read_calls(code)
    sent = [place.memory for call in calls if call.kind == "launch" for place in call.reads]
    names = _Names([*dict.fromkeys(sent)], inputs)
    return [line for call in calls if (line := _line(call, names))]


class _Names:
    """What memory is called."""

    def __init__(self, buckets: Sequence[str], inputs: Sequence[str]) -> None:
        self._names = {f"arg{index}_1": name for index, name in enumerate(inputs)}
        for index, memory in enumerate(buckets):
            self._names[memory] = "bucket" if len(buckets) == 1 else f"bucket{index}"
        self._buckets = frozenset(self._names[memory] for memory in buckets)
        self._temporaries = 0

    def of(self, place: Place) -> str:
        name = self._names.get(place.memory, re.sub(r"^(arg\d+)_1$", r"\1", place.memory))
        shape = ", ".join(map(str, place.size))
        if not place.is_view:
            return name + place.item
        if name in self._buckets:
            return f"{name}[{place.offset}: {shape}]"
        is_transposed = len(place.size) > 1 and place.stride[0] == 1
        return f"{name}.T" if is_transposed else f"{name}.view{place.size}"

    def of_written(self, place: Place) -> str:
        if place.memory not in self._names and not place.memory.startswith("arg"):
            self._names[place.memory] = f"t{self._temporaries}"
            self._temporaries += 1
        return self.of(place)

    def reuse(self, before: Place, place: Place) -> None:
        self._names[place.memory] = self.of_written(before)

    def is_bucket(self, place: Place) -> bool:
        return self._names.get(place.memory) in self._buckets


def _line(call: Call, names: _Names) -> str:
    """A call as a line; empty if there is none for it."""
    if call.kind == "reuse":
        names.reuse(*call.reads, *call.writes)
    if call.kind == "allocate" and names.is_bucket(*call.writes):
        (place,) = call.writes
        sizes = ", ".join(map(str, place.size))
        return f"{names.of(place)} = empty({sizes}, {call.texts[0]})"
    if call.kind == "return":
        return f"return {', '.join(map(names.of, call.reads))}"
    if call.kind in ("allocate", "reuse", "copy") or not call.name:
        return ""
    kernel = call.name.rpartition(".")[2]
    if call.kind == "fused":
        kernel = "_".join(kernel.split("_")[:2])
    arguments = ", ".join([*map(names.of, call.reads), *map(repr, call.texts)])
    written = ", ".join(map(names.of_written, call.writes))
    return f"{kernel}({arguments}){written and ' -> '}{written}"
