"""Launches and waits are still in their places in the code that Inductor generates, under its
default settings, with its reordering for peak memory on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch._inductor.config as inductor_config
from torch import Tensor, nn

from fusion_passes import FusionReport
from fusion_passes.config import FusionMode
from testing.codegen import Call, indices, read_calls
from testing.stores import check_stores
from tests.lowering.test_storage import TRACED, WIDTH, Block, Convolutions, Generated, generate

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("generated code")]


def kernels_not_needed(calls: Sequence[Call]) -> list[list[int]]:
    """For each launch, the library kernels in front of it that its gradients do not need, nor those
    of a launch before it: those behind the last one that they do."""
    kernels = indices(calls, "kernel")
    late, needed = [], 0
    for launch in indices(calls, "launch"):
        needed = max(needed, *(kernel for kernel in kernels if kernel in calls[launch].after))
        late.append([kernel for kernel in kernels if needed < kernel < launch])
    return late


def assert_launched_early_and_waited_for_late(calls: Sequence[Call], report: FusionReport) -> None:
    """One launch for each bucket, as soon as its last gradient exists."""
    launches, kernels = indices(calls, "launch"), indices(calls, "kernel")
    sizes = [len(bucket.parameters) for bucket in report.buckets]
    assert sum(sizes) == report.collectives_before
    assert len(launches) == len(sizes) == report.collectives_after > 2
    tensors = [1] * len(sizes) if report.mode == "concat" else sizes
    assert [len(calls[launch].reads) for launch in launches] == tensors
    assert kernels_not_needed(calls) == [[]] * len(sizes)
    # The invariant would hold for one launch at the end too: these are spread over the backward.
    before = [sum(kernel < launch for kernel in kernels) for launch in launches]
    assert len(set(before)) > len(sizes) / 2
    assert min(indices(calls, "wait")) > max(launches + kernels)


def assert_buckets_are_left_alone(calls: Sequence[Call]) -> None:
    """Each launch is waited for, and nothing touches what it sends before."""
    on_the_way: set[str] = set()
    arrived: set[str] = set()
    for call in calls:
        if call.kind == "launch":
            on_the_way |= call.reads
        elif call.kind == "wait":
            assert call.reads <= on_the_way, "a wait is for a launch, and only one is"
            on_the_way -= call.reads
            arrived |= call.reads
        else:
            assert not on_the_way & (call.reads | call.writes), call.text
    assert calls[-1].kind == "return"
    assert not on_the_way
    assert arrived


def assert_results_arrive_in_gradients(calls: Sequence[Call], count: int) -> None:
    """Existing ones, into which generated kernels write what was waited for."""
    gradients: set[str] = set()
    for index in indices(calls, "wait"):
        for result in calls[index].reads:
            copies = [call for call in calls[index + 1 :] if result in call.reads]
            assert copies, f"{result} is waited for, and not used"
            for copy in copies:
                assert copy.kind == "fused"
                assert all(name.startswith("arg") for name in copy.writes), "into .grad alone"
                gradients |= copy.writes
    assert len(gradients) == count


def check(generated: Generated) -> None:
    """All of it, for fresh gradients and for existing ones."""
    parameters = sum(parameter.numel() for parameter in Block().parameters())
    for code in (generated.first, generated.fresh, generated.existing):
        sent = check_stores(code)
        # Where there is no bucket, sums are sent from where they are.
        is_whole = generated.reports[0].mode == "concat"
        assert sent == parameters if is_whole else 0 < sent <= parameters
    fresh, existing = map(read_calls, (generated.fresh, generated.existing))
    for calls, report in zip((fresh, existing), generated.reports, strict=True):
        assert_launched_early_and_waited_for_late(calls, report)
        assert_buckets_are_left_alone(calls)
        assert all(bucket.copied == () for bucket in report.buckets)
    arrived = set().union(*(call.reads for call in fresh if call.kind == "wait"))
    assert arrived <= fresh[-1].reads, "fresh gradients are the results themselves"
    assert_results_arrive_in_gradients(existing, generated.reports[1].collectives_before)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("concat", marks=pytest.mark.each_torch),
        pytest.param("coalesced", marks=pytest.mark.newest_torch),
    ],
)
def test_a_transformers_backward(mode: FusionMode) -> None:
    check(generate(Block, replace(TRACED, mode=mode)))


@pytest.mark.nightly
def test_torchs_reordering_for_overlap_keeps_the_order() -> None:
    with inductor_config.patch(reorder_for_compute_comm_overlap=True):
        check(generate.__wrapped__(Block, TRACED))


@pytest.mark.parametrize("mode", ["coalesced", pytest.param("concat", marks=pytest.mark.nightly)])
def test_a_gradient_that_is_laid_out_anew_is_left_alone_too(mode: FusionMode) -> None:
    """The convolution's kernel gives its weight's gradient in channels-last, unlike the weight."""
    generated = generate(Convolutions, replace(TRACED, mode=mode))
    assert_buckets_are_left_alone(read_calls(generated.fresh))
    assert_buckets_are_left_alone(read_calls(generated.existing))


class GatedBlock(nn.Module):
    """A Llama's feed-forward: one kernel computes the gradients of both of its inner values."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def gated_blocks() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, WIDTH), GatedBlock(), GatedBlock())


def test_a_launch_does_not_split_what_inductor_fuses() -> None:
    """The first bucket is full between the gradients of ``up`` and ``gate``: the kernel that
    computes what both of their products read is not cut in two there."""
    generated = generate(gated_blocks, TRACED, cap_mb=0.007)
    calls = read_calls(generated.fresh)
    assert [len(bucket.parameters) for bucket in generated.reports[0].buckets] == [2, 2, 2, 1]
    assert calls[indices(calls, "launch")[0] + 1].kind == "kernel"


WRONG = """
cpp_fused_cat_0 = async_compile.cpp_pybinding(['const float*', 'float*'], '''...''')
cpp_fused_copy_1 = async_compile.cpp_pybinding(['const float*', 'float*'], '''...''')

    def call(self, args):
        buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = empty_strided_cpu((64, ), (1, ), torch.float32)
        cpp_fused_cat_0(buf0, buf1)
        buf2 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg2_1, out=buf2)
        torch.ops._c10d_functional.all_reduce_.default(buf1, 'sum', '0/ddp0')
        buf3 = reinterpret_tensor(buf1, (8, 8), (8, 1), 0)  # alias
        cpp_fused_copy_1(buf3, arg3_1)
        torch.ops._c10d_functional.wait_tensor.default(buf1)
        return (arg3_1, buf2, )
"""


def test_what_is_wrong_in_a_code_is_found() -> None:
    calls = read_calls(WRONG)
    kinds = ["kernel", "fused", "kernel", "launch", "fused", "wait", "return"]
    assert [call.kind for call in calls] == kinds
    assert kernels_not_needed(calls) == [[2]], "the second product was not to be waited for"
    with pytest.raises(AssertionError, match="cpp_fused_copy_1"):
        assert_buckets_are_left_alone(calls)
