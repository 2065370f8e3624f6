"""A module keeps the flag that it was constructed under, whatever the flag's later value is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.reducer.reducer import REDUCER, reducer_of
from tests.install.torch_state import different
from tests.support.fake_world import one_rank, two_layers, without_kernels

X = torch.ones(2, 4)
TRACED = FusionConfig(backward_graph="compiled_autograd")


@pytest.fixture(autouse=True)
def _on_one_rank() -> Iterator[None]:
    with one_rank(), inductor_config.patch(fx_graph_cache=False):
        yield


def managed(flag: Any = "concat", **options: Any) -> DistributedDataParallel:
    """A module that was constructed under the flag, which is unset now."""
    with inductor_config.patch(ddp_fusion=flag):
        return DistributedDataParallel(two_layers(), **options)


@without_kernels()
def stored(ddp: DistributedDataParallel, forward: Callable[..., Any], steps: int = 3) -> list[int]:
    """Number of gradients in each step that were stored in their bucket; all others have a
    reason."""
    counts = []
    for _ in range(steps):
        ddp.zero_grad()
        forward(X).sum().backward()
        counts.append(reducer_of(ddp).record.num_stored)
    reducer = reducer_of(ddp)
    assert not reducer.record.why_copied(reducer.parameters.kinds)
    return counts


def test_what_was_compiled_before_the_flag_was_unset_goes_on() -> None:
    with inductor_config.patch(ddp_fusion="concat"):
        ddp = DistributedDataParallel(two_layers())
        forward = torch.compile(ddp)
    assert stored(ddp, forward) == [0, 4, 4]
    with torch.no_grad():
        forward(X)
    for flag in ("coalesced", None, "concat"):
        with inductor_config.patch(ddp_fusion=flag):
            assert stored(ddp, forward) == [4, 4, 4]
    communication: Any = reducer_of(ddp).queue.communication
    assert not communication.is_coalesced


def test_graphs_of_modules_of_one_structure_are_fused_as_each_was_to_be() -> None:
    modules = [
        managed(FusionConfig(mode=mode, backward_graph="compiled_autograd"))
        for mode in ("coalesced", "concat")
    ]
    for ddp in modules:
        assert stored(ddp, torch.compile(ddp)) == [0, 4, 4]
    assert [graph.mode for graph in fusion_passes.reports()] == ["coalesced", "concat"]


def test_a_backward_of_modules_of_two_modes_is_not_traced() -> None:
    """A graph is fused in one mode, and each module has its own."""
    modules = [
        managed(
            FusionConfig(mode=mode, backward_graph="compiled_autograd"),
            process_group=dist.new_group(),
        )
        for mode in ("coalesced", "concat")
    ]
    forwards = [torch.compile(ddp) for ddp in modules]
    for _ in range(2):
        (forwards[0](X) + forwards[1](X)).sum().backward()
    last = fusion_passes.report().backwards[-1]
    assert (last.reduced_in, last.count) == ("reducer", 1)
    assert last.because == "its modules were constructed with different modes of ddp_fusion"


def test_torchs_own_fusion_does_not_touch_a_traced_backward() -> None:
    """Torch's fusion is on again once the flag is unset, for modules with torch's Python
    reducer."""
    with inductor_config.patch(_fuse_ddp_communication=False):
        ddp = managed(TRACED)
        inductor_config._fuse_ddp_communication = True
        assert stored(ddp, torch.compile(ddp)) == [0, 4, 4]
    (report,) = fusion_passes.reports()
    assert (report.collectives_before, report.collectives_after) == (4, 1)


# --- Modules that are constructed without the flag -----------------------------------------------


def train(ddp: nn.Module) -> None:
    """Train for two steps: DDP rebuilds its buckets after the first."""
    for _ in range(2):
        ddp.zero_grad()
        torch.compile(ddp)(X).square().sum().backward()


def assert_trained_by_ddp(ddp: DistributedDataParallel) -> None:
    """Assert that DDP's C++ reducer averages the gradients of the module, without any part of the
    package."""
    assert REDUCER not in vars(ddp)
    train(ddp)
    train(expected := two_layers())
    found, wanted = ([p.grad for p in model.parameters()] for model in (ddp, expected))
    torch.testing.assert_close(found, wanted)
    assert ddp._get_ddp_logging_data()["iteration"] > 0, "the C++ reducer has averaged"


def test_a_module_without_the_flag_is_as_without_the_package() -> None:
    before = DistributedDataParallel(two_layers())
    beside = managed()
    alone = DistributedDataParallel(two_layers())
    assert different(before, alone) == set()
    assert_trained_by_ddp(alone)
    assert reducer_of(beside).steps == 0
    assert stored(beside, torch.compile(beside)) == [0, 4, 4]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))])
def test_a_copy_follows_the_flag_of_when_it_is_made(how: Callable[[Any], Any]) -> None:
    original = managed()
    for flag in (None, "coalesced"):
        with inductor_config.patch(ddp_fusion=flag):
            duplicate = how(original)
        if flag is None:
            assert_trained_by_ddp(duplicate)
        else:
            assert reducer_of(duplicate).module.config == FusionConfig(mode="coalesced")
            assert stored(duplicate, torch.compile(duplicate)) == [0, 4, 4]
    assert stored(original, torch.compile(original)) == [0, 4, 4]
