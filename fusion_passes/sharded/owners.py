"""Decides which rank owns each parameter. Pure, and equal on all ranks."""

from __future__ import annotations

from dataclasses import replace

from fusion_passes.layout.layout import Kinds


def with_owners(kinds: Kinds, ranks: int) -> Kinds:
    """The kinds of all parameters with their owners: the largest parameters first, each to the rank
    that has the fewest bytes so far, and of several such ranks to the first one."""
    loads, owners = [0] * ranks, {}
    for number in sorted(kinds, key=lambda number: (-kinds[number].nbytes, number)):
        owner = owners[number] = min(range(ranks), key=loads.__getitem__)
        loads[owner] += kinds[number].nbytes
    return {number: replace(kind, owner=owners[number]) for number, kind in kinds.items()}
