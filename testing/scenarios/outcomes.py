"""The outcome of a scenario, from the reports of its ranks. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from testing.scenarios.entries import Scenario

Kind = Literal["equal", "equal, unfused", "broken"]

MAX_WORDS = 600
"""Maximum length of a line, in characters."""


@dataclass(frozen=True)
class Failure:
    """An exception.

    Attributes:
        text: its class and message.
        trace: its traceback.
    """

    text: str
    trace: str


@dataclass(frozen=True)
class RankReport:
    """The report of one rank.

    Attributes:
        rank: number of the rank.
        eager: the reason why eager DDP could not be trained.
        fused: the reason why it could not be trained under the flag.
        differences: differences between the two trainings, in words.
        reduced_in: where the package reports that gradients were reduced: by a reducer, in graphs,
            or ``"none"``.
        launches: collectives of DDP's groups in the averaged backwards, the least and the most,
            without the first of several.
        traced: number of backwards that compiled autograd traced.
        unwaited: tensors of compiled collectives that were never waited for: numbers can be right
            by luck although a bucket was read too early.
        warned: texts of the package's warnings.
    """

    rank: int
    eager: Failure | None = None
    fused: Failure | None = None
    differences: tuple[str, ...] = ()
    reduced_in: tuple[str, ...] = ()
    launches: tuple[int, ...] = ()
    traced: int = 0
    unwaited: int = 0
    warned: tuple[str, ...] = ()

    @property
    def is_fused(self) -> bool:
        """Whether each backward was reduced in buckets while it ran: by reducers, or in traced
        graphs, which always launch all buckets of a module."""
        return bool(self.reduced_in) and "none" not in self.reduced_in


@dataclass(frozen=True)
class Outcome:
    """The outcome of a scenario.

    Attributes:
        kind: ``equal``: trained as with eager DDP, and fused. ``equal, unfused``: trained as with
            eager DDP, with a warning that not all of it is fused. ``broken``: anything else.
        words: the warnings, or what is broken, in one line; further lines help to find the cause.
    """

    kind: Kind
    words: str = ""


def judge(scenario: Scenario, reports: Sequence[RankReport | None], *, fate: str = "") -> Outcome:
    """The outcome of a scenario from the reports of all ranks; ``fate``: how the processes ended if
    not normally, such as ``not done after 180 s``."""
    present = [report for report in reports if report is not None]
    if len(present) < len(reports):
        missing = [rank for rank, report in enumerate(reports) if report is None]
        return _broken(f"no result of ranks {missing}: {fate or 'they died'}", *_traces(present))
    for report in present:
        if report.eager is not None:
            words = f"nothing to compare with, eager DDP fails: {report.eager.text}"
            return _broken(words, *_traces(present))
    raised = {report.rank: report.fused for report in present if report.fused is not None}
    if raised:
        # The rank whose report says most about the flag knows more than ranks that were left
        # waiting.
        failure = max(raised.values(), key=lambda failure: "ddp_fusion" in failure.text)
        return _broken(f"on ranks {[*raised]}: {failure.text}", *_traces(present))
    return _judge_training(scenario, present)


def _judge_training(scenario: Scenario, reports: Sequence[RankReport]) -> Outcome:
    differences = [
        f"rank {report.rank}: {difference}"
        for report in reports
        for difference in report.differences
    ]
    if differences:
        words = f"{len(differences)} differences from eager DDP, the first: {differences[0]}"
        return _broken(words, *differences)
    warned = list(dict.fromkeys(text for report in reports for text in report.warned))
    words = _line(" ".join(warned))
    if all(report.is_fused for report in reports) or not scenario.averages:
        return Outcome("equal", words)
    silent = [report.rank for report in reports if not report.is_fused and not report.warned]
    if not silent:
        return Outcome("equal, unfused", words)
    where = list(reports[silent[0]].reduced_in)
    words = f"equal, but not fused, and nobody was warned on ranks {silent}: reduced in {where}"
    return _broken(words)


def _traces(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"rank {report.rank}, {way}: {failure.trace}"
        for report in reports
        for way, failure in (("eager", report.eager), ("under the flag", report.fused))
        if failure is not None
    ]


def _broken(words: str, *details: str) -> Outcome:
    return Outcome("broken", "\n".join([_line(words), *details]))


def _line(text: str) -> str:
    """Text for a row of a table; the log has the whole text."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_WORDS else text[: MAX_WORDS - 3] + "..."
