"""What becomes of what the ranks say to each other about a profile: JSON in, by rank, and a verdict
out that all of them read. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from fusion_passes.profile.records import Place, Site


def joined(said: Mapping[int, str]) -> str:
    """Where all ranks are, and all that any of them needs; or in what they differ."""
    items = {rank: json.loads(said[rank]) for rank in sorted(said)}
    first = items[min(items)]
    for rank, item in items.items():
        for name, value in item["same"].items():
            if value != first["same"][name]:
                differ = f"{name} is {first['same'][name]!r} on rank {min(items)}, and {value!r} "
                return json.dumps({"differ": f"{differ}on rank {rank}"})
    kinds = {json.dumps(kind, sort_keys=True) for item in items.values() for kind in item["kinds"]}
    place = Place.of([Site(**item["site"]) for item in items.values()], **first["same"])
    return json.dumps({"place": asdict(place), "kinds": [*map(json.loads, sorted(kinds))]})


def lowest_with_any(said: Mapping[int, str]) -> str:
    """The number of the rank whose profile all take; -1 if none has one."""
    enough = {rank: kept[0] for rank, text in said.items() if (kept := json.loads(text))}
    return str(min(enough, key=lambda rank: (not enough[rank], rank), default=-1))


NOBODY: Final = "none"
"""The verdict where no rank has kept what was asked for."""


def first_text(said: Mapping[int, str]) -> str:
    """What the lowest rank has said that has said anything; :data:`NOBODY` if none has."""
    texts = [json.loads(said[rank]) for rank in sorted(said)]
    return next(filter(None, texts), NOBODY)


def longest(said: Mapping[int, str]) -> str:
    """The one text that a rank has said, where all others have said nothing."""
    return max(said.values(), key=len)


def all_equal(said: Mapping[int, str]) -> str:
    """Whether all ranks have said the same."""
    return json.dumps(len(set(said.values())) == 1)
