"""DDP over one dimension of a mesh of 2 x 2 ranks, around a tensor-parallel model.

Real processes: gradients of each step and the parameters in the end are eager DDP's on every rank,
which are the local shards of tensor parallelism. Generated code: the collectives of tensor
parallelism are those that were traced, in their order.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig, FusionWarning
from fusion_passes.install import inductor_pass
from fusion_passes.plan.buckets import BucketPlan
from testing.equality import assert_same_runs
from testing.fake_world import fake_world
from testing.models import WIDTH
from tests.support.tensor_parallel import (
    LENGTH,
    FeedForward,
    Job,
    TensorParallelRecord,
    columns_and_rows,
    returning_dtensors,
    sequences,
    train_on_mesh,
)

RUN = Callable[..., list[Any]]

FOUR_RANKS = pytest.mark.xdist_group("four ranks")
"""In one process: what ranks do for the first time with DTensors takes each of them seconds."""

ROUNDING_EPS = 32.0
"""As in ``tests/equality/test_eager_ddp.py``."""


def train(run_on_ranks: RUN, job: Job, mode: str) -> list[TensorParallelRecord]:
    """Compares with eager DDP; returns the runs under the flag."""
    results = run_on_ranks(4, train_on_mesh, job=job, flag=mode)
    fused, eager = ([result[index] for result in results] for index in range(2))
    tolerance = 0.0 if job.learning_rate is None else ROUNDING_EPS
    assert_same_runs(fused, eager, tolerance_eps=tolerance)
    assert [run.launches_of_tp for run in fused] == [run.launches_of_tp for run in eager]
    return fused


def assert_fused(runs: list[TensorParallelRecord], *, gradients: int) -> None:
    for run in runs:
        assert run.warnings == []
        assert run.reports
        for report in run.reports:
            (bucket,) = report.buckets
            assert len(bucket.parameters) == gradients
        assert [backward.launches for backward in run.backwards] == [1] * len(run.backwards)


@FOUR_RANKS
@pytest.mark.parametrize(
    ("mode", "style", "sizes"),
    [
        ("concat", "outside", (3, 5)),
        pytest.param("coalesced", "inside", (3, 3), marks=pytest.mark.each_torch),
    ],
)
def test_columns_and_rows(run_on_ranks: RUN, mode: str, style: Any, sizes: tuple[int, ...]) -> None:
    """Even and uneven shards; batches of several sizes, and so of a symbolic one."""
    job = Job(columns_and_rows, style, batch_sizes=sizes)
    assert_fused(train(run_on_ranks, job, mode), gradients=10)


@FOUR_RANKS
@pytest.mark.parametrize(
    ("mode", "style"),
    [
        ("concat", "inside"),
        pytest.param("coalesced", "outside", marks=pytest.mark.nightly),
    ],
)
def test_sequences(run_on_ranks: RUN, mode: str, style: Any) -> None:
    job = Job(sequences, style, learning_rate=0.1)
    assert_fused(train(run_on_ranks, job, mode), gradients=12)


UNTRACED = {
    "symbolic output": (
        Job(returning_dtensors, "outside", batch_sizes=(3, 5)),
        "a region compiled for symbolic sizes takes or returns DTensors",
    ),
    "eager forward": (
        Job(columns_and_rows, "eager forward", options={"recomputed": True}),
        "not all of its forward is compiled",
    ),
}


@FOUR_RANKS
@pytest.mark.parametrize("case", UNTRACED)
def test_untraced_backwards_are_right_and_warned_about(run_on_ranks: RUN, case: str) -> None:
    job, words = UNTRACED[case]
    for run in train(run_on_ranks, job, "concat"):
        assert any(words in text for text in run.warnings)
        assert run.backwards[-1].launches == 1, "all in one bucket, after the backward"


# --- Generated code ------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch._dynamo.reset()


CAP_MB = 1e-3
"""Less than the weights of two feed-forwards: a first bucket is full in the middle."""

COLLECTIVE = re.compile(r"_c10d_functional\.(?!wait)(\w+)\.default\(.*?, '([^']*)'\)")


def collectives(mesh: DeviceMesh) -> list[tuple[str, str]]:
    """Operator and group of all collectives in the code of a forward and its backward."""
    torch._dynamo.reset()
    flag = FusionConfig(backward_graph="compiled_autograd")
    with inductor_config.patch(ddp_fusion=flag, fx_graph_cache=False):
        ddp = DistributedDataParallel(
            sequences(mesh["tp"]), device_mesh=mesh["dp"], bucket_cap_mb=CAP_MB
        )
        compiled = torch.compile(ddp, fullgraph=True)
        step = lambda: compiled(torch.ones(2, LENGTH, WIDTH)).sum().backward()  # noqa: E731
        codes = run_and_get_code(step)[1]
    return [found for code in codes for found in COLLECTIVE.findall(code)]


@pytest.mark.slow
def test_collectives_of_tensor_parallelism_stay_as_they_are(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp = mesh["tp"].get_group().group_name
    fused = collectives(mesh)
    monkeypatch.setattr(inductor_pass, "run_pipeline", lambda *_, **__: BucketPlan((), ()))
    monkeypatch.setattr("fusion_passes.ddp.unfused.warn_once", lambda *_: None)
    traced = collectives(mesh)
    kept, before = ([name for name, group in found if group == tp] for found in (fused, traced))
    assert kept == before
    assert set(kept) == {"all_gather_into_tensor", "all_reduce_", "reduce_scatter_tensor"}
    buckets = [index for index, (_, group) in enumerate(fused) if group != tp]
    assert len(buckets) == 2
    assert fused[buckets[0] :].count(("all_reduce_", tp)) > 0, "DDP's are launched among them"
    assert len(traced) - len(before) == 12


# --- Modules -------------------------------------------------------------------------------------


@pytest.fixture
def ddp(mesh: DeviceMesh) -> Iterator[DistributedDataParallel]:
    with inductor_config.patch(ddp_fusion="concat"):
        yield DistributedDataParallel(columns_and_rows(mesh["tp"]), device_mesh=mesh["dp"])


def test_module_keeps_its_parameters(ddp: DistributedDataParallel) -> None:
    before = {name: id(parameter) for name, parameter in ddp.named_parameters()}
    state = list(ddp.state_dict())
    with pytest.warns(FusionWarning, match="not all of its forward is compiled"):
        ddp(torch.ones(2, LENGTH, WIDTH)).sum().backward()
    assert {name: id(parameter) for name, parameter in ddp.named_parameters()} == before
    assert list(ddp.state_dict()) == state == list(before)


def test_layers_read_dtensors(ddp: DistributedDataParallel) -> None:
    up = ddp.module.uneven.up
    assert isinstance(up.weight, DTensor)
    assert up.weight.shape == (2 * WIDTH - 3, WIDTH)
    assert type(up._parameters["weight"]) is nn.Parameter
    assert (up._parameters["weight"].shape, up.bias.shape) == ((7, WIDTH), (13,))
    assert isinstance(up, nn.Linear)
    assert type(up) is type(ddp.module.even.up) is not nn.Linear
    assert type(ddp.module.first) is nn.Linear


def test_copies_read_dtensors(ddp: DistributedDataParallel) -> None:
    model = copy.deepcopy(ddp.module)
    x = torch.ones(2, LENGTH, WIDTH)
    assert torch.equal(model(x), ddp.module(x))
    assert model.even.up.weight.device_mesh is ddp.module.even.up.weight.device_mesh


def test_modules_without_dtensors_stay_as_they_are(mesh: DeviceMesh) -> None:
    model = FeedForward()
    with inductor_config.patch(ddp_fusion="concat"):
        DistributedDataParallel(model, device_mesh=mesh["dp"])
    assert type(model.up) is nn.Linear


def test_refuses_dtensors_without_their_mesh(mesh: DeviceMesh) -> None:
    model = columns_and_rows(mesh["tp"])
    group = mesh["dp"].get_group()
    with (
        inductor_config.patch(ddp_fusion="concat"),
        pytest.raises(
            ValueError, match=r"'even\.up\.weight' is a DTensor.*device_mesh=mesh\['dp'\]"
        ),
    ):
        DistributedDataParallel(model, process_group=group)
    ignored = [name for name, value in model.named_parameters() if isinstance(value, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with inductor_config.patch(ddp_fusion="concat"):
        DistributedDataParallel(model, process_group=group)
