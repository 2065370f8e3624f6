"""Which cases run in which mode of the flag, and where."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

MODES = ("concat", "coalesced")


def in_turn(
    cases: Mapping[str, Any],
    each_torch: Collection[str] = (),
    skipped: Mapping[str, str] | None = None,
) -> list[Any]:
    """Parameters ``(case, mode)``: each case in one mode, in the other one by night.

    Args:
        cases: by their names.
        each_torch: those that stand on torch's private parts most; others are of the package's own
            logic, and run on other versions of torch by night.
        skipped: those that this torch cannot run, with the reason.
    """
    found: list[Any] = []
    for number, (name, case) in enumerate(cases.items()):
        for mode in MODES:
            is_now = mode == MODES[number % 2]
            marks = [] if is_now else [pytest.mark.nightly]
            if name in each_torch:
                marks.append(pytest.mark.each_torch)
            if skipped and name in skipped:
                marks.append(pytest.mark.skip(reason=skipped[name]))
            found.append(pytest.param(case, mode, marks=marks, id=f"{name}-{mode}"))
    return found
