"""``ddp_fusion = "auto"`` with a reducer: the first start measures, the next one plans from that.
Each job on ranks is a start; each rank has files of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.tuning import files, measure, ready_clock
from fusion_passes.tuning.ready_clock import MEASURED_ROUNDS, SKIPPED_ROUNDS, ReadyClock
from fusion_passes.tuning.records import ReadyTimes
from fusion_passes.tuning.tables import CostTable
from testing import models
from testing.scenarios.both_ways import noted_warnings
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run
from tests.support.beside_eager import beside_eager

RUN = Callable[..., list[Any]]

COSTS = CostTable((1, 2**20), (1000, 2**30))
"""About a microsecond for a byte."""
LAYERS = 5
ROUNDS = SKIPPED_ROUNDS + MEASURED_ROUNDS


@dataclass
class Start:
    """What came of a start on a rank.

    Attributes:
        planned: the buckets when the module is constructed; empty without a layout.
        predicted: when each is expected to be sent.
        stored: how many gradients compiled backwards have stored in their buckets, by step.
        missing: how many gradients were missing at each launch, by step.
        decision: what was said.
        clock: whether ready times are still measured at the end.
        measured: how often costs were measured.
        kept: names of this rank's files.
    """

    planned: list[tuple[int, ...]] = field(default_factory=list)
    predicted: dict[int, tuple[int, int]] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)
    missing: list[list[int]] = field(default_factory=list)
    decision: tuple[str, ...] = ()
    clock: bool = False
    measured: int = 0
    kept: list[str] = field(default_factory=list)


@contextlib.contextmanager
def files_in(directory: Path) -> Iterator[list[torch.dtype]]:
    """A folder for this rank's files, and costs that are given; counts what is measured."""
    calls: list[torch.dtype] = []
    original = measure._table
    folder = str(directory / str(dist.get_rank()))

    def quick(ranks, dtype, operation, seconds):
        calls.append(dtype)
        original(ranks, dtype, operation, seconds / 50)
        return COSTS

    with (
        mock.patch.dict(os.environ, {files.DIRECTORY_VARIABLE: folder}),
        mock.patch.object(measure, "_table", quick),
    ):
        yield calls


def start(directory: Path, count: int = 2, versions: tuple[str, ...] = (), **options: Any) -> Start:
    """Construct a module, and train it beside eager DDP; ``versions`` are torch's, by rank."""
    flag = FusionConfig(mode="auto", **options)
    with files_in(directory) as calls:
        begun = beside_eager(train, flag, count=count, versions=versions)
        begun.measured = len(calls)
        folder = Path(os.environ[files.DIRECTORY_VARIABLE])
        begun.kept = sorted(path.name for path in folder.glob("*"))
        return begun


def train(run: Run, count: int, versions: tuple[str, ...]) -> Start:
    version = versions[dist.get_rank()] if versions else torch.__version__
    with mock.patch.object(torch, "__version__", version):
        ddp, forward = run.compiled(run.mlp(LAYERS))
    if not run.is_fused:
        backwards(run, ddp, forward, count)
        return Start()
    reducer = reducer_of(ddp)
    planned = (
        [b.numbers for b in reducer.assignment.layout.buckets]
        if reducer.assignment.is_fixed
        else []
    )
    begun = Start(planned, dict(reducer.record.predicted))
    communication: Any = reducer.queue.communication
    launch = communication.launch

    def noting(*args: Any) -> Any:
        begun.missing[-1].append(sum(reducer.queue._pending))
        return launch(*args)

    communication.launch = noting
    for step in range(count):
        begun.missing.append([])
        backwards(run, ddp, forward, 1, first=step)
        assert not planned or run.launches[-1].number == len(planned), "no broadcast of a layout"
        begun.stored.append(reducer.record.num_stored)
    begun.decision, begun.clock = reducer.record.decision, reducer.clock is not None
    return begun


def ready_file(directory: Path, rank: int) -> Path:
    (path,) = (directory / str(rank)).glob("*.ready.json")
    return path


def said(ranks: list[Start], words: str) -> bool:
    return all(any(words in line for line in rank.decision) for rank in ranks)


@pytest.fixture(scope="module")
def first(run_on_ranks: RUN, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Start]]:
    """What a start that measures leaves."""
    directory = tmp_path_factory.mktemp("first")
    cap_mb = 600 / 2**20  # Two layers and more.
    options = {"bucket_cap_mb": cap_mb, "first_bucket_cap_mb": cap_mb}
    return directory, run_on_ranks(2, start, directory=directory, count=ROUNDS + 1, **options)


