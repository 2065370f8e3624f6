# ruff: noqa: E501  (a golden has one line for each call)
"""What the generated C++ of whole backwards does, under Inductor's default settings: gradients are
stored straight into their buckets, and launches and waits are still in their places."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from fusion_passes import FusionConfig, FusionReport
from fusion_passes.config import FusionMode
from testing.fresh import forget
from tests.support.call_sequence import call_sequence
from tests.support.codegen import Call, Place, read_calls
from tests.support.fake_world import fake_world
from tests.support.stores import check_stores
from workloads.models import MAKERS, TINY, subject

pytestmark = pytest.mark.xdist_group("generated code")  # Several tests share a compile.

WIDTH = 16


class Block(nn.Module):
    """A transformer block with an embedding before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = (
            part.view(*x.shape[:2], 2, WIDTH // 2).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(x)))


class FeedForward(nn.Module):
    """The feed-forward of a transformer, after a normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def convolutions() -> nn.Module:
    """Convolutions, whose library kernels allocate the weights' gradients."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()
    )


def made(name: str) -> tuple[nn.Module, Sequence[Tensor]]:
    """A model and a batch for it: one of this file's, or of the bench's."""
    if name == "block":
        return Block(), [torch.arange(16).view(2, 8)]
    if name == "deep":
        return nn.Sequential(*(FeedForward(64) for _ in range(3))), [torch.ones(2, 16, 64)]
    if name == "convolutions":
        return convolutions(), [torch.ones(2, 3, 8, 8)]
    if name in ("gpt2", "bert", "llama"):
        pytest.importorskip("transformers")
    of_bench = subject(name, TINY)
    return of_bench.build(), of_bench.batch(0)


@dataclass(frozen=True)
class Generated:
    """The code of a module's backwards, and the reports of the traced ones.

    Attributes:
        first: code compiled with the forward; a reducer launches its buckets.
        fresh: code of a traced backward without existing gradients.
        existing: code of a traced backward that accumulates into existing gradients.
        reports: reports of the traced ones, in this order.
        sent: number of elements that each of the three sends.
    """

    first: str
    fresh: str
    existing: str
    reports: tuple[FusionReport, ...]
    sent: tuple[int, ...]


TRACED = FusionConfig(backward_graph="compiled_autograd")


@functools.cache  # Tests share compiled code: they run in one process.
def generate(
    name: str,
    config: FusionConfig = TRACED,
    *,
    cap_mb: float = 0.004,  # Between the size of the largest gradients of a block and of all gradients.
    world_size: int = 1,
    **settings: Any,
) -> Generated:
    """Compile all backwards of a module. Asserts that the memory they send is written, and left
    alone until the wait."""
    forget()
    module, batch = made(name)
    # The code of a graph from the cache cannot be captured.
    settings |= {"ddp_fusion": config, "fx_graph_cache": False}
    with fake_world(world_size), inductor_config.patch(settings):
        ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
        compiled = torch.compile(ddp)

        def step() -> None:
            compiled(*batch).square().mean().backward()

        first = run_and_get_code(step)[1][-1]
        ddp.zero_grad()
        fresh, existing = (run_and_get_code(step)[1][-1] for _ in range(2))
        sent = tuple(check_stores(code) for code in (first, fresh, existing))
        found = Generated(first, fresh, existing, fusion_passes.reports(), sent)
    torch._dynamo.reset()
    return found


# --- Where gradients are stored ------------------------------------------------------------------


@pytest.mark.slow
def test_the_calls_of_a_transformers_backward() -> None:
    """The kernel that computes a gradient stores it in its bucket. Nothing runs after the waits."""
    assert_expected_inline(
        call_sequence(generate("block").fresh),
        """\
mm -> A[0:1024]
generated -> A[1024:1040]
mm
mm -> A[1040:2064]
generated -> A[2064:2128]
launch A, sum
mm
mm -> B[0:256]
generated -> B[256:272]
mm
aten._scaled_dot_product_flash_attention_for_cpu_backward
mm -> B[272:1040]
generated -> B[1040:1088]
mm
generated -> B[1088:1104], B[1104:1120]
launch B, sum
generated -> C[0:512]
launch C, sum
wait for A
wait for B
wait for C
return B[1088:1104], B[272:1040], B[0:256], A[1040:2064], A[0:1024], A[1024:1040], A[2064:2128], B[256:272], B[1040:1088], B[1104:1120], C[0:512]
""",
    )


@pytest.mark.slow
def test_the_calls_of_the_backward_that_is_compiled_with_the_forward() -> None:
    """Each gradient is stored in its bucket; the reducer is notified of each bucket after its last
    gradient, and launches it."""
    assert_expected_inline(
        call_sequence(generate("block").first),
        """\
mm
fusion_passes.bucket
mm -> A[0:1024]
generated -> A[1024:1040]
mm
mm -> A[1040:2064]
generated -> A[2064:2128]
fusion_passes.mark_ready_ -> A
mm
fusion_passes.bucket
mm -> B[0:256]
aten._scaled_dot_product_flash_attention_for_cpu_backward
mm
generated -> B[256:272], B[1088:1104], B[1104:1120]
mm -> B[272:1040]
generated -> B[1040:1088]
fusion_passes.bucket
generated -> C[0:512]
fusion_passes.mark_ready_ -> B
fusion_passes.mark_ready_ -> C
return C[0:512], B[1088:1104], B[1104:1120], B[272:1040], B[1040:1088], B[0:256], B[256:272], A[1040:2064], A[2064:2128], A[0:1024], A[1024:1040]
""",
    )


def norms() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        pytest.param(partial(nn.Linear, 64, 64), (8,), marks=pytest.mark.each_torch),
        pytest.param(norms, (8,), marks=pytest.mark.slow),
        pytest.param(encoder, (2, 8), marks=pytest.mark.slow),
    ],
    ids=["linear", "norms", "encoder"],
)
def test_a_sum_over_rows_is_stored_by_its_own_kernel(
    make: Callable[[], nn.Module], rows: tuple[int, ...]
) -> None:
    """A bias's gradient is a view, ``[n]``, of a sum over rows, which AOTAutograd makes ``[1,
    n]``."""
    torch._dynamo.reset()
    x = torch.ones(*rows, 64)
    with fake_world(), inductor_config.patch(ddp_fusion=FusionConfig(), fx_graph_cache=False):
        module = make()
        compiled = torch.compile(DistributedDataParallel(module))

        def step() -> None:
            compiled(x).square().mean().backward()

        code = run_and_get_code(step)[1][-1]
        step()
        report = fusion_passes.report().modules[-1]
    torch._dynamo.reset()
    assert check_stores(code) == sum(parameter.numel() for parameter in module.parameters())
    allocated = [p.size for c in read_calls(code) if c.kind == "allocate" for p in c.writes]
    assert not [size for size in allocated if len(size) == 2 and size[0] == 1], "no sum apart"
    assert [bucket.copied for bucket in report.buckets] == [()] * len(report.buckets)
    assert report.stored == len([*module.parameters()])


