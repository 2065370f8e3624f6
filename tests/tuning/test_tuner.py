"""``ddp_fusion = "auto"``: the first steps compare layouts, beside eager DDP, and the next run
starts with the layout that was kept."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.reducer import Reducer, reducer_of
from fusion_passes.stored.pieces import plan_pieces
from fusion_passes.torch_private import process_groups
from fusion_passes.tuning import tuner
from fusion_passes.tuning.choice import AFTER_LAP, MOST_STEPS, TURN, Contest
from fusion_passes.tuning.tuner import WARM_UP, LayoutTuner
from testing import models
from testing.processes import RUN
from testing.scenarios.loop import train
from testing.scenarios.run import Run
from tests.support.beside_eager import beside_eager
from tests.support.fake_world import fake_world, one_rank

LAYERS = 6
CAP_MB = 600 / 2**20
"""Two layers and more: in the default layout 3 buckets, with halved caps 4."""

STEPS = WARM_UP + MOST_STEPS + 2
"""After which the layout is chosen."""


def buckets_of(reducer: Reducer) -> list[tuple[int, ...]]:
    return [bucket.numbers for bucket in reducer.assignment.layout.buckets]


@contextlib.contextmanager
def files_in(directory: Path) -> Iterator[None]:
    with mock.patch.dict(os.environ, {tuner.DIRECTORY_VARIABLE: str(directory)}):
        yield


@contextlib.contextmanager
def steps_take(best: int, slowest: int = 0) -> Iterator[None]:
    """Steps of rank ``slowest`` take a second, and with ``best`` buckets a tenth less; on other
    ranks they take no time."""
    now = 0.0

    def clock(_: LayoutTuner) -> float:
        nonlocal now
        (reducer,) = (reducer for reducer in reducers.alive() if reducer.tuner is not None)
        if dist.get_rank() == slowest:
            now += 0.9 if len(reducer.assignment.layout.buckets) == best else 1
        return now

    with mock.patch.object(LayoutTuner, "_now", clock):
        yield


# --- On ranks, beside eager DDP ------------------------------------------------------------------


@dataclass
class Start:
    """The result of a run on one rank.

    Attributes:
        fixed: the buckets when the module is constructed; empty without a layout.
        buckets: the buckets in each step.
        stored: how many gradients compiled backwards stored in their buckets, by step.
        decision: what the report says at the end.
        is_over: whether nothing is compared at the end.
        files: names of this rank's files.
    """

    fixed: list[tuple[int, ...]] = field(default_factory=list)
    buckets: list[list[tuple[int, ...]]] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    decision: tuple[str, ...] = ()
    is_over: bool = False
    files: list[str] = field(default_factory=list)


def start(directory: Path, best: int, **how: Any) -> Start:
    """A job for every rank; each has files of its own."""
    flag = FusionConfig(mode="auto", bucket_cap_mb=CAP_MB, first_bucket_cap_mb=CAP_MB)
    folder = directory / str(dist.get_rank())
    with files_in(folder), steps_take(best, slowest=1):
        begun = beside_eager(trained, flag, **how)
    begun.files = sorted(path.name for path in folder.glob("*"))
    return begun


def trained(run: Run, steps: int, model: str = "", **loop: Any) -> Start:
    ddp = run.ddp(getattr(models, model)() if model else run.mlp(LAYERS))
    begun = Start()
    if run.is_fused and reducer_of(ddp).assignment.is_fixed:
        begun.fixed = buckets_of(reducer_of(ddp))

    def note(_: nn.Module, __: bool) -> None:
        if run.is_fused and reducer_of(ddp).steps > len(begun.stored):
            begun.buckets.append(buckets_of(reducer_of(ddp)))
            begun.stored.append(reducer_of(ddp).record.num_stored)

    train(run, ddp, steps=steps, before_note=note, moves=False, **loop)
    if run.is_fused:
        begun.decision = reducer_of(ddp).record.decision
        begun.is_over = reducer_of(ddp).tuner is None
    return begun


@pytest.fixture(scope="module")
def first(run_on_ranks: RUN, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Start]]:
    """A first run, in which halved caps are the fastest."""
    directory = tmp_path_factory.mktemp("first")
    return directory, run_on_ranks(2, start, directory=directory, best=4, steps=STEPS, zero="kept")


def test_the_first_run_compares_layouts_and_keeps_the_fastest(
    first: tuple[Path, list[Start]],
) -> None:
    directory, ranks = first
    for rank in ranks:
        assert rank.is_over
        assert rank.decision[0].startswith("caps x 0.5 is kept: steps take 0.900, 0.900, 0.900")
        assert "default: 1000.0 ms a step, 3 buckets" in rank.decision
        assert "caps x 0.5: 900.0 ms a step, 4 buckets" in rank.decision
        # All ranks change between the same steps; graphs store into each layout.
        assert rank.buckets == ranks[0].buckets
        assert {len(buckets) for buckets in rank.buckets} == {3, 4, 5}
        assert rank.stored == [0, *[2 * LAYERS] * (STEPS - 1)]
    # Rank 0 has the file.
    assert [len(rank.files) for rank in ranks] == [1, 0]
    assert json.loads((directory / "0" / ranks[0].files[0]).read_text())["buckets"]


def test_the_next_run_starts_with_it(run_on_ranks: RUN, first: tuple[Path, list[Start]]) -> None:
    directory, before = first
    ranks = run_on_ranks(2, start, directory=directory, best=0, steps=3)
    for rank in ranks:
        assert [*map(sorted, rank.fixed)] == [*map(sorted, before[0].buckets[-1])]
        assert rank.buckets == [rank.fixed] * 3
        assert rank.stored == [2 * LAYERS] * 3, "graphs are compiled for it"
        assert rank.is_over
        (sentence,) = rank.decision
        assert sentence == (
            f"buckets are those that an earlier run has kept ({before[0].files[0]} of rank 0)"
        )


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param({"model": "TwoDtypes", "micro_batches": 2, "no_sync": True}, id="two-dtypes"),
        pytest.param({"sizes": (4, 6, 5)}, id="compiled-again", marks=pytest.mark.nightly),
        pytest.param({"model": "Tied", "zero": "never"}, id="tied", marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_right_in_every_layout(
    run_on_ranks: RUN, tmp_path: Path, loop: dict[str, Any]
) -> None:
    ranks = run_on_ranks(2, start, directory=tmp_path, best=0, steps=STEPS, **loop)
    for rank in ranks:
        assert rank.is_over
        assert rank.buckets == ranks[0].buckets
        assert len({str(buckets) for buckets in rank.buckets}) > 2
        assert "is kept" in rank.decision[0]


# --- In one process ------------------------------------------------------------------------------


@contextlib.contextmanager
def training(
    directory: Path, model: nn.Module | None = None, flag: Any = "auto", **options: Any
) -> Iterator[tuple[DistributedDataParallel, Callable[..., None]]]:
    """A module, and its steps."""
    options = {"bucket_cap_mb": CAP_MB} | options
    with files_in(directory), inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(model or models.mlp(LAYERS), **options)

        def steps(count: int = 1) -> None:
            for _ in range(count):
                ddp.zero_grad()
                outputs = ddp(torch.ones(2, models.WIDTH))
                for output in outputs if isinstance(outputs, tuple) else [outputs]:
                    output.sum().backward()

        yield ddp, steps


class TwoOutputs(nn.Module):
    """Two backwards complete its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = models.mlp(LAYERS // 2), models.mlp(LAYERS // 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("make", [lambda: models.mlp(LAYERS), TwoOutputs])
def test_backwards_that_end_no_step_do_not_count(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    with fake_world(), steps_take(4), training(tmp_path, make()) as (ddp, steps):
        seen = []
        for _ in range(STEPS):
            with ddp.no_sync():
                steps(2)
            steps()
            seen.append(len(reducer_of(ddp).assignment.layout.buckets))
        before = WARM_UP + TURN - 1
        assert seen[:before] == [seen[0]] * before, "warmed up, and the default's turn"
        assert seen[before:][:TURN] == [seen[before]] * TURN
        assert seen[before] > seen[0]
        assert "is kept" in reducer_of(ddp).record.decision[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("{", "Expecting property name", id="damaged"),
        pytest.param("[]", "list indices must be", id="of something else"),
        pytest.param({"format": 0}, "another format", id="another format"),
        pytest.param({"buckets": [[99]]}, "or module", id="other parameters"),
        pytest.param('{"format": 1}', "'buckets'", id="without buckets"),
    ],
)
def test_a_file_that_does_not_fit_is_warned_of_and_layouts_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | dict[str, Any], why: str
) -> None:
    with fake_world(), steps_take(0), training(tmp_path) as (_, steps):
        steps(STEPS)
    (path,) = tmp_path.glob("*.layout.json")
    with fake_world(), training(tmp_path) as (ddp, _):
        assert reducer_of(ddp).assignment.is_fixed
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | text) if isinstance(text, dict) else text)
    with fake_world(), training(tmp_path) as (ddp, _):
        assert not reducer_of(ddp).assignment.is_fixed
        assert reducer_of(ddp).tuner is not None
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert f"{path} is not used, and layouts are compared: " in warning.getMessage()
    assert why in warning.getMessage()


