"""A sharded optimizer refuses, on all ranks alike, each use that it would get wrong."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.sharded.modules import sharded
from testing.processes import RUN
from tests.sharded.trainings import SHARDED, backward, network, wrapped
from tests.support.fake_world import fake_world, two_layers

X: Final = torch.ones(2, 4)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def managed(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return wrapped(SHARDED, two_layers() if model is None else model, **options)


# --- Options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "coalesced"}, "needs mode = 'concat' or 'auto', but mode is 'coalesced'"),
        ({"scaling": "bucket"}, "needs scaling = 'auto', but scaling is 'bucket'"),
        ({"memory": "registered"}, "needs memory = 'plain', but memory is 'registered'"),
        ({"backward_graph": "compiled_autograd"}, "but backward_graph is 'compiled_autograd'"),
    ],
)
def test_options_that_contradict_it_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FusionConfig(shard_optimizer=True, **options)


@pytest.mark.parametrize("value", ["always", 1, None])
def test_the_option_has_three_values(value: Any) -> None:
    said = "shard_optimizer must be True, False or 'overlap', but is"
    with pytest.raises(ValueError, match=said):
        FusionConfig(shard_optimizer=value)


# --- Modules -------------------------------------------------------------------------------------


def test_sparse_gradients_are_refused(world: None) -> None:
    with pytest.raises(ValueError, match=r"0\.weight is of an embedding with sparse=True"):
        managed(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))


def _joined(ddp: DistributedDataParallel) -> None:
    ddp.join(enable=True)  # As Join does, once it has been entered.
    ddp._join_config = ddp._join_config._replace(enable=True)
    ddp(X)


FEATURES: Final[Mapping[str, Callable[[DistributedDataParallel], object]]] = MappingProxyType(
    {
        "communication hook noop_hook": lambda ddp: ddp.register_comm_hook(None, noop_hook),
        "_update_process_group": lambda ddp: ddp._update_process_group(dist.new_group()),
        "join": _joined,
        "a hook of yours synchronises its buffers": lambda ddp: ddp._register_buffer_comm_hook(
            None, noop_hook
        ),
    }
)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_ddp_are_refused(world: None, feature: str) -> None:
    ddp = managed()
    with pytest.raises(ValueError, match=rf"cannot be combined with .*{feature}.*shard_optimizer"):
        FEATURES[feature](ddp)


def test_two_modules_over_the_same_parameters_are_refused(world: None) -> None:
    model = two_layers()
    first, second = managed(model), managed(model)
    with pytest.raises(RuntimeError, match=r"DDP 1 \(Sequential\) has the same parameters"):
        first(X).sum().backward()
    del second


def test_a_model_can_be_wrapped_again(world: None) -> None:
    ddp = managed()
    ddp = managed(ddp.module)
    ddp(X).sum().backward()
    assert len(sharded()) == 1


# --- Optimizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [torch.optim.LBFGS, lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1)]
)
def test_optimizers_that_need_all_gradients_are_refused(world: None, kind: Any) -> None:
    ddp = managed()
    optimizer = kind(ddp.parameters())
    with pytest.raises(RuntimeError, match=r"(LBFGS|ZeroRedundancyOptimizer).*Use"):
        optimizer.step(lambda: torch.zeros(()))


def test_a_step_with_gradients_of_one_rank_is_refused(world: None) -> None:
    """Post-local SGD steps so: the ranks' parameters would differ with plain DDP."""
    ddp = managed()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.no_sync():
        ddp(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradients of 0.weight, .* are those of this rank"):
        optimizer.step()


def test_a_closure_that_leaves_gradients_of_one_rank_is_refused(world: None) -> None:
    ddp = managed()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def closure() -> None:
        with ddp.no_sync():
            ddp(X).sum().backward()

    with pytest.raises(RuntimeError, match=r"gradients of 0.weight, .* are those of this rank"):
        optimizer.step(closure)


def test_a_gradient_of_a_users_own_is_refused_where_another_rank_owns_it(world: None) -> None:
    ddp = managed()
    for parameter in ddp.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ddp(X).sum().backward()  # Zeros add nothing.
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="another rank owns this parameter"):
        ddp(X).sum().backward()


def test_a_sum_of_averages_and_others_may_not_be_changed(world: None) -> None:
    ddp = managed()
    ddp(X).sum().backward()
    with ddp.no_sync():
        ddp(X).sum().backward()
    for parameter in ddp.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    with pytest.raises(RuntimeError, match="nobody can tell how much of it is an average"):
        ddp(X).sum().backward()


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


HOOKS: Final[Mapping[str, Callable[[nn.Parameter], object]]] = MappingProxyType(
    {
        "of the tensor": lambda p: p.register_post_accumulate_grad_hook(_halve),
        "of the node": lambda p: torch.autograd.graph.get_gradient_edge(p).node.register_hook(
            lambda *_: _halve(p)
        ),
    }
)


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_may_not_see_a_sum_with_an_average(world: None, kind: str) -> None:
    """With plain DDP, all ranks have the average, and the hook changes it on all of them."""
    ddp = managed()
    for parameter in ddp.parameters():
        HOOKS[kind](parameter)
    for _ in range(2):
        ddp(X).sum().backward()
        ddp.zero_grad(set_to_none=False)  # Zeros stay zeros in most hooks.
    ddp(X).sum().backward()
    with ddp.no_sync(), pytest.raises(RuntimeError, match=r"0\.weight has a hook .* other ranks"):
        ddp(X).sum().backward()


