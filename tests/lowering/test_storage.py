# ruff: noqa: E501  (a golden has one line for each call)
"""Where the generated C++ stores the gradients of a small transformer: straight into their buckets,
under Inductor's default settings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from fusion_passes.reporting.graphs import compile_log
from testing.fake_world import fake_world
from testing.stores import check_stores
from tests.support.call_sequence import call_sequence

pytestmark = pytest.mark.xdist_group("generated code")  # Some compiles serve many tests.

WIDTH = 16
CAP_MB = 0.004
"""Between the size of the largest gradients and of all of them."""


class Block(nn.Module):
    """A transformer's, with an embedding in front of it."""

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


class Convolutions(nn.Module):
    """Whose weights' gradients are allocated by the library that computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@dataclass(frozen=True)
class Generated:
    """The code of a module's backwards, and what the package says of those that were traced.

    Attributes:
        first: compiled with the forward; a reducer launches its buckets.
        fresh: traced, and makes gradients.
        existing: traced, and adds to the gradients that there are.
        reports: of the traced ones, in this order.
    """

    first: str
    fresh: str
    existing: str
    reports: tuple[FusionReport, ...]


TRACED = FusionConfig(backward_graph="compiled_autograd")
BATCHES: dict[object, Tensor] = {Convolutions: torch.ones(2, 3, 8, 8)}


@functools.cache  # Tests share what is compiled: they run in one process.
def generate(
    make: Callable[[], nn.Module],
    config: FusionConfig,
    *,
    cap_mb: float = CAP_MB,
    world_size: int = 1,
) -> Generated:
    """Compile all backwards of a module."""
    torch._dynamo.reset()
    compile_log.reset()
    batch = BATCHES.get(make, torch.arange(16).view(2, 8))
    # The code of a graph that comes from the cache cannot be caught.
    with fake_world(world_size), inductor_config.patch(ddp_fusion=config, fx_graph_cache=False):
        ddp = DistributedDataParallel(make(), bucket_cap_mb=cap_mb)
        compiled = torch.compile(ddp)

        def step() -> None:
            compiled(batch).square().mean().backward()

        first = run_and_get_code(step)[1][-1]
        ddp.zero_grad()
        fresh, existing = (run_and_get_code(step)[1][-1] for _ in range(2))
        found = Generated(first, fresh, existing, fusion_passes.reports())
    torch._dynamo.reset()
    return found


@pytest.mark.slow
def test_the_calls_of_a_transformers_backward() -> None:
    """Each gradient is stored where it is sent by the kernel that computes it. Nothing is behind
    the waits."""
    assert_expected_inline(
        call_sequence(generate(Block, TRACED).fresh),
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
    """Each gradient is stored where it is sent; a reducer is told of each bucket when its last one
    is there, and launches it."""
    assert_expected_inline(
        call_sequence(generate(Block, TRACED).first),
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
generated -> B[256:272]
aten._scaled_dot_product_flash_attention_for_cpu_backward
mm
mm -> B[272:1040]
generated -> B[1040:1088]
fusion_passes.bucket
generated -> C[0:512], B[1088:1104], B[1104:1120]
fusion_passes.mark_ready_ -> B
fusion_passes.mark_ready_ -> C
return C[0:512], B[1088:1104], B[1104:1120], B[272:1040], B[1040:1088], B[0:256], B[256:272], A[1040:2064], A[2064:2128], A[0:1024], A[1024:1040]
""",
    )


@pytest.mark.slow
def test_existing_gradients_are_added_to_as_they_are_stored() -> None:
    """By the same calls, and written by one kernel for each bucket."""
    generated = generate(Block, TRACED)
    *fresh, _ = call_sequence(generated.fresh).splitlines()
    added = [line.replace("mm ->", "addmm ->") for line in fresh]
    assert call_sequence(generated.existing).splitlines() == [*added, "return what was given"]


@pytest.mark.each_torch
def test_the_calls_of_convolutions() -> None:
    """One call copies what the library allocates; all that is stored by generated kernels is
    scaled there. What was copied is reported."""
    generated = generate(Convolutions, TRACED, cap_mb=25, world_size=2)
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
    library = "aten.convolution_backward neither casts nor scales its result"
    relaid = "aten.convolution_backward gives it in another layout"
    assert reasons["layers.0.weight"] == reasons["layers.3.weight"] == relaid
    assert reasons["layers.0.bias"] == reasons["layers.3.bias"] == library
    assert reasons["layers.1.bias"] == "something else reads it too"
    assert "copied: 2: layers.0.bias, layers.3.bias" in re.sub(
        r"\s+", " ", fusion_passes.format_report(report)
    )


@pytest.mark.slow
@pytest.mark.newest_torch
def test_averages_of_convolutions_come_back_as_they_were_sent() -> None:
    """In the layouts of the parameters: the library gives gradients channels last, and a copy into
    that layout would be copied once more on the way to ``.grad``."""
    assert_expected_inline(
        call_sequence(generate(Convolutions, TRACED, cap_mb=25, world_size=2).first),
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
    """One call casts what matrix products give, and one kernel casts and scales what comes back."""
    generated = generate(Block, replace(TRACED, reduce_dtype="bf16"), cap_mb=25)
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
return what was given
""",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("concat", marks=pytest.mark.each_torch),
        pytest.param("coalesced", marks=pytest.mark.newest_torch),
    ],
)
def test_nothing_is_copied_and_every_element_is_stored(mode: FusionMode) -> None:
    generated = generate(Block, replace(TRACED, mode=mode))
    for report in generated.reports:
        assert len(report.buckets) > 1
        assert all(bucket.copied == () for bucket in report.buckets)
    parameters = sum(parameter.numel() for parameter in Block().parameters())
    for code in (generated.first, generated.fresh, generated.existing):
        assert not re.search(r"fusion_passes\.store_\.", code)
        # Where there is no bucket, sums are sent from where they are.
        sent = check_stores(code)
        assert sent == parameters if mode == "concat" else 0 < sent <= parameters


def test_what_a_pinned_kernel_gives_is_reported() -> None:
    """In small buckets, the first convolution is pinned behind the launch of the others."""
    report = generate(Convolutions, TRACED, cap_mb=1e-4).reports[0]
    assert len(report.buckets) > 1
    reasons = dict(item for bucket in report.buckets for item in bucket.copied)
    relaid = "aten.convolution_backward gives it in another layout"
    assert reasons["layers.0.weight"] == reasons["layers.3.weight"] == relaid
