"""Trains entries of the catalogue beside eager DDP, one after the other, in ranks that go on as
long as all of them come to the end of each."""

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
"""At most, for one training both ways on a GPU."""


def run(part: Part, site: Site, note: Note) -> None:
    """Train all checks of a part; a row for each."""
    # Each rank has one thread, wherever it runs: parts run side by side.
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
                # One may have left a collective that another was in: what is next needs new ones.
                ranks.kill()
                ranks = None
    finally:
        if ranks is not None:
            ranks.kill()


def row_of(check: Check, reports: list[RankReport | None], fate: str) -> Row:
    """The row of a training. Where a rank has no report, ``fate`` says why."""
    outcome = judge(check.scenario, reports, fate=fate)
    is_right = outcome.kind in ("equal", check.scenario.becomes)
    words = outcome.words.partition("\n")[0]
    words = f"{outcome.kind}: {words}" if outcome.kind != "equal" else words
    return Row(check.title, is_right, words)