@pytest.fixture
def kept(first: tuple[Path, list[Start]], tmp_path: Path) -> Path:
    """Files of that start, which a test may change."""
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_first_start_fills_caps_and_measures(first: tuple[Path, list[Start]]) -> None:
    directory, ranks = first
    assert said(ranks, "first run: no ready times are kept of this module here")
    assert said(ranks, f"ready times were measured in {MEASURED_ROUNDS} steps; rank 0 keeps them")
    assert said(ranks, f"the next run plans from {ready_file(directory, 0)} of rank 0")
    for rank in ranks:
        assert (rank.planned, rank.predicted, rank.measured) == ([], {}, 1)
        assert not rank.clock
    # Rank 0 keeps them.
    assert [len(rank.kept) for rank in ranks] == [2, 0]
    times = ReadyTimes.from_json(ready_file(directory, 0).read_text())
    assert times.rounds == MEASURED_ROUNDS
    assert sorted(times.numbers) == list(range(2 * LAYERS))
    # A backward computes the last layers first; biases are summed by kernels that are shared.
    weights = [number for number in times.numbers if number % 2 == 0]
    assert weights == sorted(weights, reverse=True)


def test_the_next_start_plans_from_what_rank_0_has(run_on_ranks: RUN, kept: Path) -> None:
    # What rank 0 has counts, whatever the other has: one second for each gradient, in an order
    # that no backward has.
    order = (3, 2, 1, 0, 9, 8, 7, 6, 5, 4)
    second_ns = 10**9
    given = ReadyTimes(5, order, tuple(second_ns * k for k in range(1, 11)), "today")
    ready_file(kept, 0).write_text(given.to_json())
    (kept / "1").mkdir()
    other = replace(given, numbers=order[::-1])
    (kept / "1" / ready_file(kept, 0).name).write_text(other.to_json())
    second = run_on_ranks(2, start, directory=kept)
    assert said(second, f"times of 5 steps, measured today ({ready_file(kept, 0)} of rank 0)")
    assert said(second, "in buckets filled up to caps")
    for rank in second:
        assert rank.measured == 0
        assert rank.planned == second[0].planned
        # The last bucket begins with the last gradient, and has that one alone.
        assert rank.planned[-1] == (4,)
        assert {n for bucket in rank.planned for n in bucket} == set(order)
        assert [min(map(order.index, bucket)) for bucket in rank.planned] == sorted(
            min(map(order.index, bucket)) for bucket in rank.planned
        )
        assert rank.predicted.keys() == set(range(len(rank.planned)))
        assert rank.predicted[len(rank.planned) - 1][0] == 10 * second_ns
        # Graphs are cut as it is from the first step on.
        assert rank.stored == [2 * LAYERS] * 2
        assert not rank.clock


def test_damaged_files_are_measured_anew_and_that_is_said(run_on_ranks: RUN, kept: Path) -> None:
    for path in (kept / "0").glob("*"):
        path.write_text("{}")
    again = run_on_ranks(2, start, directory=kept)
    assert said(again, f"{ready_file(kept, 0)} cannot be used, and is measured anew")
    assert said(again, "first run")
    for rank in again:
        assert (rank.planned, rank.measured, rank.clock) == ([], 1, True)


def test_a_users_cap_bounds_the_buckets(run_on_ranks: RUN, kept: Path) -> None:
    sizes = [parameter.nbytes for parameter in models.mlp(LAYERS).parameters()]
    cap = 1.5 * max(sizes)
    options = {"bucket_cap_mb": cap / 2**20, "first_bucket_cap_mb": cap / 2**20}
    capped = run_on_ranks(2, start, directory=kept, **options)
    for rank in capped:
        assert max(sum(sizes[n] for n in bucket) for bucket in rank.planned) <= cap


def test_ranks_with_other_versions_have_a_profile_of_their_own(
    run_on_ranks: RUN, kept: Path
) -> None:
    versions = "2.90.0", "2.91.0"
    first = run_on_ranks(2, start, directory=kept, count=ROUNDS, versions=versions)
    assert said(first, "first run")
    again = run_on_ranks(2, start, directory=kept, versions=versions)
    assert all(rank.planned for rank in again)


def test_nothing_is_sent_while_ready_times_are_measured(first: tuple[Path, list[Start]]) -> None:
    directory, ranks = first
    for rank in ranks:
        assert len(rank.missing[1]) > 1
        waits = [not any(step) for step in rank.missing]
        assert waits == [SKIPPED_ROUNDS <= number < ROUNDS for number in range(ROUNDS + 1)]
        # Graphs tell more times than there are buckets.
        times = ReadyTimes.from_json(ready_file(directory, 0).read_text())
        assert len(set(times.ready_ns)) >= LAYERS > len(rank.missing[1])


