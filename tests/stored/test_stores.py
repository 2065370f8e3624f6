"""Generated code writes every element that it sends, whatever the graph: for an H100, without
running it. test_generated_code.py has the CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_passes.config import FusionConfig
from fusion_passes.stored.lowering import OWN_TENSOR
from tests.support.call_sequence import call_sequence
from tests.support.codegen import MARK_READY, read_calls, read_kernels
from tests.support.cuda_backwards import (
    MODELS,
    NORM_ROWS,
    NORMS,
    gradients,
    model_inputs,
    multiplied_before,
    multiplied_behind,
    norm_inputs,
    norm_step,
    train_into,
    train_model,
)
from tests.support.cuda_codegen import CardCompiler, Generated, fuse, store_gradients
from tests.support.graphs import TensorSpec, tensor
from tests.support.stores import check_stores

Generate = Callable[..., Generated]


def numel(parameters: Sequence[TensorSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in parameters)


def mixed(generated: Generated) -> int:
    """Kernels that sum over rows and over columns."""
    return generated.code.count("# Call mix order reduction kernel")


def why_copied(generated: Generated) -> list[str]:
    """The reasons that the code passes to a reducer."""
    calls = [call for call in read_calls(generated.code) if call.name == MARK_READY]
    reasons = [text for call in calls for text in call.texts[1:]]  # The first are the positions.
    return [why for text in reasons for why in text.split("|") if why]


def sums_over_rows(*values: Tensor) -> list[Tensor]:
    return [value.sum(0, keepdim=True).view(-1) for value in values]


@pytest.fixture
def generate(compiler: CardCompiler) -> Generate:
    return partial(compiler.generate, has_kernels=False)


# --- Norms ---------------------------------------------------------------------------------------


@pytest.mark.each_torch
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_are_stored_for_a_reducer(generate: Generate, name: str) -> None:
    inputs = norm_inputs(name)
    generated = generate(norm_step(name, gradients), inputs, store_gradients)
    assert check_stores(generated.code) == numel(inputs[1:])


@pytest.mark.newest_torch
@pytest.mark.parametrize(("rows", "count"), [(NORM_ROWS, 2), (2048, 0)])
def test_a_reducer_is_told_which_sums_are_copied(generate: Generate, rows: int, count: int) -> None:
    """Sums of mix-order kernels, which return them in new tensors, are copied; other sums are
    stored by the kernels that compute them."""
    inputs = norm_inputs("layer_norm", rows=rows)
    generated = generate(norm_step("layer_norm", gradients), inputs, store_gradients)
    assert why_copied(generated) == [OWN_TENSOR] * count
    assert (mixed(generated) > 0) == (count > 0)


@pytest.mark.newest_torch
@pytest.mark.parametrize("width", [768, 2304, 3072])
def test_sums_over_the_rows_of_a_batch_are_stored(generate: Generate, width: int) -> None:
    """For example of a bias, which AOTAutograd makes ``[1, n]``; Inductor splits a sum of that many
    rows. The second half of the sum stores it."""
    inputs = [tensor(NORM_ROWS, width), tensor(NORM_ROWS, width, dtype=torch.bfloat16)]
    generated = generate(sums_over_rows, inputs, store_gradients)
    assert check_stores(generated.code) == 2 * width
    assert why_copied(generated) == []
    calls = [call for call in read_calls(generated.code) if call.kind == "fused"]
    assert len(calls) == 4 if width == 768 else 3
    assert not [call for call in calls if (1, width) in [place.size for place in call.writes]]


@pytest.mark.each_torch
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms_are_stored(generate: Generate, name: str) -> None:
    dtypes = [torch.float32]
    if name != "autocast":
        dtypes += [torch.bfloat16, torch.float16]
    for dtype in dtypes:
        inputs = norm_inputs(name, dtype)
        generated = generate(norm_step(name), inputs)
        assert check_stores(generated.code) == numel(inputs[1:]), dtype
        assert generated.copies == ({},)


@pytest.mark.each_torch
def test_their_sums_are_computed_by_kernels_that_mix_orders(generate: Generate) -> None:
    """The case of the test above; it needs 5 * 2**20 elements."""
    for rows, count in ((NORM_ROWS, 1), (6827, 1), (6826, 0)):
        generated = generate(norm_step("layer_norm"), norm_inputs("layer_norm", rows=rows))
        assert mixed(generated) == count, f"{rows} rows"


@pytest.mark.each_torch
def test_a_sum_of_few_parts_is_stored(generate: Generate) -> None:
    """Inductor adds them one by one: no reduction any more, but mix-order kernels count it as
    one."""
    settings = {"triton.mix_order_reduction_non_strict_mode": True}
    inputs = norm_inputs("layer_norm", rows=9216, width=15360)
    generated = generate(norm_step("layer_norm"), inputs, settings=settings)
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
def test_with_other_options_too(generate: Generate, config: FusionConfig) -> None:
    inputs = norm_inputs("post_norm")
    generated = generate(norm_step("post_norm"), inputs, partial(fuse, config=config))
    assert mixed(generated) > 0
    # Without a bucket, the sums of the norms are sent from where they are.
    parameters = inputs[1:3] if config.mode == "coalesced" else inputs[1:]
    assert check_stores(generated.code) == numel(parameters)


@pytest.mark.newest_torch
@pytest.mark.parametrize("name", ["layer_norm", "llama_norm"])
def test_added_to_gradients_that_exist(generate: Generate, name: str) -> None:
    inputs = norm_inputs(name)
    generated = generate(norm_step(name, train_into), [*inputs, *inputs[1:]])
    assert mixed(generated) > 0
    assert check_stores(generated.code) == numel(inputs[1:])


@pytest.mark.newest_torch
@pytest.mark.parametrize("rows", [2048, pytest.param(6826, marks=pytest.mark.nightly)])
def test_where_orders_are_not_mixed_it_costs_no_kernel(generate: Generate, rows: int) -> None:
    for name in NORMS:
        counts = set()
        for mixes in (True, False):
            settings = {"triton.mix_order_reduction": mixes}
            generated = generate(norm_step(name), norm_inputs(name, rows=rows), settings=settings)
            assert mixed(generated) == 0
            counts.add(sum(call.kind == "fused" for call in read_calls(generated.code)))
        assert len(counts) == 1, name


# --- Models --------------------------------------------------------------------------------------


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
def test_gradients_of_models_are_stored(
    compiler: CardCompiler, generate: Generate, name: str, autocast: bool
) -> None:
    pytest.importorskip("transformers")
    batch, parameters, buffers = compiler.submit(model_inputs, name).result()
    inputs = [*batch, *parameters, *buffers]
    generated = generate(partial(train_model, name, autocast), inputs)
    assert (mixed(generated) > 0) == (name in ("gpt2", "bert", "llama"))
    assert check_stores(generated.code) == numel(parameters)


# --- Bugs of Inductor with several buffers that share memory, which buckets do not have -----------
#
# Each test names torch's issue or pull request.

SIZES = [(256, 512), (128, 1024)]
TEMPLATES = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}


@pytest.mark.slow
@pytest.mark.each_torch
@pytest.mark.parametrize(
    ("step", "reading"),
    [
        pytest.param(multiplied_behind, "triton_tem(A)", id="averages"),
        pytest.param(multiplied_before, "triton_tem", id="gradients", marks=pytest.mark.nightly),
    ],
)
def test_templates_read_each_place_by_its_own_strides(
    compiler: CardCompiler, step: Callable[..., Any], reading: str
) -> None:
    """182333, torch before 2.13: ``max_autotune`` stored the layout that a template expects of its
    input under the input's name, and all places in a buffer have the buffer's name. It stores none
    for a value with a fixed layout, as a bucket has; and an input of a template is never stored in
    a bucket before."""
    inputs = [tensor(*size) for size in SIZES]
    generated = compiler.generate(
        step, inputs, has_kernels=False, fastest="Triton", settings=TEMPLATES
    )
    lines = call_sequence(generated.code).splitlines()
    assert [line for line in lines if line.startswith("triton_tem")] == [reading] * 2
    products = [body for name, body in read_kernels(generated.code).items() if "_tem_" in name]
    strides = [tuple(re.findall(r"stride_(?:am|bn) = (\d+)", body)) for body in products]
    assert sorted(strides) == [("1024", "1024"), ("512", "512")]
    assert check_stores(generated.code) == 256 * 512 + 128 * 1024


def test_no_operator_returns_what_it_writes_to() -> None:
    """189735, torch 2.14: if a called operator returned what it wrote to, that memory was reused
    while its result was alive. The package's operators return nothing that they change."""
    names = torch._C._dispatch_get_all_op_names()
    own = [name.split("::")[1] for name in names if name.startswith("fusion_passes::")]
    assert {"store_", "store_gradients_", "mark_ready_"} <= {*own}
    for name in own:
        schema = getattr(torch.ops.fusion_passes, name).default._schema
        aliases = [item.alias_info for item in (*schema.arguments, *schema.returns)]
        if any(alias is not None and alias.is_write for alias in aliases):
            assert schema.returns == [], name


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
        (
            {ALIAS: "", STORED: f"buf2 = {SUM}", SCALED: ""},
            "all_reduce_ reads 8 elements in 32:40 of .*, which nothing has written",
        ),
        ({STORED: f"buf2 = {SUM}"}, "buf2 is .* and bound anew: workspace_0"),
        ({STORED: ""}, "triton_poi_1 reads 8 elements in 32:40 .* which nothing has written"),
        ({"tl.store(out_ptr0 + (x0), tmp0, xmask)": "", SCALED: ""}, "8 elements in 32:40"),
        ({"(8, ), (1, ), 32": "(8, ), (1, ), 31", SCALED: ""}, "1 elements in 39:40"),
        ({"(4, 8), (8, 1), 0": "(4, 7), (8, 1), 0", SCALED: ""}, "4 elements in 7:32"),
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
    with pytest.raises(AssertionError, match=found):
        check_stores(code)