def test_hooks_may_see_a_gradient_before_it_is_added_to_an_average(world: None) -> None:
    ddp = managed()
    for parameter in ddp.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    for _ in range(3):
        ddp(X).sum().backward()


def test_an_average_may_not_be_cleared_while_a_backward_adds_to_it(world: None) -> None:
    ddp = managed()
    ddp(X).sum().backward()
    out = ddp(X)
    out.register_hook(lambda _: ddp.zero_grad())
    with pytest.raises(RuntimeError, match="was replaced or cleared while a backward ran"):
        out.sum().backward()


@pytest.mark.parametrize("norm_type", [0.0, -1.0])
def test_norms_that_are_no_sum_are_refused(world: None, norm_type: float) -> None:
    ddp = managed()
    ddp(X).sum().backward()
    with pytest.raises(ValueError, match=r"norm_type = .* must be greater than 0"):
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0, norm_type)


def test_parameters_that_no_optimizer_steps_are_named(world: None) -> None:
    ddp = managed()
    optimizer = torch.optim.SGD(ddp.module[0].parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            ddp(X).sum().backward()
            optimizer.step()
            ddp.zero_grad()
    (text,) = {str(item.message) for item in caught}
    assert "(2: '1.weight', '1.bias')" in text


def test_parameters_that_two_optimizers_step_are_named(world: None) -> None:
    ddp = managed()
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for _ in range(2)]
    ddp(X).sum().backward()
    optimizers[0].step()
    with pytest.warns(fusion_passes.FusionWarning, match=r"Two optimizers step 0\.weight, "):
        optimizers[1].step()


def test_a_state_that_other_ranks_have_is_refused(world: None) -> None:
    """The model is wrapped again with other parameters, so their owners are others."""
    model = two_layers()
    ddp: DistributedDataParallel | None = managed(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(ddp, optimizer)
    state = optimizer.state_dict()
    del ddp
    model[0].weight.requires_grad_(False)
    ddp = managed(model)
    with pytest.raises(RuntimeError, match=r"the state of 0\.bias, .* others own them now"):
        step(ddp, optimizer)
    state.pop("ddp_fusion_part")  # As the whole state, which takes real ranks to gather.
    optimizer.load_state_dict(state)
    step(ddp, optimizer)


def step(ddp: Any, optimizer: torch.optim.Optimizer) -> None:
    ddp(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# --- A step that fails ---------------------------------------------------------------------------


def test_a_failed_step_is_an_error_until_a_state_is_loaded(world: None) -> None:
    """A program that catches the first error would train with old parameters of other ranks."""
    ddp = managed()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    state = optimizer.state_dict()

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = optimizer.register_step_post_hook(fail)
    with pytest.raises(ArithmeticError):
        step(ddp, optimizer)
    hook.remove()
    for _ in range(2):
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="an optimizer step has failed on this rank"):
            step(ddp, optimizer)
    optimizer.load_state_dict(state)
    step(ddp, optimizer)


class Failing(torch.optim.SGD):
    """Fails on rank 1, in its second step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.number += 1
        if self.number == 2 and dist.get_rank() == 1:
            raise ArithmeticError("a user's error")
        return super().step(closure)


def fails_in_a_step() -> str:
    """The error of this rank. Rank 1 catches its own, and goes on."""
    ddp = wrapped(SHARDED, network())
    optimizer = Failing(ddp.parameters())
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    try:
        for step in range(3):
            backward(ddp, step)
            with contextlib.suppress(ArithmeticError):
                optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_fails_in_a_step_tells_the_others(run_on_ranks: RUN) -> None:
    with inductor_config.patch(ddp_fusion=None):
        first, second = run_on_ranks(2, fails_in_a_step)
    assert "an optimizer step has failed on this rank" in second
    assert first.startswith("RanksDisagreeError"), first
    assert "rank 1 cannot finish its backward" in first


def leaves_out_a_step() -> int:
    """The number of the step in which this rank has an error; rank 1 leaves out the second one."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    ddp = wrapped(SHARDED, nn.Sequential(*layers), bucket_cap_mb=25)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    for step in range(6):
        try:
            ddp(torch.ones(2, 16)).sum().backward()
            if (step, dist.get_rank()) != (1, 1):
                optimizer.step()
        except RuntimeError:
            return step
        optimizer.zero_grad()
    return -1


def test_a_step_that_one_rank_leaves_out_is_no_gradient_of_the_next(run_on_ranks: RUN) -> None:
    """The gradients of an owner are as large as its parameters: one would be taken for the other,
    and no rank would notice that."""
    with inductor_config.patch(ddp_fusion=None):
        assert run_on_ranks(2, leaves_out_a_step) == [1, 2]
