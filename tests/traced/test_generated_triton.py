# ruff: noqa: E501  (a golden has one line for each call)
"""What a GPU runs: the wrapper and the Triton kernels of fused backwards for an H100, generated and
compiled without one. Nothing is run here, and nothing measured."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor_config
from expecttest import assert_expected_inline
from torch._inductor.codegen import cpp_wrapper_gpu

from fusion_passes import FusionConfig
from tests.support.call_sequence import call_sequence
from tests.support.codegen import read_calls, read_kernels
from tests.support.cuda_backwards import (
    autocast_step,
    biases_on_hosts,
    block_inputs,
    convolution_step,
    given,
    pointwise,
    step_on_cards,
)
from tests.support.cuda_codegen import CardCompiler, Generated, fuse
from tests.support.graphs import tensor

pytestmark = pytest.mark.newest_torch


@pytest.fixture(scope="module")
def step(compiler: CardCompiler) -> Generated:
    return compiler.generate(step_on_cards, block_inputs())


def test_products_and_reductions_are_stored_in_the_bucket(step: Generated) -> None:
    assert step.copies == ({},)
    assert_expected_inline(
        call_sequence(step.code),
        """\
triton_per
mm
triton_poi
mm
triton_per -> A[0:256]
mm
mm -> A[256:262400]
triton_per -> A[262400:263424]
mm
mm -> A[263424:525568]
triton_per -> A[525568:525824], A[525824:526080]
launch A, avg
wait for A
return A[0:256], A[256:262400], A[262400:263424], A[263424:525568], A[525568:525824], A[525824:526080]
""",
    )


def test_without_the_passes_there_is_a_kernel_for_each_gradient(compiler: CardCompiler) -> None:
    """The counterpart of the tests above."""
    calls = read_calls(compiler.generate(step_on_cards, block_inputs(), None).code)
    assert sum(call.kind == "launch" for call in calls) == len(block_inputs()) - 1
    assert not any(place.is_view for call in calls for place in call.writes), "nothing is stored"


def test_scaled_by_one_kernel_where_the_collective_does_not_average(compiler: CardCompiler) -> None:
    generated = compiler.generate(step_on_cards, block_inputs(torch.float16))
    lines = call_sequence(generated.code).splitlines()
    assert lines[-4:-1] == ["triton_poi(A) -> A", "launch A, sum", "wait for A"]
    assert not [line for line in lines[:-4] if "(" in line], "nothing else reads the bucket"
    # Inductor times a kernel's configurations on copies of the arguments that it changes in place.
    *_, source = read_kernels(generated.code).values()
    assert "'mutated_arg_names': ['in_ptr0', 'out_ptr0']" in source


def test_scaled_by_the_kernels_that_store(compiler: CardCompiler) -> None:
    divided = partial(fuse, config=FusionConfig(scaling="bucket"))
    generated = compiler.generate(biases_on_hosts, [tensor(64, 128), tensor(64, 96)], divided)
    assert_expected_inline(
        call_sequence(generated.code),
        """\
triton_per -> A[0:128]
triton_per -> A[128:224]
launch A, sum
wait for A
return A[0:128], A[128:224]
""",
    )
    for body in read_kernels(generated.code).values():
        assert "tl.full([1, 1], 0.5," in body
        assert body.count("tl.sum(") == body.count("tl.store(") == 1


def widest_stores(generated: Generated) -> list[int]:
    """Number of values that the widest store of each launched kernel stores."""
    launched = [call.name for call in read_calls(generated.code) if call.kind == "fused"]
    widths = [re.findall(r"st\.global(?:\.v(\d))?\.", generated.ptx[name]) for name in launched]
    return [max(int(width or 1) for width in found) for found in widths]


def test_stores_into_aligned_places_are_as_wide_as_others(compiler: CardCompiler) -> None:
    inputs = [tensor(64, 128), tensor(1000, 12), tensor(130), tensor(130)]
    fused = compiler.generate(pointwise, inputs)
    unfused = compiler.generate(pointwise, inputs, None)
    assert_expected_inline(
        call_sequence(fused.code),
        """\
triton_poi -> A[0:8192]
triton_poi -> A[8192:20192]
triton_poi -> A[20192:20322]
triton_poi -> A[20322:20452]
launch A, avg
wait for A
return A[0:8192], A[8192:20192], A[20192:20322], A[20322:20452]
""",
    )
    assert widest_stores(unfused) == [2, 2, 2, 2]
    # The last place is not aligned, because the size of the one before it is not round.
    assert widest_stores(fused) == [2, 2, 2, 1]


def test_what_libraries_allocate_is_copied_by_one_kernel(compiler: CardCompiler) -> None:
    weights = [tensor(8, 3, 3, 3), tensor(16, 8, 3, 3), tensor(5, 16, 1, 1)]
    generated = compiler.generate(convolution_step, [tensor(2, 3, 16, 16), *weights])
    assert {*generated.copies[0]} == {0, 1, 2}
    assert_expected_inline(
        call_sequence(generated.code),
        """\