def test_a_directory_that_cannot_be_written_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    with fake_world(), steps_take(4), training(taken) as (ddp, steps):
        steps(STEPS)
        assert reducer_of(ddp).record.decision[0].startswith("caps x 0.5 is kept")
    (warning,) = caplog.records
    assert f"{taken}/" in warning.getMessage()
    assert f"Set {tuner.DIRECTORY_VARIABLE} to" in warning.getMessage()


def test_another_module_cap_or_number_of_ranks_has_a_file_of_its_own(tmp_path: Path) -> None:
    variants: list[tuple[int, dict[str, Any]]] = [
        (2, {}),
        (3, {}),
        (2, {"model": models.mlp(LAYERS, outputs=3)}),
        (2, {"bucket_cap_mb": 2 * CAP_MB}),
        (2, {"flag": FusionConfig(mode="auto", reduce_dtype="bf16")}),
    ]
    for number, (ranks, options) in enumerate(variants):
        with fake_world(ranks), steps_take(0), training(tmp_path, **options) as (ddp, steps):
            assert not reducer_of(ddp).assignment.is_fixed
            steps(STEPS)
        assert len(list(tmp_path.glob("*"))) == number + 1


def test_a_graph_that_is_compiled_meanwhile_stores_pieces(tmp_path: Path) -> None:
    stored: list[int] = []

    def noting(*args: Any) -> Any:
        pieces = plan_pieces(*args)
        stored.append(len(pieces))
        return pieces

    with (
        fake_world(),
        steps_take(4),
        training(tmp_path) as (ddp, steps),
        mock.patch("fusion_passes.stored.store.plan_pieces", noting),
    ):
        compiled = torch.compile(ddp, dynamic=False)

        def compiled_step(rows: int) -> int:
            compiled(torch.ones(rows, models.WIDTH)).sum().backward()
            return reducer_of(ddp).record.num_stored

        compiled_step(2)
        assert compiled_step(3) == 2 * LAYERS
        steps(WARM_UP + TURN)
        assert len(reducer_of(ddp).assignment.layout.buckets) == 5
        assert compiled_step(2) == compiled_step(4) == 2 * LAYERS
        pieces, *others = stored
        assert pieces > 5
        assert others == [pieces] * 2
        steps(STEPS)
        assert compiled_step(2) == compiled_step(5) == 2 * LAYERS
        assert stored[-1] == len(reducer_of(ddp).assignment.layout.buckets) == 4, (
            "of the chosen layout"
        )


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("before", [0, WARM_UP + TURN + 1])
def test_a_hook_ends_the_comparison(tmp_path: Path, is_known: bool, before: int) -> None:
    with fake_world(), steps_take(4), training(tmp_path) as (ddp, steps):
        steps(before)
        ddp.register_comm_hook(None, bf16_compress_hook if is_known else noop_hook)
        steps(2)
        reducer = reducer_of(ddp)
        if is_known and not before:
            assert reducer.tuner is not None, "all steps are sent alike"
            return
        assert reducer.tuner is None
        assert reducer.record.decision == (
            "buckets are filled up to caps: a communication hook has been registered",
        )
        assert len(reducer.assignment.layout.buckets) == 3
        steps(STEPS)
        assert len(reducer.assignment.layout.buckets) == 3
    assert not list(tmp_path.glob("*"))