@pytest.mark.slow
def test_existing_gradients_are_added_to_as_they_are_stored() -> None:
    """The calls are the same; one kernel per bucket writes the results."""
    generated = generate("block")
    calls = call_sequence(generated.fresh).replace("mm ->", "addmm ->")
    calls = re.sub(r"wait for (\w)\n", r"\g<0>generated(\1)\n", calls)
    calls = re.sub("return .*", "return what was given", calls)
    assert call_sequence(generated.existing) == calls


@pytest.mark.each_torch
def test_the_calls_of_convolutions() -> None:
    """One call copies the gradients that the library allocates; generated kernels scale the others
    when they store them. The copies are reported."""
    generated = generate("convolutions", cap_mb=25, world_size=2)
    assert_expected_inline(
        call_sequence(generated.fresh),
        """\
aten.convolution_backward
generated -> A[288:296], A[296:304]
aten.convolution_backward
generated -> A[0:288], A[304:520]
fusion_passes.store_ -> A
launch A, sum
wait for A
return A[296:304], A[528:532], A[0:288], A[288:296], A[520:528], A[304:520]
""",
    )
    report = generated.reports[0]
    (bucket,) = report.buckets
    reasons = dict(bucket.copied)
    library = "aten.convolution_backward cannot cast or scale its result"
    relaid = "aten.convolution_backward returns it in another layout"
    assert reasons["0.weight"] == reasons["3.weight"] == relaid
    assert reasons["0.bias"] == reasons["3.bias"] == library
    assert reasons["1.bias"] == "another node reads it too"
    assert "copied: 2: 0.bias, 3.bias" in re.sub(r"\s+", " ", fusion_passes.format_report(report))


@pytest.mark.slow
@pytest.mark.newest_torch
def test_averages_of_convolutions_come_back_as_they_were_sent() -> None:
    """Gradients have the layouts of the parameters: the library returns channels last, and a copy
    into that layout would be copied once more on the way to ``.grad``."""
    assert_expected_inline(
        call_sequence(generate("convolutions", cap_mb=25, world_size=2).first),
        """\
aten.convolution_backward
fusion_passes.bucket
generated -> A[288:296], A[296:304]
aten.convolution_backward
fusion_passes.store_ -> A
fusion_passes.mark_ready_ -> A
return A[304:520], A[520:528], A[296:304], A[288:296], A[0:288], A[528:532]
""",
    )


