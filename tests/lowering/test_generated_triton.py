"""What a GPU runs: the wrapper and the Triton kernels of fused backwards for an H100, generated and
compiled without one. Nothing is run here, and nothing measured."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from expecttest import assert_expected_inline
from torch._inductor.codegen import cpp_wrapper_gpu

from fusion_passes import FusionConfig
from testing.codegen import launched_kernels, read_kernels
from testing.cuda_backwards import (
    NAMES,
    autocast_step,
    biases,
    biases_on_hosts,
    block_inputs,
    convolution_step,
    given,
    pointwise,
    step_on_cards,
)
from testing.cuda_calls import call_lines
from testing.cuda_codegen import CardCompiler, Generated
from testing.graphs import tensor

pytestmark = pytest.mark.newest_torch


@pytest.fixture(scope="module")
def step(compiler: CardCompiler) -> Generated:
    return compiler.generate(step_on_cards, block_inputs())


def text(calls: list[str]) -> str:
    lines = [textwrap.fill(call, 96, subsequent_indent="    ") for call in calls]
    return "\n".join(lines) + "\n"


def test_products_and_reductions_are_stored_in_the_bucket(step: Generated) -> None:
    assert step.copies == ({},)
    assert_expected_inline(
        text(call_lines(step.code, NAMES)),
        """\
triton_per(x, gain, shift) -> t0, t1, t2
mm(t2, up.T) -> t3
triton_poi(up_bias, t3) -> t4
mm(t4, down.T) -> t5
bucket = empty(526080, torch.float32)
triton_per(t5, x, down_bias) -> t5, bucket[0: 1, 256]
mm(t5, down) -> t6
mm(t5.T, t4) -> bucket[256: 256, 1024]
triton_per(t6, up_bias, t3) -> t6, bucket[262400: 1, 1024]
mm(t6, up) -> t5
mm(t6.T, t2) -> bucket[263424: 1024, 256]
triton_per(t5, x, t0, t1) -> bucket[525568: 256], bucket[525824: 256]
all_reduce_(bucket, 'avg', 'cards')
wait_tensor(bucket)
return bucket[0: 256], bucket[256: 256, 1024], bucket[262400: 1024], bucket[263424: 1024, 256],
    bucket[525568: 256], bucket[525824: 256]
""",
    )


def reading_buckets(calls: list[str]) -> list[str]:
    """The calls that read a bucket or a place in it. Agreeing only says that it does."""
    reading = [call for call in calls if "bucket" in call.partition(" -> ")[0]]
    return [call for call in reading if "empty" not in call and not call.startswith("agree_(")]


def test_without_the_passes_there_is_a_kernel_for_each_gradient(compiler: CardCompiler) -> None:
    """The twin of the tests above."""
    calls = call_lines(compiler.generate(step_on_cards, block_inputs(), fused=False).code)
    assert sum(call.startswith("all_reduce_") for call in calls) == len(NAMES) - 1
    assert not any("[" in call for call in calls), "nothing is stored in a place"


def test_scaled_by_one_kernel_where_the_collective_does_not_average(compiler: CardCompiler) -> None:
    generated = compiler.generate(step_on_cards, block_inputs(torch.float16))
    scaling, launch, wait, _ = reading_buckets(call_lines(generated.code))
    assert scaling == "triton_poi(bucket) -> bucket"
    assert launch == "all_reduce_(bucket, 'sum', 'cards')"
    assert wait == "wait_tensor(bucket)"
    # Inductor times a kernel's configurations on copies of what it says is changed in place.
    source = read_kernels(generated.code)[launched_kernels(generated.code)[-1]]
    assert "'mutated_arg_names': ['in_ptr0', 'out_ptr0']" in source


def test_scaled_by_the_kernels_that_store(compiler: CardCompiler) -> None:
    divided = FusionConfig(scaling="bucket")
    inputs = [tensor(64, 128), tensor(64, 96)]
    generated = compiler.generate(biases_on_hosts, inputs, config=divided)
    launch, wait, _ = reading_buckets(call_lines(generated.code))
    assert launch == "all_reduce_(bucket, 'sum', 'hosts')"
    assert wait == "wait_tensor(bucket)"
    assert all("tl.full([1, 1], 0.25," in body for body in read_kernels(generated.code).values())


def test_a_bias_gradient_is_stored_by_the_kernel_that_sums_it(compiler: CardCompiler) -> None:
    generated = compiler.generate(biases, [tensor(64, 128), tensor(64, 96)])
    first, _ = read_kernels(generated.code).values()
    assert_expected_inline(
        text(call_lines(generated.code)),
        """\
