"""What generated code sends is written, every element of it, whatever the graph: for an H100, where
nothing is run here, and for the CPU."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.config import FusionConfig
from testing.codegen import launched_kernels
from testing.cuda_backwards import (
    MODELS,
    NORM_ROWS,
    NORMS,
    gradients,
    model_inputs,
    model_step,
    norm_inputs,
    norm_step,
    train_into,
)
from testing.cuda_codegen import CardCompiler, Generated, store_gradients
from testing.fake_world import fake_world
from testing.graphs import TensorSpec
from testing.stores import check_stores
from workloads.models import MAKERS, TINY, subject


def numel(parameters: list[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in parameters)


def mixed(generated: Generated) -> int:
    """Kernels that sum over rows and over columns."""
    return generated.code.count("# Call mix order reduction kernel")


# --- Norms on a card -----------------------------------------------------------------------------


@pytest.mark.each_torch
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_are_stored_for_a_reducer(compiler: CardCompiler, name: str) -> None:
    inputs = norm_inputs(name)
    generated = compiler.generate(
        norm_step(name, gradients),
        inputs,
        fused=False,
        has_kernels=False,
        post_grad_custom_post_pass=store_gradients,
    )
    assert check_stores(generated.code) == numel(inputs[1:])


@pytest.mark.each_torch
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_are_stored(compiler: CardCompiler, name: str) -> None:
    dtypes = [torch.float32]
    if name != "autocast":
        dtypes += [torch.bfloat16, torch.float16]
    for dtype in dtypes:
        inputs = norm_inputs(name, dtype)
        generated = compiler.generate(norm_step(name), inputs, has_kernels=False)
        assert check_stores(generated.code) == numel(inputs[1:]), dtype
        assert generated.copies == ({},)


@pytest.mark.each_torch
def test_their_sums_are_computed_by_kernels_that_mix_orders(compiler: CardCompiler) -> None:
    """What the test above is about; 5 * 2**20 elements are needed for it."""
    for rows, count in ((NORM_ROWS, 1), (6827, 1), (6826, 0)):
        inputs = norm_inputs("layer_norm", rows=rows)
        generated = compiler.generate(norm_step("layer_norm"), inputs, has_kernels=False)
        assert mixed(generated) == count, f"{rows} rows"


@pytest.mark.each_torch
def test_a_sum_of_few_parts_is_stored(compiler: CardCompiler) -> None:
    """Inductor adds them one by one, which is no reduction any more, but part of one for it."""
    settings: dict[str, Any] = {"triton__mix_order_reduction_non_strict_mode": True}
    inputs = norm_inputs("layer_norm", rows=9216, width=15360)
    generated = compiler.generate(norm_step("layer_norm"), inputs, has_kernels=False, **settings)
    assert mixed(generated) == 1
    assert check_stores(generated.code) == numel(inputs[1:])


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(FusionConfig(mode="coalesced"), id="coalesced"),
        pytest.param(FusionConfig(reduce_dtype="bf16"), id="bf16"),
        pytest.param(FusionConfig(reduce_dtype="fp16"), id="fp16", marks=pytest.mark.nightly),
        pytest.param(FusionConfig(scaling="bucket"), id="scaled in the bucket"),
    ],
)
def test_with_other_options_too(compiler: CardCompiler, config: FusionConfig) -> None:
    inputs = norm_inputs("post_norm")
    step = norm_step("post_norm")
    generated = compiler.generate(step, inputs, config=config, has_kernels=False)
    assert mixed(generated) > 0
    # Where there is no bucket, the norms' sums are sent from where they are.
    parameters = inputs[1:3] if config.mode == "coalesced" else inputs[1:]
    assert check_stores(generated.code) == numel(parameters)


@pytest.mark.newest_torch
@pytest.mark.parametrize("name", ["layer_norm", "llama_norm"])
def test_added_to_gradients_that_exist(compiler: CardCompiler, name: str) -> None:
    inputs = norm_inputs(name)
    step = norm_step(name, train_into)
    generated = compiler.generate(step, [*inputs, *inputs[1:]], has_kernels=False)
    assert mixed(generated) > 0
    assert check_stores(generated.code) == numel(inputs[1:])


@pytest.mark.newest_torch
@pytest.mark.parametrize("rows", [2048, pytest.param(6826, marks=pytest.mark.nightly)])
def test_where_orders_are_not_mixed_it_costs_no_kernel(compiler: CardCompiler, rows: int) -> None:
    for name in NORMS:
        inputs = norm_inputs(name, rows=rows)
        counts = set()
        for mixes in (True, False):
            settings: dict[str, Any] = {"triton__mix_order_reduction": mixes}
            generated = compiler.generate(norm_step(name), inputs, has_kernels=False, **settings)
            assert mixed(generated) == 0
            counts.add(len(launched_kernels(generated.code)))
        assert len(counts) == 1, name


# --- Models on a card ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        pytest.param("gpt2", True, marks=pytest.mark.newest_torch),
        *(
            pytest.param(name, False, marks=[pytest.mark.nightly, pytest.mark.each_torch])
            for name in MODELS
        ),
        pytest.param("llama", True, marks=[pytest.mark.nightly, pytest.mark.each_torch]),
    ],
)
def test_gradients_of_models_are_stored(compiler: CardCompiler, name: str, autocast: bool) -> None:
    pytest.importorskip("transformers")
    batch, parameters, buffers = compiler.call(model_inputs, name)
    inputs = [*batch, *parameters, *buffers]
    step = model_step(name, autocast=autocast)
    generated = compiler.generate(step, inputs, has_kernels=False)
    assert (mixed(generated) > 0) == (name in ("gpt2", "bert", "llama"))
    assert check_stores(generated.code) == numel(parameters)


# --- Models on the CPU ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly  # test_storage.py has a transformer's.
@pytest.mark.parametrize("mode", ["concat", "coalesced"])
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_stored_on_the_cpu_too(name: str, mode: str) -> None:
    if name in ("gpt2", "bert", "llama"):
        pytest.importorskip("transformers")
    torch._dynamo.reset()
    made = subject(name, TINY)
    with fake_world(), inductor_config.patch(ddp_fusion=mode, fx_graph_cache=False):
        ddp = DistributedDataParallel(made.build())
        compiled = torch.compile(ddp)

        def step() -> None:
            compiled(*made.batch(0)).backward()

        for _ in range(2):  # Fresh gradients, and existing ones.
            sent = sum(check_stores(code) for code in run_and_get_code(step)[1])
            parameters = sum(parameter.numel() for parameter in ddp.parameters())
            assert sent == parameters if mode == "concat" else 0 < sent <= parameters
    torch._dynamo.reset()


# --- What is wrong is found ----------------------------------------------------------------------

CODE = """
triton_per_0 = async_compile.triton('triton_per_0', '''
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32'}}
@triton.jit
def triton_per_0(in_ptr0, out_ptr0, xnumel):
    tl.store(out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')
triton_poi_1 = async_compile.triton('triton_poi_1', '''
    triton_meta={'signature': {'in_out_ptr0': '*fp32', 'xnumel': 'i32'}}
@triton.jit
def triton_poi_1(in_out_ptr0, xnumel):
    tl.store(in_out_ptr0 + (x0), tmp0, xmask)
''', device_str='cuda')

    def call(self, args):
        buf0 = empty_strided_cuda((40, ), (1, ), torch.float32)
        buf1 = reinterpret_tensor(buf0, (4, 8), (8, 1), 0)  # alias
        extern_kernels.mm(arg0_1, arg1_1, out=buf1)
        buf2 = reinterpret_tensor(buf0, (8, ), (1, ), 32)  # alias
        triton_per_0.run(arg0_1, buf2, 8, stream=stream0)
        triton_poi_1.run(buf0, 40, stream=stream0)
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', 'cards')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        return (buf0, )
"""
SUM = "workspace_0[0 * 5 * 8 : 1 * 5 * 8].view(5, 8).sum(dim=0)"
ALIAS = "buf2 = reinterpret_tensor(buf0, (8, ), (1, ), 32)  # alias"
STORED = "triton_per_0.run(arg0_1, buf2, 8, stream=stream0)"
SCALED = "triton_poi_1.run(buf0, 40, stream=stream0)"
WAIT = "torch.ops._c10d_functional.wait_tensor.default(buf0)"


def test_a_right_code_is_right() -> None:
    assert check_stores(CODE) == 40
    assert check_stores(CODE.replace(STORED, f"buf2.copy_({SUM})")) == 40, "as newer torch does"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({ALIAS: "", STORED: f"buf2 = {SUM}", SCALED: ""}, r"nothing writes elements \[\(32, 40\)"),
        ({STORED: f"buf2 = {SUM}"}, "buf2 is .* and bound anew: workspace_0"),
        ({STORED: ""}, r"triton_poi_1 reads elements \[\(32, 40\)\].* which nothing has written"),
        ({"tl.store(out_ptr0 + (x0), tmp0, xmask)": "", SCALED: ""}, r"elements \[\(32, 40\)\]"),
        ({"(8, ), (1, ), 32": "(8, ), (1, ), 31", SCALED: ""}, r"elements \[\(39, 40\)\]"),
        ({"(4, 8), (8, 1), 0": "(4, 7), (8, 1), 0", SCALED: ""}, r"\[\(7, 8\), \(15, 16\)"),
        ({WAIT: SCALED}, "triton_poi_1.* touches what is on the way"),
        ({WAIT: ""}, r"return .* touches what is on the way"),
        ({WAIT: "", "return (buf0, )": "return (arg0_1, )"}, "nobody waits for {'buf0'}"),
        ({SCALED: WAIT}, "waits for what was not launched"),
    ],
)
def test_what_is_wrong_in_a_code_is_found(changes: dict[str, str], found: str) -> None:
    code = CODE
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    with pytest.raises(AssertionError) as raised:
        check_stores(code)
    assert re.search(found, str(raised.value)), raised.value
