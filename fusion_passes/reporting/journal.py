"""Remembers, for this process, what was done to each compiled graph.

A graph that comes from Inductor's FX graph cache was compiled by another process, so no pass runs
here. This process learns of it from two things: Inductor stores with a graph what its compile
added to the counters and adds it again on a hit, so a counter carries the report's fingerprint; and
the report itself lies under that in Inductor's cache directory. It also travels with the graph that
``torch.compiler.save_cache_artifacts()`` saves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fusion_passes.profile.files import write_whole
from fusion_passes.reporting.records import FusionReport, with_copies
from fusion_passes.reporting.table import format_report
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.dynamo import ddp_graph_log
from fusion_passes.torch_private.inductor import (
    cache_directory,
    carried_text,
    carry_text,
    inductor_counters,
    trace_artifact,
)

log = logging.getLogger(__name__)

COUNTER_PREFIX: Final = "ddp_fusion_plan:"

_CARRIED: Final = "ddp_fusion_report_"
"""How the name of a report begins that travels with saved graphs."""


@dataclass
class _Pending:
    """A graph that is being lowered: its report so far, and the buckets still to come."""

    report: FusionReport
    missing: set[int]


class Journal:
    """The reports of this process, oldest first."""

    def __init__(self) -> None:
        self._reports: list[FusionReport] = []
        self._counted: dict[str, int] = {}
        self._pending: dict[str, _Pending] = {}

    def expect(self, report: FusionReport, label: str, buckets: Collection[int]) -> None:
        """Record a graph once it is known how its gradients are stored, which only its lowering
        knows.

        Args:
            report: all that is known so far.
            label: by which :meth:`packed` will name the graph.
            buckets: numbers of the buckets that will be lowered.
        """
        if buckets:
            self._pending[label] = _Pending(report, set(buckets))
        else:
            self.add(report)

    def packed(self, label: str, copied: Mapping[int, str]) -> None:
        """Note how a bucket's gradients are stored.

        Args:
            label: the graph's, a colon, and the bucket's number.
            copied: why a gradient is copied, by its number in the bucket.
        """
        name, _, number = label.rpartition(":")
        pending = self._pending.get(name)
        if pending is None:
            return
        index = int(number)
        pending.report = with_copies(pending.report, index, copied)
        pending.missing.discard(index)
        if not pending.missing:
            del self._pending[name]
            self.add(pending.report)

    def add(self, report: FusionReport) -> None:
        """Record a graph that this process compiled, and leave word for those that will take it
        from the cache."""
        self._reports.append(report)
        ddp_graph_log().info("%s", format_report(report))
        trace_artifact("ddp_fusion_report", lambda: format_report(report))
        key = COUNTER_PREFIX + report.fingerprint()
        inductor_counters()[key] += 1
        self._counted[key] = self._counted.get(key, 0) + 1
        _store(report)

    def reports(self) -> tuple[FusionReport, ...]:
        self._read_cached()
        return tuple(self._reports)

    def clear(self) -> None:
        """Forget what was recorded so far."""
        self._read_cached()
        self._reports.clear()

    def reset(self) -> None:
        """Forget all, and has torch's counters forget it."""
        for key in _counted_by_torch():
            del inductor_counters()[key]
        vars(self).update(vars(Journal()))

    def _read_cached(self) -> None:
        """Add the graphs that came from the cache since the last call."""
        counted = _counted_by_torch()
        for key, count in counted.items():
            # A user may have cleared the counters: then all that is there is new.
            known = self._counted.get(key, 0)
            for _ in range(count - known if count >= known else count):
                report = _load(key.removeprefix(COUNTER_PREFIX))
                if report is not None:
                    self._reports.append(report)
        self._counted = counted


def _counted_by_torch() -> dict[str, int]:
    counters = inductor_counters()
    return {key: n for key, n in counters.items() if key.startswith(COUNTER_PREFIX)}


def _path(digest: str) -> Path:
    return Path(cache_directory()) / "fusion_passes" / f"{digest}.json"


def _store(report: FusionReport) -> None:
    path = _path(report.fingerprint())
    carry_text(_CARRIED + report.fingerprint(), report.to_json())
    try:
        write_whole(path, report.to_json())
    except OSError as error:
        log.info("The report of plan %s was not stored: %s", report.digest, error)


def _load(digest: str) -> FusionReport | None:
    try:
        path = _path(digest)
        text = None if path.exists() else carried_text(_CARRIED + digest)
        report = FusionReport.from_json(path.read_text() if text is None else text)
        carry_text(_CARRIED + digest, report.to_json())  # It may be saved from here, too.
        return report
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning(
            "A fused graph came from the FX graph cache, but its report (plan %s) is not in %s: "
            "%s. The graph runs as it was compiled; clear the cache to see its buckets again.",
            digest,
            _path(digest).parent,
            error,
        )
        return None


journal: Final = process_state.keep(
    Journal(), "what was done to each compiled graph", Lifetime.PROCESS, reset=Journal.reset
)
