"""The rule: under the flag, a training ends normally, or with a clear error that is no later than
without the flag.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence

from fault_runs.records import RankRecord, RunRecord
from fault_runs.scenarios import Scenario

USER_ERROR = "UserError"
STORE_ERRORS = ("DistNetworkError", "DistStoreError")
STORE_TEXTS = ("Failed to recv, got 0 bytes", "Broken pipe", "wait timeout after")
BACKEND_TEXTS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
OWN_ERRORS = ("RanksDisagreeError",)
"""The package's own clear errors."""

RELATIVE = 1e-4

END_S = 6.0
"""Time for the end of an interpreter with torch on a busy core, in seconds, in addition to a
scenario's slack."""


def violations(scenario: Scenario, run: RunRecord, peers: Sequence[RunRecord]) -> list[str]:
    """Violations by a run under the flag, compared with the runs without it, in words."""
    known = {item for peer in peers for item in peer.left}
    found = [f"left behind: {item}" for item in run.left if item not in known]
    if scenario.fault is not None and not any(rank.is_hit for rank in run.ranks):
        found.append(f"no rank has come to {scenario.fault.point!r}, where the fault is")
    for number, text in scenario.said.items():
        errors = [error for failure in run.ranks[number].failures for error in failure.texts]
        if not any(text in error for error in errors):
            found.append(f"rank {number}: {text!r} is in none of its errors: {errors}")
    for number, rank in enumerate(run.ranks):
        others = [peer.ranks[number] for peer in peers]
        texts = [] if _is_dead_by_fault(scenario, rank) else list(_of_rank(scenario, rank, others))
        found += [f"rank {rank.rank}: {text}" for text in (*texts, *_numbers(rank, others))]
    return found


def _of_rank(scenario: Scenario, rank: RankRecord, others: list[RankRecord]) -> Iterator[str]:
    """Violations by one rank; ``others`` are the same rank without the flag."""
    if rank.exit_code is None:
        hung = sum(other.exit_code is None for other in others)
        if hung == 0 or hung < len(others):
            yield f"hung (as {hung} of {len(others)} without the flag)" if hung else "hung"
        return
    yield from _end(scenario, rank, others)
    yield from _lateness(scenario, rank, others)
    yield from _replaced(rank, others)
    yield from _growth(scenario, rank, others)


def _end(scenario: Scenario, rank: RankRecord, others: list[RankRecord]) -> Iterator[str]:
    """Violation if it does not end as well as the better one of the peers."""
    must = scenario.must_end_right or any(other.is_right for other in others)
    best = max((other.steps for other in others), default=0)
    if must and not rank.is_right:
        first = rank.failures[0].brief() if rank.failures else exit_words(rank.exit_code)
        yield f"must end right, but: {first}"
    elif (rank.exit_code or 0) < 0 and all(o.exit_code != rank.exit_code for o in others):
        yield f"ended by {exit_words(rank.exit_code)}"
    elif rank.steps < best - scenario.may_miss and scenario.interrupt_step is None:
        yield f"did {rank.steps} steps without an error, a peer {best}"


def _lateness(scenario: Scenario, rank: RankRecord, others: list[RankRecord]) -> Iterator[str]:
    """Violations if its first error or its end is late."""
    times = [s for other in others if (s := other.first_error_s) is not None]
    own = rank.first_error_s
    if own is not None and times and own > max(times) + scenario.slack_s:
        yield f"its error comes after {own:.1f} s, without the flag after {max(times):.1f} s"
    ends = [other.end_s for other in others if other.exit_code is not None]
    if rank.failures and ends and rank.end_s > max(ends) + scenario.slack_s + END_S:
        yield f"it ends after {rank.end_s:.1f} s, without the flag after {max(ends):.1f} s"


def _replaced(rank: RankRecord, others: list[RankRecord]) -> Iterator[str]:
    """Violation if the user's or the backend's error is gone."""
    if not rank.failures:
        return
    first = rank.failures[0]
    user = any(USER_ERROR in f.kinds for other in others for f in other.failures[:1])
    if user and USER_ERROR not in first.kinds and "user's own error" not in " ".join(first.texts):
        yield f"the user's error is not in {first.brief()}"
    backend = all(_is_backends(other) for other in others) and bool(others)
    is_stores = first.kinds[0] in STORE_ERRORS or any(t in first.texts[0] for t in STORE_TEXTS)
    if backend and is_stores:
        yield f"a store's error in place of the backend's: {first.brief()}"
    outermost = {f.kinds[0] for other in others for f in other.failures}
    if outermost and first.kinds[0] not in outermost | {*OWN_ERRORS, "RuntimeError", USER_ERROR}:
        yield f"an error of another kind than {sorted(outermost)}: {first.brief()}"


def _is_backends(rank: RankRecord) -> bool:
    texts = " ".join(rank.failures[0].texts) if rank.failures else ""
    return any(text in texts for text in BACKEND_TEXTS)


def _growth(scenario: Scenario, rank: RankRecord, others: list[RankRecord]) -> Iterator[str]:
    """Violations if a value that must stay flat grows more than without the flag."""
    for name, value in rank.value_of("growth", {}).items():
        peers = [other.value_of("growth", {}).get(name, 0) for other in others]
        if value > max(peers, default=0) + scenario.may_grow.get(name, 0):
            yield f"{name} grew by {value}, without the flag by {peers}"


def _numbers(rank: RankRecord, others: list[RankRecord]) -> Iterator[str]:
    """Violation if the parameters differ from those of a peer that ended normally, like this
    rank."""
    own = rank.value_of("parameters", None)
    references = [other for other in others if other.is_right]
    if own is None or not references or not rank.is_right:
        return
    wanted = references[0].value_of("parameters", own)
    pairs = zip(own, wanted, strict=True)
    if not all(math.isclose(a, b, rel_tol=RELATIVE, abs_tol=RELATIVE) for a, b in pairs):
        yield "parameters differ from those without the flag"
    if rank.value_of("launched", 0) >= len(own) > 1:
        yield "nothing was fused"


def _is_dead_by_fault(scenario: Scenario, rank: RankRecord) -> bool:
    fault = scenario.fault
    if fault is None or not rank.is_hit or scenario.launcher == "torchrun":
        return False
    return fault.action == "kill" or (fault.action == "stop" and fault.continue_s is None)


def exit_words(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "hung"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