convolution
convolution
convolution
triton_poi
aten.convolution_backward
aten.convolution_backward
aten.convolution_backward
triton_for -> A[0:80], A[80:1232], A[1232:1448]
launch A, avg
wait for A
return A[0:80], A[80:1232], A[1232:1448]
""",
    )


def test_what_inductor_lays_out_anew_is_copied_by_one_kernel_too(compiler: CardCompiler) -> None:
    """Inductor computes such convolutions with channels last; gradients are contiguous."""
    weights = [tensor(128, 64, 3, 3), tensor(128, 128, 3, 3), tensor(64, 128, 1, 1)]
    generated = compiler.generate(convolution_step, [tensor(2, 64, 16, 16), *weights])
    (store,) = (line for line in call_sequence(generated.code).splitlines() if "-> A[" in line)
    assert store.startswith("triton_for ->")
    assert widest_stores(generated)[-1] == 4


def widest_accesses(ptx: str) -> tuple[int, int]:
    """Number of bytes that the widest load and the widest store of a kernel move."""

    def widest(what: str) -> int:
        found = re.findall(rf"{what}\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
        return max(int(count or 1) * int(bits) // 8 for count, bits in found)

    return widest("ld"), widest("st")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_large_copies_move_16_bytes_a_thread_and_small_ones_share_a_kernel(
    compiler: CardCompiler, dtype: torch.dtype
) -> None:
    """Shapes of half a transformer block, as in the GPU check ``copies``."""
    shapes = [(1024, 1024), (1024,), (4096, 1024), (4096,)]
    generated = compiler.generate(given, [tensor(*shape, dtype=dtype) for shape in shapes])
    assert_expected_inline(
        call_sequence(generated.code),
        """\
triton_poi -> A[0:1048576]
triton_for -> A[1048576:1049600], A[5243904:5248000]
triton_poi -> A[1049600:5243904]
launch A, avg
wait for A
return A[0:1048576], A[1048576:1049600], A[1049600:5243904], A[5243904:5248000]
""",
    )
    for name, ptx in generated.ptx.items():
        assert widest_accesses(ptx) == (16, 16) or name.startswith("triton_for")


def test_large_products_are_cast_by_kernels_of_their_own(compiler: CardCompiler) -> None:
    """The counterpart of the test above: a gradient with one row less is cast together with
    others."""
    weights = [tensor(1024, 64), tensor(1024, 1024), tensor(1023, 1024)]
    generated = compiler.generate(autocast_step, [tensor(32, 64), *weights])
    stores = [line for line in call_sequence(generated.code).splitlines() if "->" in line]
    assert stores == [
        "triton_for -> A[0:1047552], A[2096128:2161664]",
        "triton_poi -> A[1047552:2096128]",
    ]


@pytest.mark.parametrize("fuses_late", [True, False])
@pytest.mark.parametrize("fastest", ["Triton", "Extern"])
def test_max_autotune_stores_in_the_bucket(
    compiler: CardCompiler, fastest: str, fuses_late: bool
) -> None:
    its_name = "benchmark_template_fusion"
    if not hasattr(inductor_config, its_name):  # Torch older than 2.15.
        its_name = "benchmark_epilogue_fusion"
    settings = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "ATEN,TRITON",
        its_name: fuses_late,
    }
    inputs = block_inputs()
    generated = compiler.generate(step_on_cards, inputs, fastest=fastest, settings=settings)
    assert generated.copies == ({},)
    lines = call_sequence(generated.code).splitlines()
    product = {"Triton": "triton_tem", "Extern": "mm"}[fastest]
    assert {f"{product} -> A[256:262400]", f"{product} -> A[263424:525568]"} <= {*lines}
    assert not [line for line in lines if "(" in line], "nothing reads the bucket"


@pytest.mark.skipif(
    not hasattr(cpp_wrapper_gpu.DeferredTritonCallWrapper, "_generate_lazy_launch"),
    reason="needs a GPU: this torch times kernels while it writes their C++ wrapper",
)
def test_the_cpp_wrapper_stores_in_the_bucket(compiler: CardCompiler) -> None:
    settings = {"cpp_wrapper": True, "triton.autotune_at_compile_time": False}
    generated = compiler.generate(step_on_cards, block_inputs(), settings=settings)
    assert generated.copies == ({},)
    places = re.findall(r"auto (buf\d+) = .*reinterpret_tensor_wrapper.*// alias", generated.code)
    products = re.findall(r"aoti_torch_cuda_mm_out\((buf\d+)", generated.code)
    assert len(places) == len(block_inputs()) - 1
    assert len({*places} & {*products}) == 2
    assert generated.code.count("all_reduce_(") == 1
    assert "custom_op_wrapper" not in generated.code[generated.code.rindex("inductor_entry_impl") :]
