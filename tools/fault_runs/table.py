"""What became of scenarios, for people. Nothing here imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fault_runs.judging import exit_words, first_error_s
from fault_runs.records import RankRun, Run
from fault_runs.running import Verdict


def lines_of(verdict: Verdict) -> Iterator[str]:
    """A line for each rank, and one for each violation."""
    if verdict.skipped:
        yield f"  {verdict.way}: skipped: {verdict.skipped}"
        return
    if len(verdict.runs) > 1:
        yield f"  {verdict.way}: {_counted(verdict.runs)}"
    else:
        for rank in verdict.runs[-1].ranks:
            yield f"  {verdict.way}, rank {rank.rank}: {_words(rank, verdict.runs[-1])}"
            for failure in rank.failures[:2]:
                yield f"      {failure.brief()}"
    for text in verdict.violations:
        yield f"  VIOLATION, {verdict.way}: {text}"


def as_markdown(verdicts: Sequence[Verdict]) -> str:
    """The table, and the violations under it."""
    rows = ["| scenario | run as | ranks | rule |", "| --- | --- | --- | --- |"]
    for verdict in verdicts:
        if verdict.skipped:
            rows.append(f"| {verdict.scenario} | {verdict.way} | | skipped: {verdict.skipped} |")
            continue
        shown = _counted(verdict.runs) if len(verdict.runs) > 1 else _ranks(verdict.runs[-1])
        kept = "broken" if verdict.violations else "kept"
        is_peer = verdict.way in ("eager", "compiled")
        rows.append(f"| {verdict.scenario} | {verdict.way} | {shown} | {'' if is_peer else kept} |")
    found = [
        f"- {verdict.scenario}, {verdict.way}: {text}"
        for verdict in verdicts
        for text in verdict.violations
    ]
    return "\n".join([*rows, "", *(found or ["No rule was broken."])]) + "\n"


def _ranks(run: Run) -> str:
    return "; ".join(f"{rank.rank}: {_words(rank, run)}" for rank in run.ranks)


def _words(rank: RankRun, run: Run) -> str:
    end_s = rank.end - run.fault_time
    if rank.exit_code is None:
        return "hung"
    if rank.is_right:
        growth = (rank.result or {}).get("growth")
        return f"right, {end_s:.1f} s" + (f", {growth}" if growth else "")
    error_s = first_error_s(rank, run)
    if rank.failures and error_s is not None:
        kind = rank.failures[0].kinds[0]
        done = f", {rank.steps} steps" if rank.exit_code == 0 else ""
        return f"{kind} at {error_s:.1f} s, {exit_words(rank.exit_code)} at {end_s:.1f} s{done}"
    return f"{exit_words(rank.exit_code)} at {end_s:.1f} s"


def _counted(runs: Sequence[Run]) -> str:
    codes = Counter(exit_words(rank.exit_code) for run in runs for rank in run.ranks)
    counts = ", ".join(f"{count} with {words}" for words, count in codes.items())
    return f"{len(runs)} runs: {counts}"
