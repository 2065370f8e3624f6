"""Where a bucket is scaled: in the collective, when stored, in the bucket, or after the wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_passes.config import ScalingOption
from fusion_passes.reducer.communication import AllReduce, collective_averages
from fusion_passes.traced.buckets import BucketScaling
from tests.support import graphs
from tests.support.graphs import plan_of, reduce, tensor, trace

GLOO, NCCL = "ddp0", "ddp3"


def scaling_of(
    module: str = GLOO,
    dtype: torch.dtype = torch.float32,
    product: bool = False,
    scaling: ScalingOption = "auto",
    reduce_dtype: torch.dtype | None = None,
    **traced: Any,
) -> BucketScaling:
    """The decision for a bucket of two gradients; one is a matrix product if ``product``."""

    def backward(x, y):
        first = torch.mm(x, x) if product else torch.neg(x)
        return [reduce(g, n, module=module, **traced) for g, n in ((first, "a"), (y, "b"))]

    graph = trace(backward, [tensor(2, 2, dtype=dtype), tensor(4, dtype=dtype)]).graph
    (bucket,) = plan_of(graph, scaling=scaling, reduce_dtype=reduce_dtype).buckets
    return bucket.scaling


AVERAGES = BucketScaling("collective", "avg")
NOTHING = BucketScaling("none", "sum")
STORED, IN_BUCKET = (BucketScaling(method, "sum", 2.0) for method in ("store", "bucket"))


@pytest.mark.parametrize("module", [GLOO, NCCL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_backends_average(module: str, dtype: torch.dtype) -> None:
    assert scaling_of(module, dtype) == scaling_of(module, dtype, product=True) == AVERAGES


@pytest.mark.parametrize("module", [GLOO, NCCL])
def test_what_is_divided_first(module: str) -> None:
    """fp16 is divided first, because its sums could overflow where those of eager DDP, which
    divides first, do not; so is what the user asks for. The kernels that store the gradients divide
    if they can, with the same values."""
    for options in ({"dtype": torch.float16}, {"scaling": "bucket"}):
        assert scaling_of(module, **options) == STORED
        assert scaling_of(module, product=True, **options) == IN_BUCKET


def test_a_sum_into_rows_cannot_divide_what_it_has_stored() -> None:
    def backward(x, y, rows):
        summed = torch.ops.aten.index_put(torch.zeros_like(x), [rows], x, True)
        return reduce(summed, "a"), reduce(y, "b")

    inputs = [tensor(2, 2), tensor(4), tensor(2, dtype=torch.int64)]
    (bucket,) = plan_of(trace(backward, inputs).graph, scaling="bucket").buckets
    assert bucket.scaling.method == "bucket"


def test_a_product_cannot_divide_what_it_has_stored_for_a_view_of_it() -> None:
    def backward(x, y):
        product = torch.ops.aten.permute.default(torch.mm(x, y), [1, 0])
        return reduce(torch.reshape(product.unsqueeze(0), [3, 2]), "a"), reduce(y, "b")

    graph = trace(backward, [tensor(2, 5), tensor(5, 3)]).graph
    (bucket,) = plan_of(graph, scaling="bucket").buckets
    assert bucket.scaling.method == "bucket"


def test_a_backend_that_is_not_known_is_given_what_is_divided() -> None:
    assert scaling_of("ddp4").method == "store"
    assert scaling_of("ddp4", product=True).method == "bucket"


@pytest.mark.parametrize("module", [GLOO, NCCL])
def test_one_rank_divides_by_nothing(module: str) -> None:
    assert scaling_of(module, divide=1) == scaling_of(module, divide=None) == NOTHING


def test_what_is_no_average_over_the_group_is_not_left_to_the_collective() -> None:
    assert scaling_of(NCCL, divide=3).method == "store"
    assert scaling_of(NCCL, product=True, divide=3).method == "bucket"


@pytest.mark.parametrize("module", [GLOO, NCCL])
def test_a_smaller_dtype_is_scaled_where_its_range_asks_for_it(module: str) -> None:
    """fp16 is scaled before it can overflow; bf16, which has fp32's range, when it is fp32
    again."""
    assert scaling_of(module, reduce_dtype=torch.bfloat16).method == "result"
    assert scaling_of(module, reduce_dtype=torch.float16, product=True).method == "store"


# --- bf16 over NCCL ------------------------------------------------------------------------------

OFF_BY = {1: 0, 2: 0, 3: 2**-9, 4: 0, 5: 2**-10, 6: 2**-9, 7: -(2**-9), 8: 0, 12: 2**-9, 64: 0}
"""Relative error of each average, by the number of ranks n, if NCCL multiplies by 1/n in bf16."""


@pytest.mark.parametrize(("ranks", "off_by"), OFF_BY.items())
def test_nccl_averages_bf16_where_one_over_n_is_exact(ranks: int, off_by: float) -> None:
    assert torch.tensor(1 / ranks).bfloat16().item() * ranks - 1 == pytest.approx(off_by, rel=1e-9)
    assert collective_averages("nccl", torch.bfloat16, ranks, "auto") == (off_by == 0)
    assert collective_averages("nccl", torch.bfloat16, ranks, "collective"), "the user asks for it"
    assert not collective_averages("nccl", torch.bfloat16, ranks, "bucket")


@pytest.mark.parametrize("ranks", OFF_BY)
def test_nothing_else_depends_on_the_number_of_ranks(ranks: int) -> None:
    """Eager DDP also rounds 1/n to fp32 or fp64, and Gloo divides a sum."""
    for dtype in (torch.float32, torch.float64):
        assert collective_averages("nccl", dtype, ranks, "auto")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert collective_averages("gloo", dtype, ranks, "auto")
    for backend in ("nccl", "gloo"):
        assert not collective_averages(backend, torch.float16, ranks, "collective")


@pytest.mark.parametrize(
    ("module", "options", "method"),
    [
        (NCCL, {"dtype": torch.bfloat16}, "store"),
        (NCCL, {"dtype": torch.bfloat16, "product": True}, "bucket"),
        (NCCL, {"dtype": torch.bfloat16, "scaling": "collective"}, "collective"),
        (NCCL, {"dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, "store"),
        (NCCL, {"reduce_dtype": torch.bfloat16}, "result"),
        (NCCL, {}, "collective"),
        (GLOO, {"dtype": torch.bfloat16}, "collective"),
    ],
)
def test_a_traced_graph_does_as_reducers_do_on_three_ranks(
    monkeypatch: pytest.MonkeyPatch, module: str, options: dict[str, Any], method: str
) -> None:
    monkeypatch.setattr(graphs, "AVERAGED_OVER", 3)
    scaling = scaling_of(module, divide=3, **options)
    assert scaling.method == method
    communication = AllReduce(
        SimpleNamespace(size=lambda: 3),
        "nccl" if module == NCCL else "gloo",
        dtype=options.get("reduce_dtype"),
        scaling_option=options.get("scaling", "auto"),
    )
    reduced = communication.scaling(options.get("dtype", torch.float32))
    assert reduced == method.replace("store", "bucket")
