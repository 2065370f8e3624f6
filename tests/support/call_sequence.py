"""The calls of a generated backward as a few lines: what is stored where in which bucket."""

from __future__ import annotations

import math
from typing import Final

from testing.codegen import Call, Place, read_calls

BUCKET: Final = "fusion_passes.bucket"


def call_sequence(code: str) -> str:
    """The calls of the last graph in ``code``, one a line, in order.

    Buckets are ``A``, ``B``, ... in the order of their launches, or in which a reducer is asked for
    their memory; ``A[16:32]`` are elements of one.
    Generated kernels that store in no bucket are left out: how many there are is Inductor's.
    """
    calls = read_calls(code)
    sent = [
        place.memory
        for call in calls
        if call.kind == "launch" or call.name == BUCKET
        for place in call.reads or call.writes
    ]
    buckets = {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(sent))}
    return "".join(f"{text}\n" for call in calls if (text := _text(call, buckets)))


def _text(call: Call, buckets: dict[str, str]) -> str:
    """A line; empty for what is left out."""
    reads, writes = (
        [_place(place, buckets) for place in places if place.memory in buckets]
        for places in (call.reads, call.writes)
    )
    stored = f" -> {', '.join(dict.fromkeys(writes))}" if writes else ""
    if call.name.startswith("_c10d_functional.all_reduce_"):
        return f"launch {reads[0]}, {call.texts[0]}"
    if call.kind == "wait":
        return f"wait for {reads[0]}"
    if call.kind == "return":
        views = [place for place in reads if "[" in place]
        return f"return {', '.join(views or ['what was given'])}"
    if call.kind == "fused":
        return f"generated{stored}" if stored else ""
    if call.name.startswith("fusion_passes."):  # A reducer's.
        written = call.reads[0] if call.reads else None
        return f"{call.name} -> {buckets[written.memory]}" if written else call.name
    return call.name.removeprefix("extern_kernels.") + stored if call.kind == "kernel" else ""


def _place(place: Place, buckets: dict[str, str]) -> str:
    name, end = buckets[place.memory], place.offset + math.prod(place.size)
    return f"{name}[{place.offset}:{end}]" if place.is_view else name
