"""A backward continues after its launches: no graph, and nothing between graphs, waits for a bucket
before all are launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.used_parameters import FoundUnused
from testing.models import fill_whole
from testing.scenarios.features.models import MODELS
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run

RUN = Callable[..., list[Any]]


def goes_on_beside_its_launches(mode: str, is_disabled: bool) -> None:
    """Rank 1 launches nothing before rank 0 has run all graphs, which have the same launches."""
    others, word = dist.new_group(), torch.zeros(1)

    def hear(_: Tensor) -> None:
        dist.recv(word, 0, others)

    def tell(_: Tensor) -> None:
        dist.send(word, 1, others)

    run = Run(is_fused=True, dtype=torch.float32, device=torch.device("cpu"))
    make = MODELS["disabled" if is_disabled else "in parts"]
    x = run.rows(2)[0]
    want = DistributedDataParallel(make(run))
    want(x).square().sum().backward()
    with inductor_config.patch(ddp_fusion=mode):
        ddp = run.ddp(make(run), bucket_cap_mb=1e-6)
        call = run.compile(ddp)
        backwards(run, ddp, call, 2)  # Buckets are rebuilt in the first backward.
        ddp.zero_grad()
        x.requires_grad_()
        y = call(x)
        if dist.get_rank():
            y.register_hook(hear)
        else:
            x.register_hook(tell)
        y.square().sum().backward()
    gradients, expected = ([p.grad for p in model.parameters()] for model in (ddp, want))
    torch.testing.assert_close(gradients, expected)
    dist.destroy_process_group(others)


@pytest.mark.parametrize(
    ("mode", "is_disabled"),
    [
        ("concat", False),
        ("coalesced", True),
        pytest.param("coalesced", False, marks=pytest.mark.nightly),
    ],
)
def test_a_backward_does_not_wait_for_what_was_launched_before(
    run_on_ranks: RUN, mode: str, is_disabled: bool
) -> None:
    run_on_ranks(2, goes_on_beside_its_launches, mode=mode, is_disabled=is_disabled)


class Used(nn.Module):
    """Uses one of its layers, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, takes: int) -> Tensor:
        for layer in self.layers[:takes]:
            x = layer(x)
        return x


def maps_between_buckets(takes: int) -> list[str]:
    """The launches of two modules on one group, and how often the host reads a used-parameter
    map."""
    told: list[str] = []
    launch, send_used = AllReduce.launch, FoundUnused.launch

    def bucket(self: AllReduce, *args: Any) -> Any:
        told.append("bucket")
        return launch(self, *args)

    def used(self: Any) -> None:
        told.append("map")
        send_used(self)
        counts, wait = self._launched
        self._launched = _Read(counts, told), wait

    with inductor_config.patch(ddp_fusion="concat"):
        first, second = (
            DistributedDataParallel(Used(), find_unused_parameters=True) for _ in range(2)
        )
        for step in range(2):
            loss = first(torch.ones(1, 2), takes).sum() + second(torch.ones(1, 2), takes).sum()
            if step:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(AllReduce, "launch", bucket)
                    patch.setattr(FoundUnused, "launch", used)
                    loss.backward()
            else:
                loss.backward()
    return told


class _Read:
    """A map that counts its reads."""

    def __init__(self, counts: Tensor, told: list[str]) -> None:
        self.counts, self.told = counts, told

    def tolist(self) -> list[int]:
        self.told.append("read")
        return self.counts.tolist()


@pytest.mark.parametrize("takes", [1, 2])
def test_the_used_map_is_launched_behind_the_last_bucket(run_on_ranks: RUN, takes: int) -> None:
    """The map is launched before another module's buckets. The host reads it if this rank has
    unused parameters."""
    reads = ["read"] * 2 if takes == 1 else []
    for told in run_on_ranks(2, maps_between_buckets, takes=takes):
        assert [each for each in told if each != "read"] == ["bucket", "map"] * 2
        assert [each for each in told if each == "read"] == reads


class Recomputed(nn.Module):
    """Exact. Everything is in reentrant checkpointing, which the walk does not see."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = fill_whole(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=True)


def in_another_order() -> None:
    """The gradients of one module are first on rank 0, those of the other module on rank 1."""
    models = [Recomputed(2), Recomputed(3)]
    with inductor_config.patch(ddp_fusion="concat"):
        ddps = [DistributedDataParallel(model) for model in models]
        for step in range(3):
            order = (0, 1) if dist.get_rank() == 0 else (1, 0)
            inputs = [torch.full((1, 2 + n), 1.0 + step + dist.get_rank()) for n in range(2)]
            for ddp in ddps:
                ddp.zero_grad()
            outputs = {n: ddps[n](inputs[n].requires_grad_()).sum() for n in order}
            (outputs[0] + outputs[1]).backward()
            for n, model in enumerate(models):
                averaged = inputs[n].detach().expand(2 + n, 2 + n).clone()
                dist.all_reduce(averaged, dist.ReduceOp.AVG)
                torch.testing.assert_close(model.layer.weight.grad, averaged, rtol=0, atol=0)


def test_modules_that_the_walk_does_not_see_launch_in_one_order(run_on_ranks: RUN) -> None:
    run_on_ranks(2, in_another_order)
