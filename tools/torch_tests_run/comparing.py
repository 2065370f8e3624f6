"""What became of torch's tests, and which of them the flag changes."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

Kind = Literal["passed", "failed", "skipped", "timed out", "not run"]
Models = Literal["as-is", "compiled"]
Mode = Literal["off", "concat", "coalesced"]
Verdict = Literal["alike", "no reference", "known", "new"]

MODELS: tuple[Models, ...] = get_args(Models)
MODES: tuple[Mode, ...] = get_args(Mode)
OFF: Mode = "off"

MAX_WORDS = 300
"""Characters."""

_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Exit|Failure)\b")


@dataclass(frozen=True, order=True)
class Run:
    """One test in one variant.

    Attributes:
        test: its name.
        models: as the test has them, or compiled.
        mode: of the flag; ``off``: what the others are compared with.
    """

    test: str
    models: Models
    mode: Mode

    @property
    def reference(self) -> Run:
        return Run(self.test, self.models, OFF)

    def __str__(self) -> str:
        return f"{self.test}[{self.models}, {self.mode}]"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        kind: how it ended. ``not run``: there is nothing to compare it with.
        words: the last line of the error, or why it was skipped.
        buckets: on rank 0, in all graphs that were compiled: 0 if nothing was fused.
        seconds: how long it took.
    """

    kind: Kind
    words: str = ""
    buckets: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Known:
    """A difference that is known.

    Attributes:
        test: its name, or a pattern.
        kind: what becomes of it under the flag.
        reason: why that is right, or which fault it is.
        words: part of the error; one that fails with another is a new difference.
        models: pattern.
        mode: pattern.
    """

    test: str
    kind: Kind
    reason: str
    words: str = ""
    models: str = "*"
    mode: str = "*"

    def concerns(self, run: Run) -> bool:
        patterns = (self.test, self.models, self.mode)
        values = (run.test, run.models, run.mode)
        return all(map(fnmatchcase, values, patterns))

    def covers(self, run: Run, outcome: Outcome) -> bool:
        return self.concerns(run) and self.kind == outcome.kind and self.words in outcome.words


@dataclass(frozen=True)
class Comparison:
    """A run under the flag beside the same without it.

    Attributes:
        run: under the flag.
        verdict: ``alike``: it passed as its reference did. ``no reference``: that did not pass.
            ``known``, ``new``: it did not pass.
        reference: what became of it without the flag.
        outcome: what became of it.
        reason: of a known difference.
    """

    run: Run
    verdict: Verdict
    reference: Outcome
    outcome: Outcome
    reason: str = ""

    def __str__(self) -> str:
        words = self.outcome.words or self.reference.words
        return f"{self.run}: {self.outcome.kind}, was {self.reference.kind}: {words}"


def read_known(path: Path) -> tuple[Known, ...]:
    """Read the list of known differences.

    Raises:
        ValueError: for an entry without a reason, or with a kind that there is not.
    """
    known = tuple(Known(**entry) for entry in json.loads(path.read_text()))
    for entry in known:
        if not entry.reason or entry.kind not in get_args(Kind):
            raise ValueError(f"{path}: {entry} needs a reason, and a kind of {get_args(Kind)}")
    return known


def compare(outcomes: Mapping[Run, Outcome], known: Sequence[Known]) -> list[Comparison]:
    """Compare each run under the flag with its reference, where both were done."""
    comparisons = []
    for run, outcome in outcomes.items():
        reference = outcomes.get(run.reference)
        if run.mode == OFF or reference is None:
            continue
        reason = next((entry.reason for entry in known if entry.covers(run, outcome)), "")
        verdict: Verdict = "known" if reason else "new"
        if reference.kind != "passed":
            verdict, reason = "no reference", ""
        elif outcome.kind == "passed":
            verdict, reason = "alike", ""
        comparisons.append(Comparison(run, verdict, reference, outcome, reason))
    return comparisons


def no_longer(comparisons: Iterable[Comparison], known: Sequence[Known]) -> list[Known]:
    """Return the known differences that were run and of which none is left."""
    comparisons = list(comparisons)
    return [
        entry
        for entry in known
        if any(entry.concerns(it.run) for it in comparisons)
        and not any(
            it.verdict == "known" and entry.covers(it.run, it.outcome) for it in comparisons
        )
    ]


def summary(comparisons: Sequence[Comparison]) -> Counter[str]:
    """How many there are of each variant and verdict, and how many of each variant were fused."""
    counts = Counter[str]()
    for it in comparisons:
        variant = f"{it.run.models}, {it.run.mode}"
        counts[f"{variant}: {it.verdict}"] += 1
        counts[f"{variant}: fused"] += it.outcome.buckets > 0
    return counts


def as_json(outcomes: Mapping[Run, Outcome], known: Sequence[Known]) -> str:
    """Return all that was found, for programs."""
    comparisons = {it.run: it for it in compare(outcomes, known)}
    rows: list[dict[str, Any]] = []
    for run, outcome in sorted(outcomes.items()):
        row = asdict(run) | asdict(outcome)
        if run in comparisons:
            row |= {"verdict": comparisons[run].verdict, "reason": comparisons[run].reason}
        rows.append(row)
    version = importlib.metadata.version("torch")
    return json.dumps({"torch": version, "runs": rows}, indent=1) + "\n"


def last_error(text: str) -> str:
    """Return the line of a traceback that names its error: of several ranks' that of the first."""
    first = text.partition("\nProcess 1 exited with")[0]
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    words = re.sub(r"0x[0-9a-f]+", "0x...", (named or lines or [""])[-1])
    return words[:MAX_WORDS]