def test_one_module_is_compared_at_a_time(tmp_path: Path) -> None:
    with fake_world(), training(tmp_path) as (ddp, steps), training(tmp_path) as (other, _):
        (sentence,) = reducer_of(other).record.decision
        assert "this run compares those of another module" in sentence
        assert reducer_of(other).tuner is None
        with steps_take(4):
            steps(STEPS)
        assert reducer_of(ddp).tuner is None
        third = DistributedDataParallel(models.mlp(2), bucket_cap_mb=CAP_MB)
        assert reducer_of(third).tuner is not None


def test_where_there_is_nothing_to_compare_the_report_says_why(tmp_path: Path) -> None:
    traced = FusionConfig(mode="auto", backward_graph="compiled_autograd")
    with fake_world(), training(tmp_path, flag=traced) as (ddp, _):
        (module,) = fusion_passes.report().modules
        assert module.decision == (
            "buckets are filled up to caps: compiled autograd has one layout",
        )
        assert reducer_of(ddp).tuner is None
    with one_rank(), training(tmp_path) as (ddp, _):
        assert "nothing is sent on one rank" in reducer_of(ddp).record.decision[0]
    with fake_world(), training(tmp_path, nn.Linear(8, 8, bias=False)) as (ddp, steps):
        steps(WARM_UP)
        assert reducer_of(ddp).record.decision == (
            "the default is kept: no other layout is faster beyond the spread",
        )
        assert reducer_of(ddp).tuner is None


