"""Recording the steps of a training, and the report of the measurements."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jsonschema
import pytest
import report_schema
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fusion_passes
from fusion_passes.config import ReduceMode
from fusion_passes.reporting import recording
from fusion_passes.reporting.modules import backward_counts
from fusion_passes.reporting.timeline import RankSteps
from testing.processes import RUN
from tests.support.fake_world import fake_world, two_layers
from tests.support.launch import ROOT

SCHEMA = json.loads((ROOT / "docs" / "report.schema.json").read_text())


def _training() -> tuple[nn.Module, Callable[..., None]]:
    """A model with three buckets, and a step of its training."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(3)]
    model = nn.Sequential(nn.BatchNorm1d(32, affine=False), *layers)  # Has buffers.
    ddp = DistributedDataParallel(model, bucket_cap_mb=4100 / 2**20)
    call = torch.compile(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(*, keeps_gradients: bool = False) -> None:
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        call(torch.ones(4, 32) + dist.get_rank()).square().sum().backward()
        optimizer.step()

    return model, step


def record(mode: ReduceMode) -> dict[str, Any]:
    """Record steps, and return the result on this rank."""
    with inductor_config.patch(ddp_fusion=mode):
        model, step = _training()
        step()
        recording = fusion_passes.record_steps(2, plain_steps=2)
        for _ in range(7):
            step()
        text = fusion_passes.report().to_json()
        timeline = recording.timeline
        assert timeline is not None, recording.problem
        gradients = [float(p.grad.sum()) for p in model.parameters()]
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step(keeps_gradients=True)
        step()
        with mock.patch.object(torch.autograd.profiler, "record_function") as ranges:
            step()
        return {
            "report": json.loads(text),
            "scalars": fusion_passes.report().scalars(),
            "ranks": [item.rank for item in timeline.ranks],
            "errors": [item.clock_error_s for item in timeline.ranks],
            "starts": [item.start_s for item in timeline.ranks],
            "steps": [len(item.ends_s) for item in timeline.ranks],
            "profiled": {e.name for e in seen.events() if e.name.startswith("ddp_fusion")},
            "ranges": [call.args[0] for call in ranges.call_args_list],
            "gradients": gradients,
        }


@pytest.mark.parametrize("mode", ["concat", pytest.param("coalesced", marks=pytest.mark.nightly)])
def test_steps_of_all_ranks_are_recorded(run_on_ranks: RUN, mode: str) -> None:
    first, second = run_on_ranks(2, record, mode=mode)
    assert (first["ranks"], second["ranks"]) == ([0, 1], [1]), "rank 0 has all"
    assert first["steps"] == [2, 2]
    assert first["starts"][0] == 0.0
    assert 0 < first["errors"][1] < 1, "half of a question and its answer"
    assert first["gradients"] == second["gradients"]
    for found in (first, second):
        (module,) = found["report"]["modules"]
        name, buckets = module["name"], module["buckets"]
        assert (module["mode"], module["backend"], module["group_size"]) == (mode, "gloo", 2)
        assert (module["gradients"], module["stored"]) == (6, 6)
        assert module["steps"] >= 8
        assert [item["name"] for item in buckets] == [f"{name} bucket {n}" for n in range(3)]
        assert [item["copied"] for item in buckets] == [[]] * 3
        for item in buckets:
            times = item["times"]
            assert times["launched_s"] < times["started_s"] < times["ended_s"]
            assert times["ended_s"] < found["report"]["totals"]["steps"]["step_s"]
            sent_s = times["ended_s"] - times["started_s"]
            assert times["exposed_s"] >= 0
            # Both are differences of times, each rounded separately.
            assert times["exposed_s"] <= sent_s or math.isclose(times["exposed_s"], sent_s)
        assert found["profiled"] == {
            f"ddp_fusion: {name} bucket {n} {what}" for n in range(3) for what in ("launch", "wait")
        }
        assert not [range_ for range_ in found["ranges"] if "ddp_fusion" in range_]
        totals = found["report"]["totals"]
        assert (totals["gradients"], totals["launches"], totals["copied_gradients"]) == (6, 3, 0)
        assert totals["sent_bytes"] == totals["num_bytes"] == 3 * (32 * 32 + 32) * 4
        assert found["scalars"]["ddp_fusion/launches"] == 3
        assert 0 <= found["scalars"]["ddp_fusion/overlap"] <= 1
        jsonschema.validate(found["report"], SCHEMA)


def test_the_schema_that_is_documented_is_the_reports() -> None:
    remedy = "python tools/report_schema.py > docs/report.schema.json"
    assert report_schema.json_schema() == SCHEMA, remedy
    for item in (SCHEMA, *SCHEMA["$defs"].values()):
        assert all("description" in field for field in item["properties"].values())


def test_a_report_without_a_flag_says_that_nothing_was_done() -> None:
    found = fusion_passes.report()
    assert (found.flag, found.modules, found.graphs, found.backwards) == (None, (), (), ())
    assert found.advice == ""
    assert (found.timeline, found.totals.steps) == (None, None)
    jsonschema.validate(json.loads(found.to_json()), SCHEMA)


def test_modules_that_were_freed_are_reported_until_another_one_is_constructed() -> None:
    """A trainer frees its module before the script calls report()."""
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        both = [DistributedDataParallel(two_layers()) for _ in range(2)]
        for ddp in both:
            for _ in range(2):
                ddp(torch.ones(2, 4)).sum().backward()
        names = [item.name for item in fusion_passes.report().modules]
        both.pop(0)
        del ddp
        gc.collect()
        assert [item.name for item in fusion_passes.report().modules] == names[1:], "one is there"
        both.clear()
        gc.collect()
        gone = fusion_passes.report().modules
        assert [item.name for item in gone] == names
        assert [(item.steps, len(item.buckets)) for item in gone] == [(2, 1), (2, 1)]
        anew = DistributedDataParallel(two_layers())
        assert [item.steps for item in fusion_passes.report().modules] == [0]
        del anew


def test_times_are_known_when_the_process_group_is_destroyed() -> None:
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(two_layers())
        fusion_passes.record_steps(1, plain_steps=0)
        for _ in range(4):
            ddp(torch.ones(2, 4)).sum().backward()
    found = fusion_passes.report()
    assert found.rank is None
    assert found.totals.steps is not None
    del ddp


def test_a_profile_of_the_users_own_is_left_alone() -> None:
    with fake_world(), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(two_layers())
        call = torch.compile(ddp)
        recording = fusion_passes.record_steps(1, plain_steps=0, gather=False)
        with profile(activities=[ProfilerActivity.CPU]):
            for _ in range(3):
                call(torch.ones(2, 4)).sum().backward()
        assert recording.timeline is None
        assert "another torch profiler is running" in recording.problem
        assert backward_counts.after is None


def test_ranks_that_are_silent_keep_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not wait longer than its patience either, however many ranks are silent."""
    store = dist.HashStore()
    group = mock.Mock(size=lambda: 5, get_group_store=lambda: store)
    monkeypatch.setattr(dist, "group", mock.Mock(WORLD=group))
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(recording, "PATIENCE_SECONDS", 3.0)
    mine = [RankSteps(rank, "", float(rank), 0.0, (1.0,), ()) for rank in (0, 3)]
    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        (ranks, missing), *_ = threads.map(recording._gather, mine)
    assert time.monotonic() - begin < 2 * 3.0
    assert ([item.rank for item in ranks], missing) == ([0, 3], (1, 2, 4))


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"plain_steps": -1}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be an integer.*but is {value}"):
        fusion_passes.record_steps(**wrong)
    assert backward_counts.after is None


def test_a_recording_that_is_on_its_way_goes_on() -> None:
    """The command, for example, runs a script that records itself."""
    begun = fusion_passes.record_steps(1)
    after = backward_counts.after
    assert fusion_passes.record_steps(2) is begun
    assert backward_counts.after == after
    begun.abandon()
    assert fusion_passes.record_steps(1) is not begun
