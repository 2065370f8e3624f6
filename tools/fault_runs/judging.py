"""The rule: under the flag a training ends right, or in a clear error no later than without it.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping, Sequence

from fault_runs.records import RankRun, Run
from fault_runs.scenarios import Scenario

USER_ERROR = "UserError"
STORE_ERRORS = ("DistNetworkError", "DistStoreError")
STORE_TEXTS = ("Failed to recv, got 0 bytes", "Broken pipe", "wait timeout after")
BACKEND_TEXTS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
OWN_ERRORS = ("RanksDisagreeError",)
"""Clear ones of the package's own."""

RELATIVE = 1e-4

END_S = 6.0
"""For the end of an interpreter with torch in it, on a busy core: on top of a scenario's slack."""


def violations(scenario: Scenario, run: Run, peers: Sequence[Run]) -> list[str]:
    """What is wrong with a run under the flag, beside the runs without it, in words."""
    found = [f"left behind: {item}" for item in run.left if item not in _left(peers)]
    if scenario.fault is not None and all(rank.faulted is None for rank in run.ranks):
        found.append(f"no rank has come to {scenario.fault.point!r}, where the fault is")
    for number, rank in enumerate(run.ranks):
        others = [peer.ranks[number] for peer in peers]
        if not _is_dead_by_fault(scenario, rank, run):
            found += [
                f"rank {rank.rank}: {text}" for text in _of_rank(rank, others, run, peers, scenario)
            ]
    return found + _numbers(run, peers)


def _of_rank(
    rank: RankRun, others: list[RankRun], run: Run, peers: Sequence[Run], scenario: Scenario
) -> list[str]:
    if rank.exit_code is None:
        hung = [p.way for p, other in zip(peers, others, strict=True) if other.exit_code is None]
        return [] if len(hung) == len(peers) > 0 else [f"hung{_also(hung)}"]
    found = _end(rank, others, scenario)
    found += _lateness(rank, others, run, peers, scenario)
    found += _replaced(rank, others)
    found += _growth(rank, others, scenario)
    return found


def _end(rank: RankRun, others: list[RankRun], scenario: Scenario) -> list[str]:
    """Whether it ends as well as the better one of the peers."""
    must = scenario.must_end_right or any(other.is_right for other in others)
    if must and not rank.is_right:
        first = rank.failures[0].brief() if rank.failures else exit_words(rank.exit_code)
        return [f"must end right, but: {first}"]
    if (rank.exit_code or 0) < 0 and all(other.exit_code != rank.exit_code for other in others):
        return [f"ended by {exit_words(rank.exit_code)}"]
    best = max((other.steps for other in others), default=0)
    if rank.steps < best and scenario.interrupt_step is None:
        return [f"did {rank.steps} steps without an error, a peer {best}"]
    return []


def _lateness(
    rank: RankRun, others: list[RankRun], run: Run, peers: Sequence[Run], scenario: Scenario
) -> list[str]:
    """Whether its first error and its end come in time."""
    found = []
    pairs = list(zip(others, peers, strict=True))
    times = [s for other, peer in pairs if (s := first_error_s(other, peer)) is not None]
    own = first_error_s(rank, run)
    if own is not None and times and own > max(times) + scenario.slack_s:
        found.append(
            f"its error comes after {own:.1f} s, without the flag after {max(times):.1f} s"
        )
    ends = [other.end - peer.fault_time for other, peer in pairs if other.exit_code is not None]
    end = rank.end - run.fault_time
    if rank.failures and ends and end > max(ends) + scenario.slack_s + END_S:
        found.append(f"it ends after {end:.1f} s, without the flag after {max(ends):.1f} s")
    return found


def _replaced(rank: RankRun, others: list[RankRun]) -> list[str]:
    """Whether the user's or the backend's error is still there."""
    if not rank.failures:
        return []
    found = []
    first = rank.failures[0]
    user = any(USER_ERROR in f.kinds for other in others for f in other.failures[:1])
    if user and USER_ERROR not in first.kinds and "user's own error" not in " ".join(first.texts):
        found.append(f"the user's error is not in {first.brief()}")
    backend = all(_is_backends(other) for other in others) and bool(others)
    is_stores = first.kinds[0] in STORE_ERRORS or any(t in first.texts[0] for t in STORE_TEXTS)
    if backend and is_stores:
        found.append(f"a store's error in place of the backend's: {first.brief()}")
    outermost = {f.kinds[0] for other in others for f in other.failures}
    if outermost and first.kinds[0] not in outermost | {*OWN_ERRORS, "RuntimeError", USER_ERROR}:
        found.append(f"an error of another kind than {sorted(outermost)}: {first.brief()}")
    return found


def _is_backends(rank: RankRun) -> bool:
    return bool(rank.failures) and any(
        text in " ".join(rank.failures[0].texts) for text in BACKEND_TEXTS
    )


def _growth(rank: RankRun, others: list[RankRun], scenario: Scenario) -> list[str]:
    """Whether what must be flat is as flat as without the flag."""
    allowed: Mapping[str, float] = scenario.options.get("may_grow", {})  # type: ignore[assignment]
    grown: Mapping[str, float] = (rank.result or {}).get("growth", {})
    found = []
    for name, value in grown.items():
        peers = [(other.result or {}).get("growth", {}).get(name, 0) for other in others]
        limit = max(peers, default=0) + allowed.get(name, 0)
        if value > limit:
            found.append(f"{name} grew by {value}, without the flag by {peers}")
    return found


def _numbers(run: Run, peers: Sequence[Run]) -> list[str]:
    """Whether parameters are those of a peer that ended right, on each rank that did."""
    found = []
    for number, rank in enumerate(run.ranks):
        references = [p.ranks[number] for p in peers if p.ranks[number].is_right]
        own = (rank.result or {}).get("parameters")
        if own is None or not references or not rank.is_right:
            continue
        wanted = (references[0].result or {}).get("parameters", own)
        if not all(
            math.isclose(a, b, rel_tol=RELATIVE, abs_tol=RELATIVE)
            for a, b in zip(own, wanted, strict=True)
        ):
            found.append(f"rank {rank.rank}: parameters differ from those without the flag")
        if (rank.result or {}).get("launched", 0) >= len(own) > 1:
            found.append(f"rank {rank.rank}: nothing was fused")
    return found


def _is_dead_by_fault(scenario: Scenario, rank: RankRun, run: Run) -> bool:
    fault = scenario.fault
    if fault is None or rank.faulted is None or run.launcher_code is not None:
        return False
    return fault.action == "kill" or (fault.action == "stop" and fault.continue_s is None)


def first_error_s(rank: RankRun, run: Run) -> float | None:
    """From the fault to the first exception, or to an end that is none of Python's."""
    if rank.failures:
        return rank.failures[0].time - run.fault_time
    if rank.exit_code:
        return rank.end - run.fault_time
    return None


def _left(peers: Iterable[Run]) -> set[str]:
    return {item for peer in peers for item in peer.left}


def _also(ways: Sequence[str]) -> str:
    return f" (so did {', '.join(ways)})" if ways else ""


def exit_words(code: int | None) -> str:
    """An exit code for people."""
    if code is None:
        return "hung"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
