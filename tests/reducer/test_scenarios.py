"""What the catalogue of scenarios says, with a reducer (``backward_graph="reducer"``): gradients of
eager DDP on every rank, in buckets, while the backward runs, and nothing traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch._functorch.config as functorch_config

from testing.scenarios.both_ways import flag_of, train_both
from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import Scenario
from testing.scenarios.ranks import RankReport

RUN = Callable[..., list[Any]]

_GROUPS: Final = {3: "three ranks", 4: "four ranks"}
"""Tests of as many ranks take turns: each worker has ranks of its own."""

KEEPS_GRAPH: Final = ("backward-inputs", "no-sync-elsewhere", "retain-graph")
"""They call a backward with ``retain_graph=True`` that torch has compiled as one that may overwrite
what its forward has saved. Torch refuses that, and names the setting that is set for them here."""

OWN_REDUCER: Final = (
    *("delay", "buffer-hook", "optimizer-in-hook"),
    *("two-reducers", "two-reducers-apart"),
)
"""A module of theirs is handed over to DDP's own reducer."""

NOTHING_AVERAGED: Final = ("all-replaced", "swapped", "unreached", "unreached-inside")
"""As with eager DDP: a backward lacks gradients, and the next forward is an error."""

TRACED: Final = ("users-average",)
"""The scenario itself switches compiled autograd on, for a hook of its own."""


def _cases() -> list[Any]:
    found = []
    for scenario in SCENARIOS:
        if scenario.feature == "missing-one":  # It waits for a timeout: see test_errors.py.
            continue
        mode = scenario.tested[0].partition("/")[0] if scenario.tested else scenario.modes[0]
        name = f"{scenario.parallelism}/{scenario.feature}-{mode}"
        marks = [pytest.mark.xdist_group(_GROUPS[scenario.ranks])] if scenario.ranks > 2 else []
        if not scenario.each_torch:
            marks.append(pytest.mark.nightly)
        if scenario.fails_on_oldest and torch.__version__ < "2.13":
            marks.append(pytest.mark.skip(reason=scenario.fails_on_oldest))
        found.append(pytest.param(scenario, mode, marks=marks, id=name))
    return found


def train(scenario: Scenario, mode: str) -> RankReport:
    """A job for every rank."""
    keeps_graph = scenario.feature in KEEPS_GRAPH
    flag = flag_of(scenario, mode, "reducer")
    with functorch_config.patch(donated_buffer=False) if keeps_graph else contextlib.nullcontext():
        report = train_both(scenario, scenario.dtypes[0], flag, torch.device("cpu"))
    for failure in filter(None, (report.eager, report.fused)):
        # At once, for others wait for this rank.
        assert scenario.must_fail or scenario.becomes == "refused", failure.trace
    return report


@pytest.mark.parametrize(("scenario", "mode"), _cases())
def test_trains_as_eager_ddp(run_on_ranks: RUN, scenario: Scenario, mode: str) -> None:
    reports = run_on_ranks(scenario.ranks, train, scenario=scenario, mode=mode)
    failures = [report.fused for report in reports if report.fused is not None]
    if scenario.must_fail or scenario.becomes == "refused":
        # A rank that lacks a gradient has eager DDP's error, in its next forward; the others that
        # wait for it learn why.
        assert len(failures) == len(reports)
        assert any("ddp_fusion" in f.text and scenario.must_fail in f.text for f in failures)
        return
    for report in reports:
        assert not report.differences
        if scenario.feature not in (*OWN_REDUCER, *NOTHING_AVERAGED):
            assert report.is_fused, report
        assert report.traced == 0 or scenario.feature in TRACED
        told = [text for text in report.warned if "stay on their rank" in text]
        wanted = [words for words in scenario.warns or () if "stay on their rank" in words]
        assert bool(told) == bool(wanted), report.warned
        assert report.unwaited == 0 or scenario.leaves_unwaited
