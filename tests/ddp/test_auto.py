"""``ddp_fusion = "auto"`` on real processes: gradients, profiles, and ranks that differ or fail."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionWarning
from fusion_passes.ddp import watched
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.replanning import AT
from fusion_passes.plan.planner import NO_PROFILE
from fusion_passes.profile import agree, files, measure
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.profile.tables import CostTable, Taken
from fusion_passes.state import process_state
from fusion_passes.torch_private.stand_ins import PreparingGroup, called_by
from testing.fake_world import fake_world, two_layers
from testing.processes import RankError

RUN = Callable[..., list[Any]]

COSTS = CostTable((1024, 2**20), (100_000, 200_000))


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def _inputs() -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


@contextlib.contextmanager
def _profiles(costs: CostTable = COSTS):
    """Profiles of this rank alone, and quick measurements; what was measured is counted. What
    decides are costs that are given: those of a busy machine can make any bucket the best."""
    calls: list[int] = []
    original, before = measure.measure, os.environ.get(files.DIRECTORY_VARIABLE)
    root = Path(tempfile.mkdtemp())
    directory = root / "profiles"
    directory.mkdir()
    os.environ[files.DIRECTORY_VARIABLE] = str(directory)

    def quick(ranks, place, kinds, _):
        calls.append(len(kinds))
        profile = original(ranks, place, kinds, 0.05)
        tables = tuple((kind, costs) for kind, _ in profile.tables)
        return replace(profile, tables=tables, rates=replace(profile.rates, taken=Taken()))

    try:
        with mock.patch.object(agree, "measure", quick):
            yield directory, calls
    finally:
        os.environ.pop(files.DIRECTORY_VARIABLE)
        if before is not None:
            os.environ[files.DIRECTORY_VARIABLE] = before
        shutil.rmtree(root)


def _train(
    flag: object, steps: int = 2, after: Callable[[str], object] | None = None, **options: Any
) -> list[Tensor]:
    """Gradients after each of some steps, by default two, added up: each second step adds to what
    the one before has left. After each, ``after`` is given the class of what the module's name
    stands for."""
    with inductor_config.patch(ddp_fusion=flag):
        ddp = DistributedDataParallel(_chain(), **options)
        step = ddp if flag is None else torch.compile(ddp)
        totals = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
        for number in range(steps):
            if number % 2 == 0:
                ddp.zero_grad()
            step(_inputs()).square().sum().backward()
            for total, parameter in zip(totals, ddp.parameters(), strict=True):
                assert parameter.grad is not None
                total.add_(parameter.grad)
            if after is not None:
                after(_group_of(ddp))
    return totals


def _group_of(ddp: DistributedDataParallel) -> str:
    name = registry.module_of(ddp).group_name
    return type(called_by(name)).__name__


def _start_again(directory: Path) -> None:
    """As new processes would: compiled graphs and profiles are on disk only, and modules are
    numbered from zero, since the process group is another."""
    gc.collect()
    torch._dynamo.reset()
    process_state.reset()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = [f"{tempfile.mkdtemp(dir=directory.parent)}/store"]
    dist.broadcast_object_list(path)
    dist.destroy_process_group()
    store = dist.FileStore(path[0], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def trained() -> dict[str, Any]:
    """A cold start, a warm one, one with a rank that has lost its files, and one with a cap."""
    said: dict[str, Any] = {"eager": _train(None)}
    with _profiles() as (directory, calls), fresh_cache():
        said["cold"] = _train("auto")
        said["measured"] = len(calls)
        said["report"] = fusion_passes.format_report(fusion_passes.reports()[0])
        said["digests"] = [report.digest for report in fusion_passes.reports()]
        said["decision"] = fusion_passes.reports()[0].decision
        _start_again(directory)
        torch._dynamo.utils.counters.clear()
        said["warm"] = _train("auto")
        said["misses"] = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
        said["cached decision"] = fusion_passes.reports()[0].decision
        if dist.get_rank() == 1:
            for path in directory.iterdir():
                path.write_text("{")
        _start_again(directory)
        said["cold rank"] = _train("auto")
        said["measured in all"] = len(calls)
        (path,) = directory.glob("*.json")
        said["file"] = path.read_text()
        _start_again(directory)
        config = fusion_passes.FusionConfig(mode="auto", bucket_cap_mb=300 / 2**20)
        said["capped"] = _train(config)
        said["capped report"] = fusion_passes.reports()[0]
    return said


def test_it_trains_as_eager_ddp_and_measures_once(run_on_ranks: RUN) -> None:
    one, other = run_on_ranks(2, trained)
    for rank in (one, other):
        for start in ("cold", "warm", "cold rank", "capped"):
            for ours, theirs in zip(rank[start], rank["eager"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert (rank["measured"], rank["measured in all"]) == (1, 1)
        assert rank["misses"] == 0, "a profile that was found again hits the caches"
        assert rank["cached decision"] == rank["decision"]
        assert "ddp_fusion auto: 8 collectives traced" in rank["report"]
        assert "chosen from profile" in rank["decision"][0]
        assert all(b.num_bytes <= 1024 for b in rank["capped report"].buckets)
        assert rank["capped report"].decision[1].startswith("your bucket cap costs")
    assert one["digests"] == other["digests"]
    assert one["file"] == other["file"]


def measured() -> dict[str, Any]:
    """A start whose steps are measured, and two that plan from them; rank 1 has lost its file."""
    steps = AT[0] + 1
    said: dict[str, Any] = {"groups": [], "eager of 2": _train(None), "eager": _train(None, steps)}
    with _profiles() as (directory, _), fresh_cache():
        with mock.patch(f"{watched.__name__}.PreparingGroup", wraps=PreparingGroup) as noting:
            said["first"] = _train("auto", steps=steps, after=said["groups"].append)
        said["noted"] = noting.call_count
        said["estimated"] = fusion_passes.reports()[0].decision
        said["replans"] = fusion_passes.report().replans
        said["kept"] = [path.read_text() for path in directory.glob("*.steps.json")]
        if dist.get_rank() == 1:
            for path in directory.glob("*.steps.json"):
                path.unlink()
        for start in ("second", "third"):
            _start_again(directory)
            torch._dynamo.utils.counters.clear()
            said[start] = _train("auto", steps=2)
            (report,) = fusion_passes.reports()
            said[f"{start} report"] = report
            said["misses"] = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
        said["shared"] = [path.read_text() for path in directory.glob("*.steps.json")]
    return said


def test_the_next_start_plans_from_measured_steps(run_on_ranks: RUN) -> None:
    ranks = run_on_ranks(2, measured)
    (text,) = ranks[0]["kept"]
    steps = MeasuredSteps.from_json(text)
    assert sorted(number for bucket in steps.buckets for number in bucket) == list(range(8))
    for rank in ranks:
        for start, eager in (("first", ""), ("second", " of 2"), ("third", " of 2")):
            for ours, theirs in zip(rank[start], rank[f"eager{eager}"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert "that are estimated from shapes" in rank["estimated"][0]
        assert rank["noted"] == watched.STEPS
        assert rank["kept"] == [text], "what all have agreed on"
        assert "none that is better by 5 %" in rank["replans"][0].because
        assert rank["replans"][0].second_plan == "", "no compile is spent"
        assert set(rank["groups"]) == {"ProcessGroup"}, "what is not measured runs as ever"
        for start in ("second", "third"):
            assert "measured in 5 steps" in rank[f"{start} report"].decision[0]
        assert rank["shared"] == [text], "each rank keeps what all have agreed on"
        assert rank["misses"] == 0, "a start that plans from the same hits the caches"
    assert len({rank["second report"].digest for rank in ranks}) == 1


def failing(case: str, directory: str) -> None:
    """Writes the error of a rank where another one differs or fails in a start."""
    rank = dist.get_rank()
    flags = {"flag": "concat", "cap": fusion_passes.FusionConfig(mode="auto", bucket_cap_mb=1)}
    flag = flags.get(case, "auto") if rank == 1 else "auto"
    changes: list[Any] = [mock.patch.object(agree, "WAIT_SECONDS", 3.0)]
    failures = {"dies": _die, "raises": _raise, "stalls": _stall}
    if rank == 1 and case in failures:
        changes.append(mock.patch.object(measure.Ranks, "times", failures[case]))
    if rank == 1 and case == "model":
        changes.append(mock.patch(f"{__name__}._chain", return_value=nn.Linear(16, 16)))
    if rank == 1 and case == "torch":
        changes.append(mock.patch.object(torch, "__version__", "0.1"))
    said = "trained"
    try:
        with contextlib.ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            stack.enter_context(_profiles())
            _train(flag)
    except Exception as error:  # noqa: BLE001 - the test looks at its text
        said = f"{type(error).__name__}: {error}"
    finally:
        (Path(directory) / str(rank)).write_text(said)


def _die(*_: object) -> None:
    os._exit(3)


def _raise(*_: object) -> None:
    raise RuntimeError("out of memory")


_times = measure.Ranks.times


def _stall(ranks: measure.Ranks, *args: Any) -> list[float]:
    time.sleep(5)
    return _times(ranks, *args)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("stalls", ["has failed on rank 0: "] * 2),
        ("raises", ["has failed on rank 1: out of memory"] * 2),
        ("torch", [" on rank 0, and '0.1' on rank 1"] * 2),
        ("flag", ["ranks [1] have not come within 3 s"] * 2),
        pytest.param("cap", ['"bucket_cap_mb": 1, '] * 2, marks=pytest.mark.nightly),
        ("model", ["DDP expects same model across all ranks"] * 2),
        ("dies", ["another rank has probably died"]),
    ],
)
def test_a_rank_that_differs_or_fails_is_an_error_on_all(
    run_on_ranks: RUN, tmp_path: Path, case: str, texts: list[str]
) -> None:
    with pytest.raises(RankError) if case == "dies" else contextlib.nullcontext():
        run_on_ranks(2, failing, case=case, directory=str(tmp_path))
    said = [path.read_text() for path in sorted(tmp_path.iterdir())]
    for expected, text in zip(texts, said, strict=True):
        assert expected in text


def test_a_module_of_another_flag_is_fused_by_caps_with_a_warning() -> None:
    with fake_world():
        with inductor_config.patch(ddp_fusion="concat"):
            ddp = DistributedDataParallel(two_layers())
        with inductor_config.patch(ddp_fusion="auto"), pytest.warns(FusionWarning) as said:
            torch.compile(ddp)(torch.ones(2, 4)).sum().backward()
        texts = [str(item.message) for item in said if item.category is FusionWarning]
        assert len(texts) == 1
        assert "the buckets of DDP 0 (Sequential) are filled up to caps" in texts[0]
        (report,) = fusion_passes.reports()
        assert report.decision == (NO_PROFILE,)
        assert report.collectives_after == 1
