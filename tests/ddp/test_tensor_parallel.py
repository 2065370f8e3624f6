"""DDP over one dimension of a mesh of 2 x 2 ranks, around a tensor-parallel model: where gradients
are stored, and the resulting module. The catalogue of scenarios compares trainings with eager
DDP."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.reducer import reducer_of
from testing.models import WIDTH
from testing.scenarios.features.tensor import LENGTH, FeedForward, columns_and_rows, sequences
from tests.support.fake_world import fake_world, one_rank


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# --- Gradients ---------------------------------------------------------------------------------


def test_compiled_backwards_store_them(mesh: DeviceMesh) -> None:
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(sequences(mesh["tp"]), device_mesh=mesh["dp"])
        compiled = torch.compile(ddp)
        for _ in range(2):
            compiled(torch.ones(2, LENGTH, WIDTH)).sum().backward()
    assert reducer_of(ddp).record.num_stored == len(list(ddp.parameters())) == 12


def test_eager_ones_may_be_collectives_that_run() -> None:
    kinds: set[type] = set()

    def reduce(gradient: Tensor) -> Tensor:
        assert dist.group.WORLD is not None
        reduced = funcol.all_reduce(gradient, "sum", dist.group.WORLD)
        kinds.add(type(reduced))
        return reduced

    plain = FeedForward()
    plain(torch.ones(2, WIDTH)).sum().backward()
    with one_rank(), inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(FeedForward())
        for parameter in ddp.parameters():
            parameter.register_hook(reduce)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.ones(2, WIDTH)).sum().backward()
            found, expected = ([p.grad for p in model.parameters()] for model in (ddp, plain))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert kinds == {funcol.AsyncCollectiveTensor}


# --- Modules -------------------------------------------------------------------------------------


@pytest.fixture
def ddp(mesh: DeviceMesh) -> Iterator[DistributedDataParallel]:
    with inductor_config.patch(ddp_fusion="concat"):
        yield DistributedDataParallel(columns_and_rows(mesh["tp"]), device_mesh=mesh["dp"])


def test_module_keeps_its_parameters(ddp: DistributedDataParallel) -> None:
    before = {name: id(parameter) for name, parameter in ddp.named_parameters()}
    state = list(ddp.state_dict())
    ddp(torch.ones(2, LENGTH, WIDTH)).sum().backward()
    assert {name: id(parameter) for name, parameter in ddp.named_parameters()} == before
    assert list(ddp.state_dict()) == state == list(before)


def test_layers_read_dtensors(ddp: DistributedDataParallel) -> None:
    up = ddp.module.block.up
    assert isinstance(up.weight, DTensor)
    assert up.weight.shape == (2 * WIDTH - 3, WIDTH)
    assert type(up._parameters["weight"]) is nn.Parameter
    assert (up._parameters["weight"].shape, up.bias.shape) == ((7, WIDTH), (13,))
    assert isinstance(up, nn.Linear)
    assert type(up) is type(ddp.module.block.down) is not nn.Linear
    assert type(ddp.module.first) is nn.Linear


def test_copies_read_dtensors(ddp: DistributedDataParallel) -> None:
    model = copy.deepcopy(ddp.module)
    x = torch.ones(2, LENGTH, WIDTH)
    assert torch.equal(model(x), ddp.module(x))
    assert model.block.up.weight.device_mesh is ddp.module.block.up.weight.device_mesh


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
            ValueError, match=r"'block\.up\.weight' is a DTensor.*device_mesh=mesh\['dp'\]"
        ),
    ):
        DistributedDataParallel(model, process_group=group)
    ignored = [name for name, value in model.named_parameters() if isinstance(value, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with inductor_config.patch(ddp_fusion="concat"):
        DistributedDataParallel(model, process_group=group)
