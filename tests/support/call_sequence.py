"""The calls of a generated wrapper as a few lines: what is stored where in which bucket::

triton_per
mm -> A[0:1024]
triton_per -> A[1024:1040], A[1040:1056]
launch A, avg
wait for A
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.support.codegen import Call, Place, read_calls


def call_sequence(code: str) -> str:
    """The calls of the last graph in ``code``, one per line, in order.

    Buckets are named ``A``, ``B``, ... in the order of their launches, or of the calls that ask a
    reducer for their memory; ``A[16:32]`` are elements of one. Places that a call reads are in
    parentheses. C++ kernels that touch no bucket are left out, because their number is up to
    Inductor.
    """
    calls = read_calls(code)
    sent = [
        place.memory
        for call in calls
        if call.kind == "launch" or call.name == "fusion_passes.bucket"
        for place in call.reads or call.writes
    ]
    buckets = {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(sent))}
    return "".join(f"{text}\n" for call in calls if (text := _text(call, buckets)))


def _text(call: Call, buckets: dict[str, str]) -> str:
    """The line of a call; empty if it is left out."""
    reads, writes = (_places(places, buckets) for places in (call.reads, call.writes))
    if call.name.startswith("_c10d_functional.all_reduce_"):
        return f"launch {reads}, {call.texts[0]}"
    if call.kind == "wait":
        return f"wait for {reads}"
    if call.kind == "return":
        return f"return {reads or 'what was given'}"
    if call.name.startswith("fusion_passes."):  # In memory of a reducer.
        written = call.reads[0] if call.reads else None
        return f"{call.name} -> {buckets[written.memory]}" if written else call.name
    if call.kind not in ("kernel", "fused"):
        return ""
    name = call.name.removeprefix("extern_kernels.")
    if call.kind == "fused":
        is_cpp = name.startswith("cpp_")
        if is_cpp and not (reads or writes):
            return ""
        name = "generated" if is_cpp else "_".join(name.split("_")[:2])
    return name + (reads and f"({reads})") + (writes and f" -> {writes}")


def _places(places: Sequence[Place], buckets: dict[str, str]) -> str:
    texts = [_place(place, buckets) for place in places if place.memory in buckets]
    return ", ".join(dict.fromkeys(texts))


def _place(place: Place, buckets: dict[str, str]) -> str:
    name, end = buckets[place.memory], place.offset + math.prod(place.size)
    return f"{name}[{place.offset}:{end}]" if place.is_view else name