bucket = empty(224, torch.float32)
triton_per(arg0) -> bucket[0: 128]
triton_per(arg1) -> bucket[128: 96]
all_reduce_(bucket, 'avg', 'cards')
wait_tensor(bucket)
return bucket[0: 128], bucket[128: 96]
""",
    )
    assert first.count("tl.sum(") == first.count("tl.store(") == 1


def widest_stores(generated: Generated) -> list[int]:
    """How many values the widest store of each launched kernel stores."""
    return [
        max(
            int(width or 1)
            for width in re.findall(r"st\.global(?:\.v(\d))?\.", generated.ptx[name])
        )
        for name in launched_kernels(generated.code)
    ]


def test_stores_into_aligned_places_are_as_wide_as_others(compiler: CardCompiler) -> None:
    inputs = [tensor(64, 128), tensor(1000, 12), tensor(130), tensor(130)]
    fused = compiler.generate(pointwise, inputs)
    unfused = compiler.generate(pointwise, inputs, fused=False)
    assert_expected_inline(
        text(call_lines(fused.code)),
        """\
bucket = empty(20452, torch.float32)
triton_poi(arg0) -> bucket[0: 64, 128]
triton_poi(arg1) -> bucket[8192: 1000, 12]
triton_poi(arg2) -> bucket[20192: 130]
triton_poi(arg3) -> bucket[20322: 130]
all_reduce_(bucket, 'avg', 'cards')
wait_tensor(bucket)
return bucket[0: 64, 128], bucket[8192: 1000, 12], bucket[20192: 130], bucket[20322: 130]
""",
    )
    assert widest_stores(unfused) == [2, 2, 2, 2]
    # The last place is not aligned: the one before it has no round size.
    assert widest_stores(fused) == [2, 2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_compile_for_the_card(compiler: CardCompiler, dtype: torch.dtype) -> None:
    generated = compiler.generate(step_on_cards, block_inputs(dtype))
    assert {*generated.ptx} == {*launched_kernels(generated.code)}
    assert all(".target sm_90" in ptx for ptx in generated.ptx.values())


def test_what_libraries_allocate_is_copied_by_one_kernel(compiler: CardCompiler) -> None:
    weights = [tensor(8, 3, 3, 3), tensor(16, 8, 3, 3), tensor(5, 16, 1, 1)]
    generated = compiler.generate(convolution_step, [tensor(2, 3, 16, 16), *weights])
    assert {*generated.copies[0]} == {0, 1, 2}
    assert_expected_inline(
        text(call_lines(generated.code)),
        """\
convolution(arg0, arg1) -> t0
convolution(t0, arg2) -> t1
convolution(t1, arg3) -> t2
triton_poi(t2) -> t2
convolution_backward(t2, t1, arg3) -> t3
convolution_backward(t3[0], t0, arg2) -> t4
convolution_backward(t4[0], arg0, arg1) -> t5
bucket = empty(1448, torch.float32)
triton_for(t3[1], t4[1], t5[1]) -> bucket[0: 80], bucket[80: 1152], bucket[1232: 216]
all_reduce_(bucket, 'avg', 'cards')
wait_tensor(bucket)
return bucket[0: 5, 16, 1, 1], bucket[80: 16, 8, 3, 3], bucket[1232: 8, 3, 3, 3]
""",
    )


def test_what_inductor_lays_out_anew_is_copied_by_one_kernel_too(compiler: CardCompiler) -> None:
    """Inductor computes such convolutions with channels last; gradients are contiguous."""
    weights = [tensor(128, 64, 3, 3), tensor(128, 128, 3, 3), tensor(64, 128, 1, 1)]
    generated = compiler.generate(convolution_step, [tensor(2, 64, 16, 16), *weights])
    (store,) = (call for call in call_lines(generated.code) if "-> bucket[" in call)
    assert store.startswith("triton_for(")
    assert widest_stores(generated)[-1] == 4


def test_inputs_of_several_sizes_are_copied_by_one_kernel(compiler: CardCompiler) -> None:
    inputs = [tensor(64, 64), tensor(7), tensor(33, 5), tensor(64, 64, dtype=torch.bfloat16)]
    generated = compiler.generate(given, inputs)
    stores = [call for call in call_lines(generated.code) if " -> " in call]
    assert_expected_inline(
        text(stores),
        """\
