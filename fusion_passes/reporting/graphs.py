"""What was done to each graph that compiled autograd has traced and this process has compiled. No
pass runs on one that comes from Inductor's FX graph cache, so none is known of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from fusion_passes.reporting.records import FusionReport
from fusion_passes.reporting.table import format_report
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.inductor import trace_artifact


class CompileLog:
    """The reports of this process, oldest first."""

    def __init__(self) -> None:
        self._reports: list[FusionReport] = []
        # Graphs that are being lowered, by label: the report so far, and the buckets still to come.
        self._pending: dict[str, tuple[FusionReport, Collection[int]]] = {}

    def expect(self, report: FusionReport, label: str, buckets: Collection[int]) -> None:
        """Record a graph once its lowering has told :meth:`packed`, by this label, how it stores
        the gradients of these buckets."""
        if buckets:
            self._pending[label] = report, buckets
        else:
            self._reports.append(report)
            trace_artifact("ddp_fusion_report", lambda: format_report(report))

    def packed(self, label: str, copied: Mapping[int, str]) -> None:
        """Note how a bucket's gradients are stored: ``label`` is the graph's, a colon and the
        bucket's number, ``copied`` has the reason for each that is copied, by its number there."""
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

    def reset(self) -> None:
        vars(self).update(vars(CompileLog()))


compile_log: Final = process_state.keep(
    CompileLog(), "what was done to each compiled graph", Lifetime.PROCESS, reset=CompileLog.reset
)


def one_for_each_plan(reports: Iterable[FusionReport]) -> tuple[FusionReport, ...]:
    """The latest graph of each plan, in the order in which the first of each was compiled."""
    by_plan: dict[str, list[FusionReport]] = {}
    for report in reports:
        by_plan.setdefault(report.digest, []).append(report)
    return tuple(replace(of_plan[-1], compiled=len(of_plan)) for of_plan in by_plan.values())
