"""What becomes of what the ranks say about a module's plan: JSON in, by rank, and a verdict out
that all of them read. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

LEFT: Final = "left"
"""Said by a rank that has gone on: whatever the ranks run now, they run on."""

EARLY: Final = "early"
"""Said by a rank that has not measured enough steps, with why."""

OTHER_GRAPHS: Final = "the ranks have measured steps of other graphs"
OTHER_PLANS: Final = "the graphs of the ranks differ"


def _read(said: Mapping[int, str]) -> tuple[list[Any], str | None]:
    """What the ranks have measured, in their order; or a verdict."""
    items = [json.loads(said[rank]) for rank in sorted(said)]
    reasons = [value for kind, value in items if kind == LEFT]
    if reasons:
        return [], json.dumps(["stop", reasons[0]])
    early = [value for kind, value in items if kind == EARLY]
    if early:
        return [], json.dumps(["again", early[0]])
    return [value for _, value in items], None


def measured(said: Mapping[int, str], merge: Callable[[str, Sequence[Sequence[int]]], str]) -> str:
    """The steps that all ranks have measured, and why there is to be no second plan in this run.

    Args:
        said: by each: its launches, the times of these and of the whole backward, what its buckets
            were chosen from, and why it cannot have another plan.
        merge: gives the steps, as text, from launches and the times of all ranks.
    """
    values, verdict = _read(said)
    if verdict is not None:
        return verdict
    launches = values[0]["launches"]
    if any(value["launches"] != launches for value in values):
        return json.dumps(["stop", OTHER_GRAPHS])
    because = next(filter(None, (value["because"] for value in values)), "")
    if len({value["chosen_from"] for value in values}) > 1:
        because = because or OTHER_PLANS
    steps = merge(launches, [value["times_ns"][:-1] for value in values])
    slowest = max(value["times_ns"][-1] for value in values)
    return json.dumps(["measured", {"steps": steps, "first_ns": slowest, "because": because}])


def compiled(said: Mapping[int, str]) -> str:
    """Whether all ranks have compiled the second plan; else the error of the lowest that has not.

    Args:
        said: by each: the error of its compile, as JSON; empty if there was none.
    """
    errors = [(rank, json.loads(said[rank])) for rank in sorted(said)]
    failed = [f"the second compile has failed on rank {r}: {text}" for r, text in errors if text]
    return json.dumps(["stop", failed[0]] if failed else ["go", ""])


def timed(said: Mapping[int, str]) -> str:
    """The time of a backward with the second plan, on the slowest rank.

    Args:
        said: by each: its own.
    """
    values, verdict = _read(said)
    return verdict or json.dumps(["timed", max(values)])