def test_another_process_group_ends_the_comparison(tmp_path: Path) -> None:
    with fake_world(), training(tmp_path) as (ddp, steps):
        steps(2)
        ddp._update_process_group(dist.new_group([0, 1]))
        steps(2)
        assert reducer_of(ddp).tuner is None
        assert len(reducer_of(ddp).assignment.layout.buckets) == 3


def test_steps_are_recorded_after_the_comparison(tmp_path: Path) -> None:
    with fake_world(), steps_take(4), training(tmp_path) as (ddp, steps):
        recording = fusion_passes.record_steps(1, plain_steps=1, gather=False)
        while reducer_of(ddp).tuner is not None:
            steps()
            assert recording._profiler is None
        steps(6)
        assert recording.timeline is not None
        assert len(recording.timeline.buckets) == 4


# --- On an accelerator ---------------------------------------------------------------------------


class Event:
    """In the place of an event: the device is a step behind the host. ``step`` is the host's."""

    step = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert (device.index, enable_timing) == (1, True)
        self.at = -1

    def record(self, stream: torch.device) -> None:
        assert stream.index == 1, "of the module's device, whatever the current one is"
        self.at = Event.step

    def synchronize(self) -> None:
        assert 0 <= self.at < Event.step, "the device has a step to do meanwhile"

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.at - self.at)


class Times:
    """In the place of a tensor on the device."""

    def __init__(self, values: Any, *, pin_memory: bool, **_: Any) -> None:
        assert pin_memory, "a copy that the host does not wait for"
        self.values = values

    def to(self, _: object, *, non_blocking: bool) -> Times:
        assert non_blocking
        return self

    def tolist(self) -> Any:
        return self.values


def test_an_accelerator_is_asked_by_events_and_never_waited_for_while_it_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "tensor", Times)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: device)
    reduce = mock.Mock(return_value=lambda: None)
    monkeypatch.setattr(process_groups, "begin_all_reduce", reduce)
    compared = LayoutTuner(torch.device("cuda", 1), tmp_path)
    compared._contest = Contest(3)
    for _ in compared._all_turns(None):
        Event.step += 1
    laps = compared._contest.laps
    assert laps == [dict.fromkeys(lap, 1.0) for lap in laps], "a step takes a second"
    assert reduce.call_count == len(laps) == 2
    assert Event.step == WARM_UP - 1 + 2 * (3 * TURN + AFTER_LAP)
