"""What Inductor has been wrong about where several buffers share memory, and buckets are not: each
test has the number of torch's issue or pull request, and says why."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from testing.codegen import read_kernels
from testing.cuda_backwards import multiplied_before, multiplied_behind
from testing.cuda_calls import call_lines
from testing.cuda_codegen import CardCompiler, Generated
from testing.graphs import tensor
from testing.stores import check_stores


def product_strides(generated: Generated) -> list[tuple[int, int]]:
    """The rows' strides in both operands of each product that a template computes."""
    sources = [text for name, text in read_kernels(generated.code).items() if "_tem_" in name]
    return [
        (
            int(re.findall(r"stride_am = (\d+)", source)[0]),
            int(re.findall(r"stride_bn = (\d+)", source)[0]),
        )
        for source in sources
    ]


TEMPLATES: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,TRITON"}


@pytest.mark.slow
@pytest.mark.each_torch
@pytest.mark.parametrize(
    ("step", "reading"),
    [
        pytest.param(
            multiplied_behind, ["triton_tem(bucket)", "triton_tem(bucket)"], id="averages"
        ),
        pytest.param(
            multiplied_before,
            ["triton_tem(t0)", "triton_tem(t0.view(256, 512))"],
            id="gradients",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_templates_read_each_place_by_its_own_strides(
    compiler: CardCompiler, step: Any, reading: list[str]
) -> None:
    """182333, torch before 2.13: ``max_autotune`` kept the layout that a template expects of its
    input by the input's name, and all places in a buffer have that one's. It keeps none of what has
    a fixed layout, as a bucket has; and what a template reads before is never stored in one."""
    inputs = [tensor(256, 512), tensor(128, 1024)]
    generated = compiler.generate(step, inputs, fastest="Triton", has_kernels=False, **TEMPLATES)
    calls = call_lines(generated.code)
    products = [call.partition(" -> ")[0] for call in calls if call.startswith("triton_tem(")]
    assert sorted(products) == sorted(reading)
    assert sorted(product_strides(generated)) == [(512, 512), (1024, 1024)]
    assert check_stores(generated.code) == 256 * 512 + 128 * 1024


def test_no_operator_returns_what_it_writes_to() -> None:
    """189735, torch 2.14: where a called operator did, the memory was used again while its result
    was alive. Those of the package return nothing of what they change."""
    names = torch._C._dispatch_get_all_op_names()
    own = [name.split("::")[1] for name in names if name.startswith("fusion_passes::")]
    assert {"store_", "store_gradients_", "mark_ready_"} <= {*own}
    for name in own:
        schema = getattr(torch.ops.fusion_passes, name).default._schema
        aliases = [item.alias_info for item in (*schema.arguments, *schema.returns)]
        if any(alias is not None and alias.is_write for alias in aliases):
            assert schema.returns == [], name