@pytest.mark.slow
def test_the_calls_in_a_smaller_dtype() -> None:
    """One call casts the results of matrix products, and one kernel casts and scales the reduced
    bucket."""
    generated = generate("block", replace(TRACED, reduce_dtype="bf16"), cap_mb=25)
    assert_expected_inline(
        call_sequence(generated.fresh),
        """\
mm
generated -> A[1024:1040]
mm
mm
generated -> A[2064:2128]
mm
mm
generated -> A[2384:2400]
mm
aten._scaled_dot_product_flash_attention_for_cpu_backward
mm
generated -> A[3168:3216]
mm
generated -> A[3216:3232], A[3232:3248], A[3248:3760]
fusion_passes.store_ -> A
launch A, sum
wait for A
generated(A)
return what was given
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("block", "concat", marks=pytest.mark.each_torch),
        pytest.param("block", "coalesced", marks=pytest.mark.newest_torch),
        pytest.param("convolutions", "coalesced", marks=pytest.mark.each_torch),
        *(
            pytest.param(name, mode, marks=pytest.mark.nightly)
            for name in MAKERS
            for mode in ("concat", "coalesced")
        ),
    ],
)
def test_every_element_is_stored(name: str, mode: FusionMode) -> None:
    generated = generate(name, replace(TRACED, mode=mode), cap_mb=0.004 if name == "block" else 25)
    parameters = sum(parameter.numel() for parameter in made(name)[0].parameters())
    for sent in generated.sent:
        # Without a bucket, gradients that libraries allocated are sent from there.
        assert sent == parameters if mode == "concat" else 0 < sent <= parameters
    if name == "block":
        assert all(bucket.copied == () for report in generated.reports for bucket in report.buckets)
        codes = (generated.first, generated.fresh, generated.existing)
        assert not any("fusion_passes.store_." in code for code in codes)


def test_what_a_pinned_kernel_gives_is_reported() -> None:
    """With small buckets, the first convolution is pinned after the launch of the other
    gradients."""
    report = generate("convolutions", cap_mb=1e-4).reports[0]
    assert len(report.buckets) > 1
    reasons = dict(item for bucket in report.buckets for item in bucket.copied)
    relaid = "aten.convolution_backward returns it in another layout"
    assert reasons["0.weight"] == reasons["3.weight"] == relaid


# --- When buckets are launched -------------------------------------------------------------------


def memory_of(places: Sequence[Place]) -> set[str]:
    return {place.memory for place in places}


def kernels_not_needed(calls: Sequence[Call]) -> list[Call]:
    """The library kernels directly before launches whose gradients do not need them: those after
    the last kernel that they need, and after the previous launch."""
    late = []
    for index, launch in enumerate(calls):
        needed = memory_of(launch.reads)
        for call in reversed(calls[:index] if launch.kind == "launch" else ()):
            gives = not needed.isdisjoint(memory_of(call.writes))
            if call.kind == "launch" or (gives and call.kind == "kernel"):
                break
            if gives:
                needed |= memory_of(call.reads)
            elif call.kind == "kernel":
                late.append(call)
    return late


@pytest.mark.slow
@pytest.mark.newest_torch
@pytest.mark.parametrize(
    ("mode", "reorders"),
    [("coalesced", False), pytest.param("concat", True, marks=pytest.mark.nightly)],
)
def test_launched_as_soon_as_the_last_gradient_exists(mode: FusionMode, reorders: bool) -> None:
    """This also holds if torch itself reorders for overlap; waits are after all computation."""
    config = replace(TRACED, mode=mode)
    generated = generate("deep", config, cap_mb=0.06, reorder_for_compute_comm_overlap=reorders)
    codes = (generated.fresh, generated.existing)
    for report, code in zip(generated.reports, codes, strict=True):
        calls = read_calls(code)
        assert kernels_not_needed(calls) == []
        launches = [call for call in calls if call.kind == "launch"]
        sizes = [len(bucket.parameters) for bucket in report.buckets]
        assert len(launches) == len(sizes) == report.collectives_after
        assert sum(sizes) == report.collectives_before
        assert mode == "concat" or [len(launch.reads) for launch in launches] == sizes
        assert max(sizes) > 1
        # With a single launch at the end, no kernel would be needless either.
        order = "".join(call.kind[0] for call in calls if call.kind in ("kernel", "launch", "wait"))
        assert len(re.findall("kl", order)) > len(sizes) / 2, order
        assert "w" not in order.rstrip("w"), order


@pytest.mark.slow
def test_the_order_is_lost_without_pinning_it() -> None:
    """The reason for the pass that pins the order: a version of the test above that fails."""
    unpinned = generate("deep", cap_mb=0.06, disabled_passes="PinOrder").fresh
    if not kernels_not_needed(read_calls(unpinned)):
        pytest.skip(f"torch {torch.__version__} keeps this model's order without being told")
