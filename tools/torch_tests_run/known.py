"""Which of torch's tests end differently under the flag, and whether that is known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import pytest

Kind = Literal["passed", "failed", "skipped", "timed out"]
Models = Literal["as-is", "compiled"]

KNOWN = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        kind: how it ended.
        words: the last line of the error, or why it was skipped.
        averaged: number of backwards that the package averaged on rank 0.
    """

    kind: Kind
    words: str = ""
    averaged: int = 0


@dataclass(frozen=True)
class Known:
    """A known difference.

    Attributes:
        test: name of the test, or a pattern.
        words: part of the error; a test that fails with another error is a new difference.
        reason: why that is right, or which bug it is.
        models: pattern for the models.
    """

    test: str
    words: str
    reason: str
    models: str = "*"

    def __str__(self) -> str:
        return f"{self.test} [{self.models}]: {self.reason}"

    def concerns(self, test: str, models: Models) -> bool:
        return fnmatchcase(test, self.test) and fnmatchcase(models, self.models)


def read_known() -> tuple[Known, ...]:
    """Read the list of known differences."""
    return tuple(Known(**entry) for entry in json.loads(KNOWN.read_text()))


def judge(reference: Outcome, outcome: Outcome, known: Iterable[Known]) -> None:
    """Fail if a test that passes without the flag does not pass under it. Skip a test that does not
    pass without it; ``xfail`` if the difference is known."""
    if reference.kind != "passed":
        pytest.skip(f"{reference.kind} without the flag: {reference.words}")
    if outcome.kind == "passed":
        return
    for entry in known:
        if outcome.kind == "failed" and entry.words in outcome.words:
            pytest.xfail(str(entry))
    pytest.fail(f"{outcome.kind}, passed without the flag: {outcome.words}", pytrace=False)
