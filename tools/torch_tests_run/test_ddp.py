"""Runs torch's tests, each under the flag and without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import get_args

import pytest

from torch_tests_run.known import Models, Outcome, judge, read_known
from torch_tests_run.running import prepare, run_one
from torch_tests_run.source import TorchTest, ddp_tests, source_path


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    prepare()


@functools.cache
def _without_flag(test: TorchTest, models: Models) -> Outcome:
    return run_one(test, models)


@pytest.mark.timeout(0)  # A run has a time limit of its own.
@pytest.mark.parametrize("mode", ["concat", "coalesced"])
@pytest.mark.parametrize("models", get_args(Models))
@pytest.mark.parametrize(
    "test",
    [
        pytest.param(test, id=test.name, marks=pytest.mark.xdist_group(test.name))
        for test in ddp_tests(source_path().read_text())
    ],
)
def test_passes_as_without_the_flag(
    test: TorchTest, models: Models, mode: str, record_property: Callable[[str, object], None]
) -> None:
    """The test passes under the flag too, or differs as listed."""
    reference = _without_flag(test, models)
    outcome = run_one(test, models, mode) if reference.kind == "passed" else reference
    record_property("test", test.name)
    record_property("models", models)
    record_property("averaged", outcome.averaged)
    known = [entry for entry in read_known() if entry.concerns(test.name, models)]
    judge(reference, outcome, known)
