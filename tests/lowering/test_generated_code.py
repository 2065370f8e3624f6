"""Launches and waits are still in their places in the code that Inductor generates, under its
default settings, with its reordering for peak memory on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.config import FusionMode
from fusion_passes.reporting.graphs import compile_log
from testing.codegen import Call, Kind, Place, read_calls
from testing.fake_world import fake_world
from testing.stores import check_launches

# Some compiles serve many tests: in one process.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("generated code")]

WIDTH = 64
TOKENS = 16
CAP_MB = 0.06
"""Near the size of a weight: three blocks make seven buckets."""


class Block(nn.Module):
    """A transformer's feed-forward behind a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Backwards:
    """A module's backwards as they were compiled: calls in order, and what the package says."""

    report: fusion_passes.FusionReport
    fresh: list[Call]
    existing: list[Call]


def compile_backwards(
    mode: FusionMode, model: nn.Module | None = None, steps: int = 2, cap_mb: float = CAP_MB
) -> Backwards:
    """The backward of a model, else of three blocks, that makes fresh gradients; with two steps,
    the one behind it too, that writes into existing ones."""
    torch._dynamo.reset()
    compile_log.reset()
    # The code of a graph that comes from the cache cannot be caught.
    flag = FusionConfig(mode=mode, backward_graph="compiled_autograd")
    with fake_world(), inductor_config.patch(ddp_fusion=flag, fx_graph_cache=False):
        model = model or nn.Sequential(*(Block() for _ in range(3)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        compiled = torch.compile(ddp)

        def step() -> None:
            compiled(torch.ones(2, TOKENS, WIDTH)).square().mean().backward()

        step()  # The first one is not traced.
        ddp.zero_grad()
        codes = [run_and_get_code(step)[1][-1] for _ in range(steps)]
        reports = fusion_passes.reports()
    torch._dynamo.reset()
    assert len(reports) == steps
    sent = [[replace(bucket, copied=()) for bucket in _unplaced(report)] for report in reports]
    assert all(buckets == sent[0] for buckets in sent)
    graphs = [read_calls(code) for code in codes]
    for calls in graphs:
        check_launches(calls)
    return Backwards(reports[0], graphs[0], graphs[-1])


@pytest.fixture(scope="module")
def backwards() -> Backwards:
    """Of ``"coalesced"``: each call of the other mode is in a golden of test_storage.py."""
    backwards = compile_backwards("coalesced")
    reports = fusion_passes.reports()
    assert all(_unplaced(report) == _unplaced(backwards.report) for report in reports)
    return backwards


def _unplaced(report: fusion_passes.FusionReport) -> list[fusion_passes.BucketReport]:
    """The buckets without what the nodes around them are called in one graph."""
    nowhere: dict[str, Any] = {"waited": "", "overlapped": 0, "following": 0}
    return [replace(bucket, **nowhere) for bucket in report.buckets]


@pytest.fixture(params=["fresh", "existing"])
def calls(request: pytest.FixtureRequest, backwards: Backwards) -> list[Call]:
    """With fresh gradients, then with existing ones."""
    return getattr(backwards, request.param)


def indices(calls: Sequence[Call], kind: Kind) -> list[int]:
    """Where the calls of a kind are."""
    return [index for index, call in enumerate(calls) if call.kind == kind]


def memory_of(places: Sequence[Place]) -> set[str]:
    return {place.memory for place in places}


def dependencies(calls: Sequence[Call]) -> list[set[int]]:
    """For each call the indices of those that it depends on, directly or through others. One too
    many where memory is used again, never one too few."""
    same: dict[str, str] = {}
    writers: dict[str, set[int]] = {}
    found: list[set[int]] = []
    for index, call in enumerate(calls):
        reads, writes = (
            {same.get(memory, memory) for memory in memory_of(places)}
            for places in (call.reads, call.writes)
        )
        if call.kind == "reuse":
            (same[call.writes[0].memory],) = reads
        # What a kernel writes to is taken for read; a collective works in place.
        touched = reads | writes if call.kind in ("kernel", "fused") else reads
        direct = {writer for name in touched for writer in writers.get(name, ())}
        found.append(direct.union(*(found[writer] for writer in direct)))
        for name in touched if call.kind in ("launch", "wait") else writes:
            writers.setdefault(name, set()).add(index)
    return found


def kernels_not_needed(calls: Sequence[Call]) -> list[list[int]]:
    """For each launch, the library kernels in front of it that its gradients do not need, nor those
    of a launch before it: those behind the last one that they do."""
    kernels, after = indices(calls, "kernel"), dependencies(calls)
    late, needed = [], 0
    for launch in indices(calls, "launch"):
        needed = max(needed, *(kernel for kernel in kernels if kernel in after[launch]))
        late.append([kernel for kernel in kernels if needed < kernel < launch])
    return late


@pytest.mark.newest_torch
def test_launched_as_soon_as_the_last_gradient_exists(
    backwards: Backwards, calls: list[Call]
) -> None:
    buckets = len(backwards.report.buckets)
    assert kernels_not_needed(calls) == [[]] * buckets
    # The invariant would hold for one launch at the end too: these are spread over the backward.
    kernels = indices(calls, "kernel")
    before = [sum(kernel < at for kernel in kernels) for at in indices(calls, "launch")]
    assert len(set(before)) > buckets / 2
    assert before[0] == 1, "the first weight's gradient fills the first bucket"


@pytest.mark.newest_torch
def test_one_launch_for_each_bucket(backwards: Backwards, calls: list[Call]) -> None:
    launches = [calls[index] for index in indices(calls, "launch")]
    report = backwards.report
    assert len(launches) == len(report.buckets) == report.collectives_after
    sizes = [len(bucket.parameters) for bucket in report.buckets]
    assert max(sizes) > 1
    assert sum(sizes) == report.collectives_before
    assert [len(launch.reads) for launch in launches] == sizes


@pytest.mark.newest_torch
def test_waited_for_behind_the_last_launch_and_kernel(calls: list[Call]) -> None:
    busy = max(indices(calls, "launch") + indices(calls, "kernel"))
    assert min(indices(calls, "wait")) > busy


class Patches(nn.Module):
    """Images to vectors, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(2, 4, TOKENS, TOKENS).contiguous(memory_format=torch.channels_last)
        return self.patches(images).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("mode", ["coalesced", pytest.param("concat", marks=pytest.mark.nightly)])
def test_a_gradient_that_is_laid_out_anew_is_left_alone_too(mode: FusionMode) -> None:
    """The convolution's kernel gives its weight's gradient in channels-last, unlike the weight."""
    model = nn.Sequential(Patches(), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    compile_backwards(mode, model)  # It checks that.


@pytest.mark.newest_torch
def test_results_arrive_in_the_gradients(backwards: Backwards) -> None:
    waits = [call for call in backwards.fresh if call.kind == "wait"]
    arrived = set().union(*(memory_of(call.reads) for call in waits))
    returned = memory_of(backwards.fresh[-1].reads)
    assert arrived <= returned, "fresh gradients are the results themselves"

    existing = backwards.existing
    gradients: set[str] = set()
    for index in indices(existing, "wait"):
        (result,) = memory_of(existing[index].reads)
        copies = [call for call in existing[index + 1 :] if result in memory_of(call.reads)]
        assert copies, f"{result} is waited for, and not used"
        for copy in copies:
            assert copy.kind == "fused"
            written = memory_of(copy.writes)
            assert all(name.startswith("arg") for name in written), "into .grad alone"
            gradients |= written
    assert len(gradients) == backwards.report.collectives_before


def test_the_order_is_lost_without_pinning_it() -> None:
    """Why there is a pass that pins the order: the twin that makes the tests above fail."""
    with inductor_config.patch(disabled_passes="PinOrder"):
        unpinned = compile_backwards("concat", steps=1).fresh
    if not any(kernels_not_needed(unpinned)):
        pytest.skip(f"torch {torch.__version__} keeps this model's order without being told")


class GatedBlock(nn.Module):
    """A Llama's feed-forward: one kernel computes the gradients of both of its inner values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_a_launch_does_not_split_what_inductor_fuses() -> None:
    """The first bucket is full between the gradients of ``up`` and ``gate``: the kernel that
    computes what both of their products read is not cut in two there."""
    model = nn.Sequential(GatedBlock(), GatedBlock())
    backwards = compile_backwards("concat", model, steps=1, cap_mb=0.1)
    calls = backwards.fresh
    assert [len(bucket.parameters) for bucket in backwards.report.buckets] == [2, 2, 2]
    behind = calls[indices(calls, "launch")[0] :]
    computed = [call.kind for call in behind if call.kind in ("kernel", "fused")]
    assert computed[0] == "kernel"


@pytest.mark.nightly
def test_torchs_reordering_for_overlap_keeps_the_order() -> None:
    with inductor_config.patch(reorder_for_compute_comm_overlap=True):
        backwards = compile_backwards("concat", steps=1)
    test_launched_as_soon_as_the_last_gradient_exists(backwards, backwards.fresh)
    test_waited_for_behind_the_last_launch_and_kernel(backwards.fresh)


WRONG = """
    def call(self, args):
        buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf2 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg2_1, out=buf2)
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0/ddp0')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        return (buf0, buf2, )
"""


def test_a_product_that_a_launch_need_not_wait_for_is_found() -> None:
    assert kernels_not_needed(read_calls(WRONG)) == [[3]]
