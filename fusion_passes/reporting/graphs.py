"""Records what the passes did to each graph that compiled autograd traced and this process
compiled. Graphs from Inductor's FX graph cache are missing, because no pass runs on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from fusion_passes.reporting.records import FusionReport
from fusion_passes.reporting.table import format_report
from fusion_passes.torch_private.inductor import trace_artifact


class CompileLog:
    """The reports of the graphs that this process compiled, oldest first."""

    def __init__(self) -> None:
        self._reports: list[FusionReport] = []
        # Graphs that are being lowered, by label: the report so far, and the buckets not lowered.
        self._pending: dict[str, tuple[FusionReport, Collection[int]]] = {}

    def expect(self, report: FusionReport, label: str, buckets: Collection[int]) -> None:
        """Record a graph once :meth:`packed` has been called, with this label, for each of
        ``buckets``: these calls say how the gradients are stored."""
        if buckets:
            self._pending[label] = report, buckets
        else:
            self._reports.append(report)
            trace_artifact("ddp_fusion_report", lambda: format_report(report))

    def packed(self, label: str, copied: Mapping[int, str]) -> None:
        """Note how a bucket's gradients are stored. ``label`` is the graph's label, a colon and the
        bucket's index; ``copied`` has the reason for each copied gradient, by its index in the
        bucket."""
        name, _, number = label.rpartition(":")
        if name not in self._pending:
            return
        report, missing = self._pending.pop(name)
        index = int(number)
        buckets = list(report.buckets)
        parameters = buckets[index].parameters
        named = tuple((parameters[position], copied[position]) for position in sorted(copied))
        buckets[index] = replace(buckets[index], copied=named)
        missing = [other for other in missing if other != index]
        self.expect(replace(report, buckets=tuple(buckets)), name, missing)

    def reports(self) -> tuple[FusionReport, ...]:
        return tuple(self._reports)


compile_log: Final = CompileLog()
"""The reports of the graphs that were compiled."""


def one_for_each_plan(reports: Iterable[FusionReport]) -> tuple[FusionReport, ...]:
    """The latest report of each plan, in the order in which the first graph of each was
    compiled."""
    by_plan: dict[str, list[FusionReport]] = {}
    for report in reports:
        by_plan.setdefault(report.digest, []).append(report)
    return tuple(replace(of_plan[-1], compiled=len(of_plan)) for of_plan in by_plan.values())
