"""A backward continues after its launches: no graph, and nothing between graphs, waits for a bucket
before all are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.used_parameters import FoundUnused
from testing.processes import RUN
from testing.scenarios.features.models import MODELS
from testing.scenarios.loop import backwards
from testing.scenarios.run import Run


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


class _Read:
    """A map that counts its reads."""

    def __init__(self, counts: Tensor, told: list[str]) -> None:
        self.counts, self.told = counts, told

    def tolist(self) -> list[int]:
        self.told.append("read")
        return self.counts.tolist()


@pytest.mark.usefixtures("fused_rank")
@pytest.mark.parametrize("takes", [1, 2])
def test_the_used_map_is_launched_behind_the_last_bucket(
    monkeypatch: pytest.MonkeyPatch, takes: int
) -> None:
    """The map is launched before another module's buckets. The host reads it if this rank has
    unused parameters."""
    told: list[str] = []
    launch, launch_map = AllReduce.launch, FoundUnused.launch

    def note_bucket(self: AllReduce, *args: Any) -> Any:
        told.append("bucket")
        return launch(self, *args)

    def note_map(self: Any) -> None:
        told.append("map")
        launch_map(self)
        counts, wait = self._launched
        self._launched = _Read(counts, told), wait

    modules = [DistributedDataParallel(Used(), find_unused_parameters=True) for _ in range(2)]

    def backward() -> None:
        torch.stack([ddp(torch.ones(1, 2), takes).sum() for ddp in modules]).sum().backward()

    backward()
    monkeypatch.setattr(AllReduce, "launch", note_bucket)
    monkeypatch.setattr(FoundUnused, "launch", note_map)
    backward()
    reads = ["read"] * 2 if takes == 1 else []
    assert [each for each in told if each != "read"] == ["bucket", "map"] * 2
    assert [each for each in told if each == "read"] == reads
