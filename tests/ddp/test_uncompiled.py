"""Traced backwards that torch cannot compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

from fusion_passes import FusionConfig
from fusion_passes.ddp.uncompiled import Uncompiled


def _two_steps(before: Callable[[], object]) -> fx.GraphModule:
    """A graph that calls a function and doubles its input."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(before)
    graph.output(graph.call_function(torch.mul, (x, 2)))
    return fx.GraphModule({}, graph)


def _raise() -> None:
    raise InternalTorchDynamoError("a node cannot be traced")


def _compiled_with(result: Callable[[fx.GraphModule], Callable[[Tensor], Any]]) -> Any:
    """What a compiler makes of a backward, and what is known of it."""
    uncompiled, calls = Uncompiled(), []
    run = uncompiled.or_as_it_is(result)(_two_steps(lambda: calls.append("run")))
    return uncompiled, calls, run


def test_runs_as_it_is_and_is_not_compiled_again() -> None:
    compiles = []

    def fails(_: Tensor) -> None:
        compiles.append(1)
        _raise()

    uncompiled, calls, run = _compiled_with(lambda _: fails)
    for count in (1, 2):
        uncompiled.why = ""
        assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
        assert uncompiled.why == "InternalTorchDynamoError: a node cannot be traced"
        assert (len(compiles), len(calls)) == (1, count)


def test_a_compiler_that_fails_is_told() -> None:
    def fails(_: Tensor) -> None:
        raise BackendCompilerFailed(fails, OSError("no g++"), None)

    uncompiled, calls, run = _compiled_with(lambda _: fails)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 2.0))
    assert "no g++" in uncompiled.why
    assert calls == ["run"]


def test_an_error_of_a_pass_stays_one() -> None:
    """Whether it refuses something or is wrong: it must not be taken for torch's."""

    def fails(_: Tensor) -> None:
        try:
            FusionConfig(mode="no mode")  # type: ignore[arg-type]
        except ValueError as error:
            failed = BackendCompilerFailed(fails, error, None)
            raise failed.with_traceback(error.__traceback__) from None

    _, calls, run = _compiled_with(lambda _: fails)
    with pytest.raises(BackendCompilerFailed):
        run(torch.ones(2))
    assert calls == []


def test_what_is_compiled_is_left_alone() -> None:
    uncompiled, calls, run = _compiled_with(lambda _: lambda x: x + 5)
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 6.0))
    assert (uncompiled.why, calls) == ("", [])


def test_an_error_of_somebody_else_stays_one() -> None:
    def fails(_: Tensor) -> None:
        raise ValueError("a hook of yours")

    _, calls, run = _compiled_with(lambda _: fails)
    with pytest.raises(ValueError, match="a hook of yours"):
        run(torch.ones(2))
    assert calls == []


def test_what_has_run_in_part_is_not_run_again() -> None:
    """Gradients that it has added would be added twice."""
    uncompiled = Uncompiled()
    run = uncompiled.or_as_it_is(lambda traced: traced.forward)(_two_steps(_raise))
    with pytest.raises(InternalTorchDynamoError):
        run(torch.ones(2))
    assert uncompiled.why == ""
