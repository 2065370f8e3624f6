"""What ranks say where they meet, and the verdict on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusion_passes.agreement.launches import (
    FOLLOWS,
    LATE,
    LaunchList,
    number_runs,
    numbers_in,
    parameters_in,
)


def statement_of(settings: str, launches: LaunchList, reached: Iterable[int]) -> str:
    """What a rank says.

    Args:
        settings: the options that must be the same on all ranks.
        launches: what it would launch.
        reached: the parameters that its backward reaches, where ranks may use others.
    """
    return json.dumps([settings, launches.encode(), number_runs(sorted(reached))])


def texts_of(said: Mapping[Any, str]) -> dict[int, str]:
    """The launches in what ranks have said."""
    return {int(rank): json.loads(text)[1] for rank, text in said.items()}


def compare_statements(said: Mapping[int, str], may_lack: bool) -> str:
    """The verdict on what all ranks have said.

    Args:
        said: by rank, what :func:`statement_of` gives.
        may_lack: whether a rank may lack gradients that others reduce, and send zeros for them.
    """
    items = {rank: json.loads(text) for rank, text in said.items()}
    if len({settings for settings, *_ in items.values()}) > 1:
        return json.dumps(["settings", said])
    lists = {rank: LaunchList.decode(item[1]) for rank, item in sorted(items.items())}
    others = {rank: item for rank, item in lists.items() if item.mode != FOLLOWS}
    lists = others or lists
    if may_lack:
        reached = {rank: frozenset(numbers_in(items[rank][2])) for rank in lists}
        chosen = _part_of_one(lists, reached) or whole_list(list(lists.values()))
        if chosen is None:
            return json.dumps(["nothing", said])
        foreign = max(item.foreign for item in lists.values())
        return json.dumps(["run", replace(chosen, foreign=foreign).encode()])
    graphs = [item for item in lists.values() if item.mode != LATE]
    reference = graphs[0] if graphs else lists[min(lists)]
    for launches in lists.values():
        # What follows the backward can follow in any parts.
        fits = (
            reference.parameters <= launches.parameters
            if launches.mode == LATE and graphs
            else reference.parameters == launches.parameters
        )
        if not fits:
            return json.dumps(["differ" if graphs else "nothing", said])
    if any(item.foreign for item in graphs) and any(item != reference for item in lists.values()):
        # One that followed by hand would do so behind collectives that are not DDP's.
        reference = replace(reference, mode=LATE)
    return json.dumps(["run", reference.encode()])


def _part_of_one(
    lists: Mapping[int, LaunchList], reached: Mapping[int, frozenset[int]]
) -> LaunchList | None:
    """A list that is a part of its rank's backward, and whose parameters the backwards of all
    others do not reach, unless they would launch the same. Of several, the one that comes first in
    a backward which reaches all of them, as far as the order of the parameters tells."""
    parts = [
        item
        for rank, item in lists.items()
        if item.mode != LATE
        and not reached[rank] <= item.parameters
        and all(
            item == lists[other] or item.parameters.isdisjoint(reached[other]) for other in lists
        )
    ]
    return max(parts, key=LaunchList.order, default=None)


def whole_list(lists: Sequence[LaunchList]) -> LaunchList | None:
    """The first list that reduces all that any of them does, a graph's before others."""
    every = parameters_in(lists)
    whole = [item for item in lists if item.parameters == every]
    return next((item for item in whole if item.mode != LATE), whole[0] if whole else None)
