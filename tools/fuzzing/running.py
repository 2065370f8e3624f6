"""Runs cases on ranks, and determines the outcome of each."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fuzzing.case import Case, smaller
from fuzzing.comparing import differences, tolerance_of
from fuzzing.training import Kind, Record, train
from testing.processes import RankError, RankPool

TIMEOUT_S = 200.0
"""Time limit of a training, in seconds: a few cold compiles of 1 to 90 s on busy cores."""

CASES_A_POOL = 40
"""Number of cases after which ranks are replaced: Dynamo and DDP keep something of each case."""

BAD = ("different", "crashed", "hung", "silent", "late")
"""Outcomes that are findings."""

ERROR = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Failed|Unsupported)\w*: .*)$", re.MULTILINE
)
COMPILING = ("_dynamo/symbolic_convert.py", "_inductor/compile_fx.py", "_inductor/cpp_builder.py")
COMPILER = re.compile(r"^torch\._(dynamo|functorch|inductor)\.")
"""Beginning of an error in a compile."""

STAGE = re.compile(r"^fuzzing\.training\.StageError: fuzz stage \[([-0-9, ]+)\]$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: ``equal``; ``warned``: equal, with a warning; ``refused``: the constructor raised a
            ``ValueError`` that names the flag, or a case with ``shard_optimizer`` raised an error
            that names this option; ``both raise``: eager DDP raised too;
            ``torch``: a difference or an error that also occurs if the program is compiled without
            the flag; ``reference hung``, ``reference broken`` (an internal assertion of torch
            failed with eager DDP) and ``slow`` (the time limit was reached in a compile) have no
            result; or one of ``BAD``: ``different``, ``crashed``, ``hung``, ``silent`` (no error,
            although eager DDP raises), ``late`` (an error in a later stage than eager DDP's).
        words: differences, the error, or warnings.
        seconds: duration.
        averaged: averaged backwards, as rank 0 recorded them.
    """

    kind: str
    words: str = ""
    seconds: float = 0.0
    averaged: tuple[tuple[int, int], ...] = ()

    @property
    def bad(self) -> bool:
        """Whether it is a finding."""
        return self.kind in BAD

    @property
    def signature(self) -> str:
        """The part that stays the same while a case is shrunk."""
        if self.kind != "crashed":
            return self.kind
        last = self.words.partition("\n")[0]
        return f"{self.kind} {re.sub(r'[^A-Za-z ]+', '', last)[:60]}"


@dataclass(frozen=True)
class Failure:
    """A training that raised or hung on some rank.

    Attributes:
        stage: the first stage in which a rank raised; ``None`` if none did.
        error: the first line of that error, without its class.
        text: everything that is known of all ranks.
        is_compiling: whether a rank was compiling when the time was over.
    """

    stage: tuple[int, ...] | None
    error: str
    text: str
    is_compiling: bool = False


