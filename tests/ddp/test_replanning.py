"""Buckets that are planned once more within a run, on real processes: gradients, both outcomes, and
ranks that fail meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
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
from fusion_passes.agreement.exchange import meeting_of
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp import launch_clock, replan_meetings, replanning
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.replanning import AT
from fusion_passes.ddp.watched import FIRST_ROUND, Watched
from fusion_passes.profile.tables import CostTable
from fusion_passes.torch_private import compiled_backward
from testing.processes import RankError
from tests.ddp.test_auto import RUN, _chain, _inputs, _profiles, _start_again

MS = 1_000_000

COSTS = CostTable((1024, 4352), (4 * MS, 21 * MS // 2))
"""An all-reduce of one layer takes 4 ms, and one of all four 10.5 ms. By estimates all gradients
are ready at once, so one is best; by the steps that :func:`_measured` has, one for each layer."""

READY_NS = 20 * MS
FIRST_NS = 31 * MS


@contextlib.contextmanager
def _measured(second_ns: int) -> Iterator[None]:
    """Lets times be measured that a busy machine cannot change, with those of a second plan."""

    def medians(item: Watched) -> list[int]:
        count = len(item.steps[0]) - 2
        end = FIRST_NS if item.from_round == FIRST_ROUND else second_ns
        return [*(READY_NS * (i + 1) // count for i in range(count)), end]

    with mock.patch.object(Watched, "medians_ns", medians):
        yield


def _gradients(ddp: nn.Module, step: Callable[..., Tensor], count: int) -> list[Tensor]:
    """All gradients of some steps, each of other inputs."""
    found = []
    for number in range(count):
        ddp.zero_grad()
        step(_inputs() * (number + 1)).square().sum().backward()
        found += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
    return found


class Tripled(DistributedDataParallel):
    """A subclass with a forward of its own."""

    def forward(self, *inputs: Any) -> Any:
        return 3 * super().forward(*inputs)


def _eager(count: int, kind: type[DistributedDataParallel]) -> list[Tensor]:
    ddp = kind(_chain())
    return _gradients(ddp, ddp, count)


def _fused(
    count: int, kind: type[DistributedDataParallel] = DistributedDataParallel
) -> tuple[DistributedDataParallel, list[Tensor]]:
    ddp = kind(_chain())
    return ddp, _gradients(ddp, torch.compile(ddp), count)


STEPS = 2 * AT[0] + 2


def replanned(second_ns: int, kind: type[DistributedDataParallel]) -> dict[str, Any]:
    """A start that plans twice, what comes after it in the same process, and the next start."""
    said: dict[str, Any] = {"eager": _eager(STEPS, kind)}
    with _profiles(COSTS) as (directory, _), fresh_cache(), _measured(second_ns):
        with inductor_config.patch(ddp_fusion="auto"):
            ddp, said["first start"] = _fused(STEPS, kind)
            history = participants[registry.module_of(ddp).group_name].history
            said["launched"] = [len(each.collectives) for each in history[""]]
            said["reports"] = fusion_passes.reports()
            said["document"] = fusion_passes.report()
            if second_ns < FIRST_NS:
                _, said["second instance"] = _fused(2, kind)
        if second_ns < FIRST_NS:
            said["flag unset"] = _gradients(ddp, torch.compile(ddp), 1)
        del ddp
        _start_again(directory)
        torch._dynamo.utils.counters.clear()
        with inductor_config.patch(ddp_fusion="auto"):
            _, said["next start"] = _fused(STEPS, kind)
        said["misses"] = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
        said["next reports"] = fusion_passes.reports()
        said["next document"] = fusion_passes.report()
        if second_ns > FIRST_NS:
            for path in directory.glob("*.steps.json"):
                path.unlink()
            _start_again(directory)
            cold = fresh_cache() if dist.get_rank() == 0 else contextlib.nullcontext()
            with cold, inductor_config.patch(ddp_fusion="auto"):
                _, said["one rank warm"] = _fused(AT[0] + 1, kind)
            said["one warm"] = fusion_passes.report().replans
    return said


@pytest.mark.parametrize(
    ("second_ns", "kept", "kind"),
    [
        (25 * MS, "second", Tripled),
        pytest.param(25 * MS, "second", DistributedDataParallel, marks=pytest.mark.nightly),
        pytest.param(40 * MS, "first", DistributedDataParallel, marks=pytest.mark.newest_torch),
    ],
    ids=["second-subclass", "second", "first"],
)
def test_the_better_of_both_plans_stays(
    run_on_ranks: RUN, second_ns: int, kept: str, kind: type[DistributedDataParallel]
) -> None:
    ranks = run_on_ranks(2, replanned, second_ns=second_ns, kind=kind)
    for rank in ranks:
        parts = ("first start", "second instance", "flag unset", "next start", "one rank warm")
        for part in filter(rank.__contains__, parts):
            for ours, theirs in zip(rank[part], rank["eager"], strict=False):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        first, second = rank["reports"]
        assert (len(first.buckets), len(second.buckets)) == (1, 4)
        assert "that were measured in 5 steps" in second.decision[0]
        (replan,) = rank["document"].replans
        assert (replan.kept, replan.steps) == (kept, 5)
        assert (replan.first_plan, replan.second_plan) == (first.digest, second.digest)
        assert (replan.first_s, replan.second_s) == (FIRST_NS / 1e9, second_ns / 1e9)
        assert replan.predicted_first_s > replan.predicted_second_s
        assert rank["launched"] == [4 if kept == "second" else 1], "what runs"
        used = [graph.digest for graph in rank["document"].graphs if graph.is_used]
        assert used == [second.digest if kept == "second" else first.digest]
        assert rank["document"].totals.collectives_after == (4 if kept == "second" else 1)
        (again,) = rank["next reports"]
        assert again.digest == used[0], "the next start plans right at once"
        (replan,) = rank["next document"].replans
        assert replan.because.startswith("an earlier start has measured the same")
        if kept == "first":
            assert rank["misses"] == 0, "and it finds its graphs where nothing was won"
            (replan,) = rank["one warm"]
            assert replan.because == "its backward came from a cache: the next start plans anew"
    assert len({rank["reports"][1].digest for rank in ranks}) == 1


def test_a_torch_that_keeps_no_backward_is_left_alone() -> None:
    said = compiled_backward.why_not_again(object())
    assert said == "this torch keeps its backward in another way"


# --- Ranks that fail meanwhile -------------------------------------------------------------------

PATIENCE_S = 2


def failing(case: str, directory: str) -> None:
    """Writes what came of a training where rank 1 fails at one point of it."""
    said, where, what = "trained as eager DDP", *case.split()
    is_failing = dist.get_rank() == 1
    if where == "measuring":
        _renew_group(f"{directory}.store", timedelta(seconds=8))
    eager = _eager(STEPS, DistributedDataParallel)
    try:
        with contextlib.ExitStack() as stack:
            if is_failing and where == "measuring":
                stack.enter_context(mock.patch.object(Watched, "stop", _failing_stop(what)))
            if where == "compiling" and (is_failing or what in _LATE):
                fail = _FAILURES[what] if is_failing else _raise
                stack.enter_context(mock.patch.object(replanning, "compile_again", fail))
            if what in _LATE:
                stack.enter_context(mock.patch.object(replanning, "meet", _soon))
            stack.enter_context(_profiles(COSTS))
            stack.enter_context(_measured(25 * MS))
            # What is compiled here leaves no cache, nor does a rank that ends meanwhile.
            stack.enter_context(inductor_config.patch(ddp_fusion="auto", force_disable_caches=True))
            warned = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always", FusionWarning)
            _, fused = _fused(STEPS)
            for ours, theirs in zip(fused, eager, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            (replan,) = fusion_passes.report().replans
            said += f" in the {replan.kept} plan"
        said += "".join(f"; {w.message}" for w in warned if w.category is FusionWarning)
    except BaseException as error:  # noqa: BLE001 - the test looks at its text
        said = f"{type(error).__name__}: {error}"
    finally:
        (Path(directory) / str(dist.get_rank())).write_text(said)


def _renew_group(path: str, timeout: timedelta) -> None:
    """A process group whose collectives fail sooner."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


