"""``FusionConfig(memory="registered")``: buckets at fixed addresses in one allocation, and the
calls to NCCL for it. A fake backend, and ranks over Gloo, test it without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.ddp import attachment
from fusion_passes.reducer import registered as registered_buckets
from fusion_passes.reducer.rank_errors import RanksDisagreeError, SettingsDifferError
from fusion_passes.reducer.reducer import reducer_of
from fusion_passes.reducer.registered import RegisteredBuckets
from fusion_passes.torch_private import registered_memory
from fusion_passes.torch_private.registered_memory import (
    RegisteredMemory,
    deregister_freed,
    why_not_registered,
)
from testing import models
from testing.processes import RUN
from testing.registered import registered_by_nobody
from testing.scenarios.both_ways import flag_of, train_both
from testing.scenarios.catalog import SMALL_MB
from testing.scenarios.entries import Scenario
from testing.scenarios.loop import backwards
from testing.scenarios.outcomes import RankReport, judge
from testing.scenarios.run import Run
from tests.reducer.test_scenarios import cases
from tests.support.beside_eager import beside_eager
from tests.support.registrations import CPU, Backend, Group, on_the_host

FLAG: Final = FusionConfig(memory="registered")


def registered() -> contextlib.AbstractContextManager[None]:
    return inductor_config.patch(ddp_fusion=FLAG)


# --- What NCCL is told ---------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A fake backend whose groups are never shut down."""
    for name in ("shutdown", "abort"):
        monkeypatch.setattr(registered_memory, f"_torchs_{name}", lambda _: None)
    backend = Backend()
    with on_the_host(backend):
        yield backend


POOL: Final = "a pool of NCCL's allocator"


def test_memory_is_allocated_in_a_pool_of_its_own_and_registered_once(backend: Backend) -> None:
    kept = RegisteredMemory(Group(backend), CPU, 96)  # type: ignore[arg-type]
    assert kept.data.shape == (96,)
    assert kept.data.dtype == torch.uint8
    allocated = [("enter", POOL, CPU), ("allocate", POOL, 96), ("leave", POOL)]
    assert backend.calls == allocated
    kept.register()
    assert backend.calls == [*allocated, ("register", POOL, True)]


def _make(backend: Backend) -> tuple[Any, RegisteredMemory]:
    group: Any = Group(backend)
    made = RegisteredMemory(group, CPU, 96)
    made.register()
    backend.calls.clear()
    return group, made


def test_memory_is_deregistered_with_the_last_reference(backend: Backend) -> None:
    _, made = _make(backend)
    gradient = made.data[:8]
    del made
    gc.collect()
    assert backend.calls == [("deregister", POOL)]
    assert gradient.sum() == 0  # The memory still exists.


def test_memory_is_deregistered_once(backend: Backend) -> None:
    _, made = _make(backend)
    made.deregister()
    made.deregister()
    del made
    gc.collect()
    assert backend.calls == [("deregister", POOL)]


def test_memory_is_deregistered_before_its_group_is_destroyed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, others = _make(Backend())
    group, made = _make(backend)
    monkeypatch.setattr(
        registered_memory, "_torchs_shutdown", lambda _: backend.calls.append(("shutdown",))
    )
    dist.ProcessGroup.shutdown(group)
    assert backend.calls == [("deregister", POOL), ("shutdown",)]
    assert other.backend.calls == []
    del made, others


def test_an_aborted_group_has_forgotten_its_memory(backend: Backend) -> None:
    group, made = _make(backend)
    dist.ProcessGroup.abort(group)
    del made
    gc.collect()
    assert backend.calls == []


@pytest.fixture
def capture() -> Iterator[mock.Mock]:
    """Return a function that reports whether a CUDA graph is being captured, from here on; False
    until it is set."""
    is_capturing = mock.Mock(return_value=False)
    with mock.patch.multiple(
        torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=is_capturing
    ):
        yield is_capturing