class Runner:
    """Keeps ranks from case to case, and counts the ``cases`` that they have run. Use it as a
    context manager."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._pool = RankPool()
        self.cases = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.renew()

    def renew(self) -> None:
        """End the ranks: the next case gets new ones."""
        self._pool.close()
        self.cases = 0

    def run(self, case: Case) -> Outcome:
        """Train a case with eager DDP and under the flag, and compare."""
        if self.cases >= CASES_A_POOL:
            self.renew()
        self.cases += 1
        start = time.monotonic()
        expected = self._train(case, "eager")
        if isinstance(expected, Failure) and expected.stage is None:
            outcome = Outcome("reference hung", expected.text)
        elif isinstance(expected, Failure) and "INTERNAL ASSERT FAILED" in expected.error:
            outcome = Outcome("reference broken", expected.error)
        else:
            outcome = self._judge(case, self._train(case, "fused"), expected)
        if outcome.kind in ("different", "crashed", "silent", "late"):
            outcome = self._blame(case, outcome, expected)
        return replace(outcome, seconds=round(time.monotonic() - start, 1))

    def shrink(self, case: Case, outcome: Outcome, *, seconds: float) -> tuple[Case, Outcome]:
        """Leave out one thing after another while the outcome is of the same kind, for this number
        of seconds. Return the smallest case found, and its outcome."""
        end, tried = time.monotonic() + seconds, [case]
        candidates = smaller(case)
        while time.monotonic() < end and (candidate := next(candidates, None)):
            if candidate in tried:
                continue
            tried.append(candidate)
            seen = self.run(candidate)
            if seen.signature == outcome.signature:
                case, outcome, candidates = candidate, seen, smaller(candidate)
        return case, outcome

    def _train(self, case: Case, kind: Kind) -> list[Record] | Failure:
        limit_s = self._timeout_s
        try:
            return self._pool.run(case.ranks, train, timeout_s=limit_s, case=case, kind=kind)
        except RankError as error:
            return _failure(error.failures)

    def _judge(
        self, case: Case, actual: list[Record] | Failure, expected: list[Record] | Failure
    ) -> Outcome:
        if isinstance(actual, Failure):
            if actual.stage is None:
                return Outcome(_kind_without_stage(actual), actual.text)
            if isinstance(expected, Failure):
                # An owner alone may raise, maybe with more micro-batches than another rank.
                depth = 2 if case.shards_optimizer else 3
                late = actual.stage[:depth] > (expected.stage or ())[:depth]
                words = f"{actual.error}\ninstead of\n{expected.error}"
                # Eager DDP compiles nothing: if it raises too, that is a coincidence.
                kind = "crashed" if COMPILER.search(actual.error) else "both raise"
                return Outcome("late" if late else kind, words)
            refused = "ValueError" in actual.error and "ddp_fusion" in actual.error
            refused = refused and actual.stage == (-1,)
            refused |= case.shards_optimizer and "shard_optimizer" in actual.error
            kind = "refused" if refused else "crashed"
            return Outcome(kind, f"{actual.error}\n{actual.text}")
        averaged = tuple(actual[0].averaged)
        if isinstance(expected, Failure):
            return Outcome(
                "silent", f"no error, but eager DDP: {expected.error}", averaged=averaged
            )
        found = differences(actual, expected, tolerance_of(case))
        warned = "\n".join(sorted({text for record in actual for text in record.warnings}))
        if found:
            words = "\n".join([*found[:12], warned])
            return Outcome("different", words, averaged=averaged)
        return Outcome("warned" if warned else "equal", warned, averaged=averaged)

    def _blame(self, case: Case, outcome: Outcome, expected: list[Record] | Failure) -> Outcome:
        """Change a bad outcome to ``torch`` if the same program, compiled without the flag, has the
        same outcome, or also continues where eager DDP raises (an unused output of a compiled
        forward has a gradient of zeros instead of none)."""
        controls: tuple[Kind, ...] = ("control", "undivided")
        for kind in controls:
            control = self._judge(case, self._train(case, kind), expected)
            goes_on = outcome.kind == "silent" and control.kind == "late"
            if goes_on or control.signature == outcome.signature:
                words = f"{outcome.kind}: {outcome.words}\n\nwithout the flag:\n{control.words}"
                return Outcome("torch", words, averaged=outcome.averaged)
        return outcome


def _kind_without_stage(failure: Failure) -> str:
    if "died with exit code" in failure.text:
        return "crashed"
    # On a busy machine, the time can be over before the kernels are compiled.
    return "slow" if failure.is_compiling else "hung"


def _failure(failures: Mapping[int, str]) -> Failure:
    """The failure of ranks; ranks that raised come first, ranks that waited for them last."""
    sections = [f"rank {number}: {failure}" for number, failure in sorted(failures.items())]
    sections.sort(key=lambda section: STAGE.search(section) is None)
    text = "\n\n".join(sections)
    stages = [tuple(map(int, match[1].split(","))) for match in STAGE.finditer(text)]
    errors = [line for line in ERROR.findall(text) if "StageError" not in line]
    shown = "\n".join(section[-4000:] for section in sections)
    is_compiling = any(place in text for place in COMPILING)
    return Failure(min(stages, default=None), errors[0] if errors else "", shown, is_compiling)