_meet = replan_meetings.meet


def _soon(participant: Any, *args: Any) -> tuple[str, Any]:
    """Ranks wait for less than compilers on a busy machine need."""
    if args[1] == "compiled":
        meeting = meeting_of(participant.module)
        assert meeting is not None
        meeting.timeout = timedelta(seconds=PATIENCE_S)
    return _meet(participant, *args)


def _die(*_: object) -> Any:
    time.sleep(5 * PATIENCE_S)  # Whoever runs ranks ends the others soon after.
    os._exit(3)


def _raise(*_: object) -> Any:
    raise RuntimeError("no space left on device")


def _stall(forward: Any) -> Any:
    time.sleep(5 * PATIENCE_S)
    return compiled_backward.compile_again(forward)


def _end(*_: object) -> Any:
    raise SystemExit(3)


_LATE = ("dies", "stalls")
_FAILURES = {"dies": _die, "ends": _end, "raises": _raise, "stalls": _stall}


def _failing_stop(what: str) -> Callable[[Watched], None]:
    stop = Watched.stop

    def fail(item: Watched) -> None:
        stop(item)
        if item.participant.rounds == FIRST_ROUND + 2:
            time.sleep(12) if what == "stalls" else os._exit(3)

    return fail


NOT_COME = "agree on what they have measured in its steps, but ranks [1] have not come within 2 s"
FAILED = "trained as eager DDP in the first plan; torch._inductor.config.ddp_fusion = 'auto': the"


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("compiling raises", [FAILED] * 2),
        ("compiling ends", ["but rank 1 has ended with SystemExit", "SystemExit: 3"]),
        pytest.param("compiling stalls", [NOT_COME] * 2, marks=pytest.mark.nightly),
        pytest.param("compiling dies", [NOT_COME], marks=pytest.mark.nightly),
        pytest.param("measuring dies", ["RuntimeError: "], marks=pytest.mark.nightly),
        pytest.param(
            "measuring stalls", ["Timed out", "failed on rank 0: "], marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rank_that_fails_is_heard_of_on_all(
    run_on_ranks: RUN, tmp_path: Path, case: str, texts: list[str]
) -> None:
    with pytest.raises(RankError) if "dies" in case else contextlib.nullcontext():
        run_on_ranks(2, failing, case=case, directory=str(tmp_path))
    said = [path.read_text() for path in sorted(tmp_path.iterdir())]
    for expected, text in zip(texts, said, strict=True):
        assert expected in text
        assert "raises" not in case or "on rank 1: RuntimeError: no space left" in text


# --- Ranks that do not meet ----------------------------------------------------------------------


def uneven() -> dict[str, Any]:
    """A rank that runs out of inputs before the ranks meet, and then waits for nobody."""
    said: dict[str, Any] = {}
    for name, flag in (("eager", None), ("fused", "auto")):
        with _profiles(COSTS), fresh_cache(), inductor_config.patch(ddp_fusion=flag):
            ddp = DistributedDataParallel(_chain())
            step = ddp if flag is None else torch.compile(ddp)
            with ddp.join():
                said[name] = _gradients(ddp, step, AT[0] + (2 if dist.get_rank() == 0 else -2))
            said["replans"] = fusion_passes.report().replans
    return said


@pytest.mark.nightly
def test_a_rank_without_inputs_waits_for_nobody(run_on_ranks: RUN) -> None:
    for rank in run_on_ranks(2, uneven):
        for ours, theirs in zip(rank["fused"], rank["eager"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        (replan,) = rank["replans"]
        assert replan.because == "a rank had no inputs, or another thread or no graph ran it"


class _Broken(nn.Module):
    """A graph break between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(list(_chain().children())[:2])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        out: Tensor = self.layers[1](x)
        return out


def in_several_graphs() -> dict[str, Any]:
    """A start with nothing that can be measured, in which the ranks look three times."""
    eager = DistributedDataParallel(_Broken())
    said: dict[str, Any] = {"eager": _gradients(eager, eager, 5)}
    often = (FIRST_ROUND, FIRST_ROUND + 1, FIRST_ROUND + 2)
    with contextlib.ExitStack() as stack:
        for module in (replanning, launch_clock):
            stack.enter_context(mock.patch.object(module, "AT", often))
        stack.enter_context(_profiles(COSTS))
        stack.enter_context(inductor_config.patch(ddp_fusion="auto"))
        ddp = DistributedDataParallel(_Broken())
        said["fused"] = _gradients(ddp, torch.compile(ddp), 5)
        said["replans"] = fusion_passes.report().replans
    return said


@pytest.mark.nightly
def test_what_cannot_be_measured_is_said(run_on_ranks: RUN) -> None:
    for rank in run_on_ranks(2, in_several_graphs):
        for ours, theirs in zip(rank["fused"], rank["eager"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        (replan,) = rank["replans"]
        assert replan.because.endswith("its gradients are reduced by several graphs, or by none")
