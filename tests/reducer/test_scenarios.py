"""The scenarios of the catalogue on ranks: gradients equal eager DDP's, are reduced in buckets
while the backward runs, with the launches and the warnings that each entry names.

A check trains each entry in the modes and dtypes that it names; nightly jobs train it in all of
them, and with traced backwards.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Final

import pytest
import torch

from testing.processes import RUN
from testing.scenarios.both_ways import flag_of, target_of, train_both
from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import Scenario
from testing.scenarios.features.comm_hooks import HOOKS
from testing.scenarios.features.loops import LOSSES
from testing.scenarios.features.models import MODELS
from testing.scenarios.loop import Loop
from testing.scenarios.outcomes import RankReport, judge
from testing.scenarios.run import Run

GROUPS: Final = {3: "three ranks", 4: "four ranks"}
"""Tests with the same number of ranks take turns: each worker has its own ranks."""

OTHERWISE_TRACED: Final = {
    "ddp-4/update-group": "over the other pairs, one graph is compiled anew",
    "ddp-2/set-meanwhile": "compiled autograd looks at gradients before any hook runs",
    "ddp-2/hooks-meanwhile": "compiled autograd looks at hooks before any of them runs",
    "ddp-2/node-hooks-meanwhile": "as hooks-meanwhile",
}
"""Entries whose result differs if backwards are traced, and the difference."""

NAMED: Final = {"model": MODELS, "loss": LOSSES, "hook": HOOKS}
"""Tables in which the value of an argument is a name."""


def _cases() -> list[Any]:
    """``(scenario, mode, dtype)`` of each training of a check, and of the additional ones of
    nightly jobs."""
    found = []
    for scenario in SCENARIOS:
        now = {(mode, dtype or scenario.dtypes[0]) for mode, dtype in map(_parts, scenario.tested)}
        for dtype in scenario.dtypes:
            for mode in scenario.modes:
                marks = _marks(scenario, is_now=(mode, dtype) in now)
                if dtype == scenario.dtypes[0]:
                    marks += [pytest.mark.each_torch] if scenario.each_torch else []
                    marks += [pytest.mark.newest_torch] if scenario.newest_torch else []
                name = _name_of(scenario, mode, dtype)
                found.append(pytest.param(scenario, mode, dtype, marks=marks, id=name))
    return found


def cases(keep: Callable[[Scenario], bool], checked: Collection[str] = ()) -> list[Any]:
    """The scenarios that are kept, for a test that trains each in one way: ``checked`` features on
    two ranks in each check, all others nightly."""
    return [
        pytest.param(
            scenario,
            marks=_marks(scenario, is_now=scenario.ranks == 2 and scenario.feature in checked),
            id=f"{scenario.parallelism}/{scenario.feature}",
        )
        for scenario in SCENARIOS
        if keep(scenario)
    ]


def _can_be_traced(scenario: Scenario) -> bool:
    name = f"{scenario.parallelism}/{scenario.feature}"
    options = dict(scenario.options)
    is_sharded = "shard_optimizer" in options
    return "backward_graph" not in options and not is_sharded and name not in OTHERWISE_TRACED


NOT_SHARDED: Final = {
    "*sparse*": "sparse gradients are refused",
    "join*": "join is refused",
    "hook-users*": "a hook of a user's is refused, and so are the next ones",
    "hook-powersgd": "",
    "hook-wrapper*": "",
    "hook-post-local": "",
    "hook-another-group*": "",
    "hook-noop": "",
    "buffer-hook": "DDP's own reducer is refused, and so in the next ones",
    "optimizer-in-hook": "",
    "update-group*": "another group is refused",
    "same-weights*": "two modules over the same parameters are refused",
    "kept-in-graph": "a gradient that a user has set is refused, and in the next one",
    "set-meanwhile": "",
    "kept-tensors": "gradients of other ranks' parameters are dropped, and in the next one",
    "in-parts": "",
    "near-overflow": "",
    "strides-changed-on-one*": "ranks have gradients of other strides than their parameters",
}
"""Patterns of features that are refused or differ with ``shard_optimizer``, and why."""


def _can_be_sharded(scenario: Scenario) -> bool:
    given = dict(scenario.options)
    return not {
        "backward_graph",
        "scaling",
        "memory",
        "shard_optimizer",
    } & given.keys() and not any(
        fnmatch.fnmatch(scenario.feature, pattern) for pattern in NOT_SHARDED
    )


def _parts(tested: str) -> tuple[str, str]:
    mode, _, dtype = tested.partition("/")
    return mode, dtype


def _marks(scenario: Scenario, *, is_now: bool) -> list[Any]:
    why = scenario.fails_on_oldest
    return [
        *([] if is_now else [pytest.mark.nightly]),
        *([pytest.mark.xdist_group(GROUPS[scenario.ranks])] if scenario.ranks > 2 else []),
        *([pytest.mark.skip(reason=why)] if why and torch.__version__ < "2.13" else []),
    ]


def _name_of(scenario: Scenario, mode: str, dtype: str) -> str:
    """``no-sync-concat``, ``groups/plain-concat``, ``plain-concat-bf16``."""
    where = "" if scenario.parallelism == "ddp-2" else f"{scenario.parallelism}/"
    name = f"{where}{scenario.feature}-{mode}"
    return name if dtype == scenario.dtypes[0] else f"{name}-{dtype}"


def test_each_entry_has_a_name_of_its_own_and_a_training() -> None:
    names = Counter(f"{scenario.parallelism}/{scenario.feature}" for scenario in SCENARIOS)
    assert names.most_common(1)[0][1] == 1, names.most_common(1)
    for scenario in SCENARIOS:
        target = inspect.signature(target_of(scenario))
        target.bind(Run)  # Further arguments belong to the target.
        for name, value in scenario.arguments:
            if name in NAMED:
                assert value in NAMED[name], f"{scenario.feature}: {value}"
            elif "loop" in target.parameters and name not in target.parameters:
                assert name in Loop.__dataclass_fields__, f"{scenario.feature}: {name}"


def train(scenario: Scenario, mode: str, dtype: str, graph: str = "auto") -> RankReport:
    """Train a scenario; a job for every rank."""
    report = train_both(scenario, dtype, flag_of(scenario, mode, graph), torch.device("cpu"))
    failure = report.eager or report.fused
    assert failure is None, failure.trace  # Immediately, because other ranks wait for this one.
    return report


@pytest.mark.parametrize(("scenario", "mode", "dtype"), _cases())
def test_trains_as_eager_ddp(run_on_ranks: RUN, scenario: Scenario, mode: str, dtype: str) -> None:
    reports = run_on_ranks(scenario.ranks, train, scenario=scenario, mode=mode, dtype=dtype)
    outcome = judge(scenario, reports)
    assert outcome.kind == scenario.becomes, outcome.words
    for report in reports:
        assert report.unwaited == 0 or scenario.leaves_unwaited
        assert not scenario.launches or report.launches == (scenario.launches,)
        assert report.traced == 0 or "backward_graph" in dict(scenario.options)
        _assert_warned(report, scenario.warns)


@pytest.mark.parametrize("scenario", cases(_can_be_traced))
def test_trains_as_eager_ddp_where_backwards_are_traced(
    run_on_ranks: RUN, scenario: Scenario
) -> None:
    how = {"mode": scenario.modes[0], "dtype": scenario.dtypes[0], "graph": "compiled_autograd"}
    reports = run_on_ranks(scenario.ranks, train, scenario=scenario, **how)
    outcome = judge(scenario, reports)
    assert outcome.kind == scenario.becomes, outcome.words


@pytest.mark.parametrize("scenario", cases(_can_be_sharded))
def test_trains_as_eager_ddp_with_a_sharded_optimizer(
    run_on_ranks: RUN, scenario: Scenario
) -> None:
    """Gradients are those of the owners."""
    options = (*scenario.options, ("shard_optimizer", "overlap"))
    scenario = dataclasses.replace(scenario, options=options)
    how = {"mode": "concat", "dtype": scenario.dtypes[0]}
    reports = run_on_ranks(scenario.ranks, train, scenario=scenario, **how)
    outcome = judge(scenario, reports)
    assert outcome.kind == scenario.becomes, outcome.words
    for report in reports:
        assert report.unwaited == 0 or scenario.leaves_unwaited


def _assert_warned(report: RankReport, warns: tuple[str, ...]) -> None:
    """Assert that the warnings are exactly the expected ones, each given once."""
    assert all(any(words in text for text in report.warned) for words in warns), report.warned
    assert all(any(words in text for words in warns) for text in report.warned), report.warned
    assert len(set(report.warned)) == len(report.warned)
