"""Launches and waits are still in their places in the code that Inductor generates, under its
default settings, with its reordering for peak memory on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import pipeline
from fusion_passes.report.journal import journal
from tests.support.codegen import call_sequence, indices
from tests.support.fake_world import fake_world

WIDTH = 64
CAP_MB = 0.1
"""A block's two weights are 64 KiB each: a bucket holds about one block."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    torch._dynamo.reset()
    journal.clear()
    # The code of a cached graph cannot be caught.
    with fake_world(), inductor_config.patch(ddp_fusion=None, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def _backward_codes(mode: str, steps: int = 1) -> list[list[tuple[str, str]]]:
    """The calls of the backwards that are compiled in the steps: with fresh gradients, then with
    existing ones."""
    inductor_config.ddp_fusion = mode
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*[Block() for _ in range(3)]), bucket_cap_mb=CAP_MB)
    compiled = torch.compile(ddp)

    def step() -> None:
        compiled(torch.ones(32, WIDTH)).square().mean().backward()

    return [call_sequence(run_and_get_code(step)[1][-1]) for _ in range(steps)]


def _kernels_before(sequence: list[tuple[str, str]], kind: str) -> list[int]:
    """How many matrix products have run before each call of a kind."""
    kernels = indices(sequence, "kernel")
    return [sum(kernel < index for kernel in kernels) for index in indices(sequence, kind)]


@pytest.mark.parametrize("mode", ["concat", "coalesced"])
def test_launched_when_the_last_gradient_exists_and_waited_for_at_the_end(mode: str) -> None:
    fresh, existing = _backward_codes(mode, steps=2)
    report = fusion_passes.reports()[0]
    assert [len(bucket.parameters) for bucket in report.buckets] == [3, 6, 6, 3]
    for sequence in (fresh, existing):
        # Going back, a block is four products: weight and input of `down`, weight and input of
        # `up`. A bucket ends with the weight of `up`, the last one with a LayerNorm.
        assert _kernels_before(sequence, "launch") == [3, 7, 11, 12]
        assert len(indices(sequence, "kernel")) == 12
        assert min(indices(sequence, "wait")) > max(indices(sequence, "launch"))


def test_each_bucket_is_waited_for_before_its_results_are_copied() -> None:
    _, existing = _backward_codes("concat", steps=2)
    tail = existing[max(indices(existing, "launch")) + 1 :]
    assert [kind for kind, _ in tail] == ["wait", "copy"] * 4 + ["return"]
    waited: set[str] = set()
    for kind, names in tail:
        if kind == "wait":
            waited.add(names)
        elif kind == "copy":
            read = {name for name in names.split(", ") if name.startswith("buf")}
            assert read <= waited


def test_number_of_launches_is_that_of_the_buckets() -> None:
    (sequence,) = _backward_codes("coalesced")
    report = fusion_passes.reports()[0]
    launches = [names for kind, names in sequence if kind == "launch"]
    assert [names.count("buf") for names in launches] == [len(b.parameters) for b in report.buckets]
    assert len(indices(sequence, "wait")) == report.collectives_before


def test_the_order_is_lost_without_holding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there is a pass that holds the placement: the twin that makes the tests above fail."""
    passes_for = pipeline.passes_for
    monkeypatch.setattr(pipeline, "passes_for", lambda *args: passes_for(*args)[:-1])
    (sequence,) = _backward_codes("concat")
    assert _kernels_before(sequence, "launch") != [3, 7, 11, 12]


def test_torchs_reordering_for_overlap_keeps_the_order() -> None:
    with inductor_config.patch(reorder_for_compute_comm_overlap=True):
        (sequence,) = _backward_codes("concat")
    assert _kernels_before(sequence, "launch") == [3, 7, 11, 12]
    assert min(indices(sequence, "wait")) > max(indices(sequence, "launch"))
