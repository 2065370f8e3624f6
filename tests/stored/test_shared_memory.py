"""Bugs of Inductor with several buffers that share memory, which buckets do not have: each test
names torch's issue or pull request, and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.call_sequence import call_sequence
from tests.support.codegen import read_kernels
from tests.support.cuda_backwards import multiplied_before, multiplied_behind
from tests.support.cuda_codegen import CardCompiler
from tests.support.graphs import tensor
from tests.support.stores import check_stores

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