triton_for(arg0, arg1, arg2) -> bucket0[0: 4096], bucket0[4096: 7], bucket0[4103: 165]
triton_poi(arg3) -> bucket1
""",
    )
    assert max(widest_stores(generated)) == 4


def widest_accesses(ptx: str) -> tuple[int, int]:
    """How many bytes the widest load and the widest store of a kernel move."""

    def widest(what: str) -> int:
        found = re.findall(rf"{what}\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
        return max(int(count or 1) * int(bits) // 8 for count, bits in found)

    return widest("ld"), widest("st")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_copies_move_16_bytes_a_thread_and_small_ones_share_a_kernel(
    compiler: CardCompiler, dtype: torch.dtype
) -> None:
    """Shapes of half of a transformer's block, as the GPU's part ``copies`` times them."""
    shapes = [(1024, 1024), (1024,), (4096, 1024), (4096,)]
    generated = compiler.generate(given, [tensor(*shape, dtype=dtype) for shape in shapes])
    stores = [call for call in call_lines(generated.code) if "-> bucket[" in call]
    assert_expected_inline(
        text(stores),
        """\
triton_poi(arg0) -> bucket[0: 1024, 1024]
triton_for(arg1, arg3) -> bucket[1048576: 1024], bucket[5243904: 4096]
triton_poi(arg2) -> bucket[1049600: 4096, 1024]
""",
    )
    for name in launched_kernels(generated.code):
        if name.startswith("triton_poi"):
            assert widest_accesses(generated.ptx[name]) == (16, 16)


def test_large_products_are_cast_by_kernels_of_their_own(compiler: CardCompiler) -> None:
    """The twin of the test above: a gradient of one row less is cast with others."""
    weights = [tensor(1024, 64), tensor(1024, 1024), tensor(1023, 1024)]
    generated = compiler.generate(autocast_step, [tensor(32, 64), *weights])
    stores = [call for call in call_lines(generated.code) if "-> bucket[" in call]
    assert_expected_inline(
        text(stores),
        """\
triton_for(t7, t1) -> bucket[0: 1023, 1024], bucket[2096128: 1024, 64]
triton_poi(t9) -> bucket[1047552: 1024, 1024]
""",
    )


@pytest.mark.parametrize("fuses_late", [True, False])
@pytest.mark.parametrize("fastest", ["Triton", "Extern"])
def test_max_autotune_stores_in_the_bucket(
    compiler: CardCompiler, fastest: str, fuses_late: bool
) -> None:
    its_name = "benchmark_template_fusion"
    if not hasattr(inductor_config, its_name):  # Older than torch 2.15.
        its_name = "benchmark_epilogue_fusion"
    settings: dict[str, Any] = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,TRITON",
        its_name: fuses_late,
    }
    generated = compiler.generate(step_on_cards, block_inputs(), fastest=fastest, **settings)
    assert generated.copies == ({},)
    calls = call_lines(generated.code, NAMES)
    stored_by = {
        place: call.partition("(")[0]
        for call in calls
        for place in re.findall(r"bucket\[\d+: (\d+, \d+)\]", call.partition(" -> ")[2])
        if not place.startswith("1, ")
    }
    product = {"Triton": "triton_tem", "Extern": "mm"}[fastest]
    assert stored_by == {"1024, 256": product, "256, 1024": product}
    assert len(reading_buckets(calls)) == 3


@pytest.mark.skipif(
    not hasattr(cpp_wrapper_gpu.DeferredTritonCallWrapper, "_generate_lazy_launch"),
    reason="needs a GPU: this torch times kernels while it writes their C++ wrapper",
)
def test_the_cpp_wrapper_stores_in_the_bucket(compiler: CardCompiler) -> None:
    settings: dict[str, Any] = {"cpp_wrapper": True, "triton__autotune_at_compile_time": False}
    generated = compiler.generate(step_on_cards, block_inputs(), **settings)
    assert generated.copies == ({},)
    places = re.findall(r"auto (buf\d+) = .*reinterpret_tensor_wrapper.*// alias", generated.code)
    products = re.findall(r"aoti_torch_cuda_mm_out\((buf\d+)", generated.code)
    assert len(places) == len(NAMES) - 1
    assert len({*places} & {*products}) == 2
    assert generated.code.count("all_reduce_(") == 1
    assert "custom_op_wrapper" not in generated.code[generated.code.rindex("inductor_entry_impl") :]
