"""Trains entries of the catalogue and compares them with eager DDP, one after the other, on ranks
that are kept as long as all of them finish each training."""

from __future__ import annotations

import time
from typing import Final

from benches.processes import RankProcesses, RanksFailed
from benches.results import Row
from gpu_checks.parts import Check, Part
from gpu_checks.sites import Note, Site
from testing.scenarios.outcomes import RankReport, judge

WORKER: Final = "gpu_checks.training_rank"
GROUP_TIMEOUT_S: Final = 40.0
CHECK_S: Final = 100.0
"""Time limit of one training, both ways, on a GPU, in seconds."""


def run(part: Part, site: Site, note: Note) -> None:
    """Train all checks of a part; one row each."""
    # Each rank has one thread, because parts run in parallel.
    place = site.place(
        part.ranks,
        cores=(tuple(range(site.cores)),) * part.ranks,
        variables={"OMP_NUM_THREADS": "1"},
        timeout_s=GROUP_TIMEOUT_S,
        worker=WORKER,
    )
    limit_s = site.deadline - time.monotonic() if site.is_small else CHECK_S
    ranks: RankProcesses | None = None
    try:
        for check in part.checks_on(site.device):
            fate = ""
            reports: list[RankReport | None] = [None] * part.ranks
            try:
                ranks = ranks or RankProcesses(part.mode, place)
                reports = ranks.ask("train", check, timeout_s=limit_s)
            except RanksFailed as error:
                fate, ranks = str(error), None
            note(row_of(check, reports, fate))
            fates = {report and bool(report.eager or report.fused) for report in reports}
            if ranks is not None and len(fates) > 1:
                # A collective may be left that another rank was in: the next check needs new ranks.
                ranks.kill()
                ranks = None
    finally:
        if ranks is not None:
            ranks.kill()


def row_of(check: Check, reports: list[RankReport | None], fate: str) -> Row:
    """The row of a training. ``fate``: why a rank has no report."""
    outcome = judge(check.scenario, reports, fate=fate)
    is_right = outcome.kind in ("equal", check.scenario.becomes)
    words = outcome.words.partition("\n")[0]
    words = f"{outcome.kind}: {words}" if outcome.kind != "equal" else words
    return Row(check.title, is_right, words)