@pytest.mark.parametrize("then", ["allocates", "launches", "shuts down", "aborts"])
def test_memory_that_is_freed_during_a_capture_is_deregistered_later(
    backend: Backend, capture: mock.Mock, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A synchronization may be illegal when the garbage collector runs."""
    synchronized = mock.Mock()
    monkeypatch.setattr(torch.cpu, "synchronize", synchronized)
    group, made = _make(backend)
    buckets = RegisteredBuckets(group, "DDP 0")
    capture.return_value = True
    del made
    gc.collect()
    buckets.of(mock.Mock(index=0))
    assert backend.calls == []
    synchronized.assert_not_called()
    capture.return_value = False
    if then == "allocates":
        _ = RegisteredMemory(group, CPU, 8)
    elif then == "launches":
        buckets.of(mock.Mock(index=0))
    elif then == "shuts down":
        dist.ProcessGroup.shutdown(group)
    else:
        dist.ProcessGroup.abort(group)
    expected = [] if then == "aborts" else [("deregister", POOL)]
    assert backend.calls[:1] == expected
    assert synchronized.call_count == len(expected)
    deregister_freed()
    assert synchronized.call_count == len(expected), "once"


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "devices", "why"),
    [
        (Group(Backend("gloo")), [CPU], "needs a process group of NCCL, .* over gloo"),
        (
            Group(SimpleNamespace(name=lambda: "nccl")),
            [CPU],
            "needs register_mem_pool of the backend, which SimpleNamespace of torch",
        ),
        (Group(Backend(), None), [CPU], "needs a process group that is bound .* device_id"),
        (
            Group(Backend()),
            [torch.device("cuda", 1), torch.device("cuda", 0)],
            "needs parameters on one GPU, and they are on cuda:0, cuda:1",
        ),
        (Group(Backend()), [torch.device("cuda", 0), torch.device("cuda", 0)], "^$"),
    ],
    ids=["gloo", "torch-without", "not-bound", "several-gpus", "nothing"],
)
def test_reasons_against_it(group: Any, devices: list[torch.device], why: str) -> None:
    assert re.search(why, why_not_registered(group, devices, averages=False))


@pytest.mark.parametrize(
    ("version", "averages", "why"),
    [
        ((2, 28, 9), False, "^$"),
        ((2, 30, 3), True, "^$"),
        ((2, 29, 7), True, r"needs gradients that are summed: NCCL 2\.29\.7 averages from copies"),
    ],
)
def test_averages_that_would_not_use_it(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], averages: bool, why: str
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    device, group = torch.device("cuda", 0), Group(Backend())
    found = why_not_registered(group, [device], averages=averages)  # type: ignore[arg-type]
    assert re.search(why, found)


@pytest.mark.usefixtures("one_rank")
def test_it_is_refused_over_gloo() -> None:
    with registered(), pytest.raises(ValueError, match="memory") as caught:
        DistributedDataParallel(models.mlp(2))
    assert str(caught.value) == (
        "FusionConfig.memory = 'registered' of DDP 0 (Sequential) needs a process group of NCCL, "
        "and this one sends tensors on cpu over gloo. Give init_process_group backend='nccl', or "
        "set memory = 'plain'."
    )


def refused_on_one_rank() -> str:
    why = "needs what rank 1 has not. Do" if dist.get_rank() == 1 else ""
    with (
        registered_by_nobody(),
        mock.patch.object(attachment, "why_not_registered", return_value=why),
        registered(),
        pytest.raises(SettingsDifferError) as caught,
    ):
        DistributedDataParallel(models.mlp(2))
    return str(caught.value)


def test_no_rank_goes_on_alone(run_on_ranks: RUN) -> None:
    for text in run_on_ranks(2, refused_on_one_rank):
        assert "needs what rank 1 has not" in text


@pytest.mark.usefixtures("one_rank")
def test_a_hook_that_sends_a_copy_is_refused() -> None:
    with registered_by_nobody(), registered():
        ddp = DistributedDataParallel(models.mlp(2))
        with pytest.raises(ValueError, match="sent as they lie") as caught:
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert "communication hook bf16_compress_hook" in str(caught.value)


def allocated_on_one_rank() -> tuple[str, bool, list[int], bool]:
    """The result on this rank if another one cannot allocate memory: the error, whether it knows
    the cause, the sizes registered so far, and whether it registers once memory is available."""
    with registered_by_nobody() as registry, registered():
        ddp = DistributedDataParallel(models.mlp(2))

        def allocate(*arguments: Any) -> Any:
            if dist.get_rank() == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(*arguments)

        real: Any = vars(registered_buckets)["RegisteredMemory"]
        rows = torch.ones(2, models.WIDTH)
        with (
            mock.patch.object(registered_buckets, "RegisteredMemory", allocate),
            pytest.raises(RanksDisagreeError) as caught,
        ):
            ddp(rows).sum().backward()
        registrations = list(registry.registered)
        ddp(rows).sum().backward()
        is_caused = isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        return str(caught.value), is_caused, registrations, len(registry.registered) == 1


def test_no_rank_registers_memory_that_another_could_not_allocate(run_on_ranks: RUN) -> None:
    """Registration is a collective: the other ranks would wait in it."""
    first, second = run_on_ranks(2, allocated_on_one_rank)
    text = first[0]
    assert re.fullmatch(
        r"FusionConfig.memory = 'registered' of DDP 0 \(Sequential\) needs \d+ bytes of NCCL's "
        "memory on each rank, which rank 1 could not allocate. Free memory of the GPU there, or "
        "set memory = 'plain'.",
        text,
    )
    assert first == (text, False, [], True)
    assert second == (text, True, [], True)


# --- Where buckets lie ---------------------------------------------------------------------------


def where_gradients_lie(run: Run) -> tuple[list[list[int]], str, list[int]]:
    """The first rank keeps a gradient of each step, as a user may; the second does not."""
    kept, places = [], []
    with registered_by_nobody() as registry:
        ddp, forward = run.compiled(run.mlp(4), bucket_cap_mb=SMALL_MB)
        for step in range(4):
            backwards(run, ddp, forward, 1, first=step)
            gradients = [parameter.grad for parameter in ddp.parameters()]
            if run.is_fused and step:  # The first step has other buckets, in plain memory.
                (data,) = registry.data
                places.append([gradient.data_ptr() - data.data_ptr() for gradient in gradients])
            if dist.get_rank() == 0:
                kept.append(gradients)
        if not run.is_fused:
            return [], "", []
        (told,) = fusion_passes.report().modules
        fusion_passes.report().to_json()
        assert reducer_of(ddp).record.num_stored > 0
    return places, told.memory, registry.sizes


def test_buckets_lie_at_the_same_offsets_in_each_step_and_on_each_rank(run_on_ranks: RUN) -> None:
    first, second = run_on_ranks(2, beside_eager, train=where_gradients_lie, flag=FLAG)
    assert first == second
    places, told, (size,) = first
    assert all(place == places[0] for place in places)
    assert all(0 <= offset < size for offset in places[0])
    assert told.startswith(f"registered with NCCL as symmetric memory, {size} bytes in one")


@pytest.mark.usefixtures("one_rank")
def test_memory_is_deregistered_when_the_module_gets_another_group() -> None:
    with registered_by_nobody() as registry, registered():
        ddp = DistributedDataParallel(models.mlp(2))
        ddp(torch.ones(2, models.WIDTH)).sum().backward()
        assert registry.ended == 0
        ddp._update_process_group(dist.group.WORLD)
        assert registry.ended == 1
        ddp(torch.ones(2, models.WIDTH)).sum().backward()
        assert len(registry.data) == 2
        assert all(parameter.grad is not None for parameter in ddp.parameters())


@pytest.mark.usefixtures("one_rank")
def test_each_bucket_begins_as_an_allocation_of_its_own_would() -> None:
    """An empty bucket has no memory."""
    with registered_by_nobody() as registry, registered():
        model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1).double()])
        model.register_parameter("empty", nn.Parameter(torch.ones(0, dtype=torch.bfloat16)))
        ddp = DistributedDataParallel(model)
        reducer = reducer_of(ddp)
        reducer.fix_layout(reducer.assignment.rebuilt(reducer.module.group))
        memory: Any = reducer.memory.registered
        places = {b.dtype: memory.of(b) for b in reducer.assignment.layout.buckets}
        assert places[torch.bfloat16] is None
        assert places[torch.float32].data_ptr() - places[torch.float64].data_ptr() == 512
        assert registry.sizes == [1024]


# --- The catalogue -------------------------------------------------------------------------------

_CHECKED: Final = (
    *("no-sync", "kept-gradients", "added-gradients", "several-backwards", "unused-some"),
    *("unused-no-sync", "join-several-times", "static-graph", "second-instance", "second-ddp"),
)
"""Features in which gradients of one iteration still exist in the next, on two ranks; nightly jobs
train all."""

_NOT_AS_THEY_LIE: Final = (
    *("hook-bf16", "hook-fp16", "hook-builtin", "unused-hook-fp16", "saved-module"),
)
"""Hooks that send a copy: refused."""


def _lies_as_sent(scenario: Scenario) -> bool:
    refused = dict(scenario.options).keys() & {"reduce_dtype", "backward_graph", "shard_optimizer"}
    return scenario.feature not in _NOT_AS_THEY_LIE and not refused


def train_registered(scenario: Scenario) -> RankReport:
    """Train a scenario with registered memory; a job for every rank."""
    options = dataclasses.replace(flag_of(scenario, scenario.modes[0]), memory="registered")
    with registered_by_nobody():
        return train_both(scenario, scenario.dtypes[0], options, CPU)


@pytest.mark.parametrize("scenario", cases(_lies_as_sent, _CHECKED))
def test_trains_as_eager_ddp(run_on_ranks: RUN, scenario: Scenario) -> None:
    reports = run_on_ranks(scenario.ranks, train_registered, scenario=scenario)
    outcome = judge(scenario, reports)
    assert outcome.kind == scenario.becomes, outcome.words