def joined(directory: Path) -> tuple[tuple[str, ...], bool]:
    """Rank 1 has no inputs any more while times are measured."""
    run = Run(True, torch.float32, torch.device("cpu"))
    with files_in(directory), inductor_config.patch(ddp_fusion="auto"):
        ddp, forward = run.compiled(run.mlp(2))
        with ddp.join():
            backwards(run, ddp, forward, ROUNDS + 1 if dist.get_rank() == 0 else 2)
        return reducer_of(ddp).record.decision, reducer_of(ddp).clock is None


def test_ranks_without_inputs_take_part(run_on_ranks: RUN, tmp_path: Path) -> None:
    for decision, has_ended in run_on_ranks(2, joined, directory=tmp_path):
        assert has_ended
        assert "ready times were measured" in decision[-1]
    assert ready_file(tmp_path, 0).exists()


def test_of_the_rounds_the_one_in_the_middle_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready_clock, "begin_all_reduce", lambda *_: lambda: None)
    now = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now)
    measured: list[dict[int, int]] = []
    clock = ReadyClock(None, torch.device("cpu"), [0, 1, 2, 3], lambda t: measured.append(dict(t)))
    ends = []
    for number in range(ROUNDS):
        clock.begin_round()
        begin = now
        for numbers, at in (((2,), 10 + 100 * (number == SKIPPED_ROUNDS)), ((1, 0), 30 + number)):
            now = begin + at
            clock.note_ready(numbers)
        ends.append(clock.end_round())
        now = begin + 1000
    assert ends == [False] * (ROUNDS - 1) + [True]
    # Nobody has seen the gradient of 3.
    assert measured == [{2: 10, 1: 30 + SKIPPED_ROUNDS + 2, 0: 30 + SKIPPED_ROUNDS + 2}]
    assert list(measured[0]) == [2, 1, 0]


class Event:
    """In the place of ``torch.cuda.Event``: the GPU is so many ms behind the host."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self, stream: torch.device) -> None:
        assert stream.index == 1, "of the module's device, whatever the current one is"
        self.at_ms = Event.now_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_a_gpu_is_asked_by_events_which_are_read_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph that is captured is no round: what it does is done later, and more than once."""
    captured = False
    waited: list[Any] = []
    make = torch.tensor
    monkeypatch.setattr(ready_clock, "begin_all_reduce", lambda *_: lambda: None)
    monkeypatch.setattr(torch, "tensor", lambda values, *, dtype, device: make(values, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    measured: list[dict[int, int]] = []
    gpu = torch.device("cuda", 1)
    clock = ReadyClock(None, gpu, [0, 1], lambda times: measured.append(dict(times)))
    ended = False
    for number in range(2 * ROUNDS):
        captured = number % 2 == 0
        assert not ended
        assert not waited
        begin = Event.now_ms
        clock.begin_round()
        for parameter in (1, 0):
            Event.now_ms = begin + 2 - parameter
            clock.note_ready((parameter,))
        ended = clock.end_round()
    assert ended
    assert waited == [gpu]
    assert measured == [{1: 1_000_000, 0: 2_000_000}]


def test_one_rank_fills_caps_and_says_so(run_on_ranks: RUN, tmp_path: Path) -> None:
    (alone,) = run_on_ranks(1, start, directory=tmp_path)
    assert said([alone], "nothing is sent in buckets")
    assert (alone.kept, alone.measured, alone.clock) == ([], 0, False)


def two_dtypes(directory: Path) -> tuple[tuple[str, ...], list[str], int]:
    flag = inductor_config.patch(ddp_fusion="auto")
    with files_in(directory) as calls, flag, noted_warnings() as warned:
        ddp = DistributedDataParallel(models.TwoDtypes())
        return reducer_of(ddp).record.decision, warned, len(calls)


def test_several_dtypes_fill_caps_and_that_is_warned_of(run_on_ranks: RUN, tmp_path: Path) -> None:
    for decision, warned, measured in run_on_ranks(2, two_dtypes, directory=tmp_path):
        assert "several dtypes or devices, or delayed ones: buckets are" in decision[0]
        assert len(warned) == 1
        assert "fills the buckets of DDP 0 (TwoDtypes) up to caps" in warned[0]
        assert measured == 0
