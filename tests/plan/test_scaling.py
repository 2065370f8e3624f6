"""Where a bucket is scaled: in the collective, at the store, in the bucket, or after the wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_passes.plan.scaling import BucketScaling
from testing.graphs import plan_of, reduce, tensor, trace

GLOO, NCCL = "ddp0", "ddp3"


def scaling_of(
    module: str = GLOO,
    dtype: torch.dtype = torch.float32,
    product: bool = False,
    divides_first: bool = False,
    reduce_dtype: torch.dtype | None = None,
    **traced: Any,
) -> BucketScaling:
    """The decision for a bucket of two gradients, one of them a matrix product if asked for."""

    def backward(x, y):
        first = torch.mm(x, x) if product else torch.neg(x)
        return [reduce(g, n, module=module, **traced) for g, n in ((first, "a"), (y, "b"))]

    graph = trace(backward, [tensor(2, 2, dtype=dtype), tensor(4, dtype=dtype)]).graph
    (bucket,) = plan_of(graph, divides_first=divides_first, reduce_dtype=reduce_dtype).buckets
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
    """Sums of fp16 could overflow where eager DDP's, which divides first, do not; and what the user
    asks for. By kernels that store them, if these can: the values are the same."""
    for options in ({"dtype": torch.float16}, {"divides_first": True}):
        assert scaling_of(module, **options) == STORED
        assert scaling_of(module, product=True, **options) == IN_BUCKET


def test_a_sum_into_rows_cannot_divide_what_it_has_stored() -> None:
    def backward(x, y, rows):
        summed = torch.ops.aten.index_put(torch.zeros_like(x), [rows], x, True)
        return reduce(summed, "a"), reduce(y, "b")

    inputs = [tensor(2, 2), tensor(4), tensor(2, dtype=torch.int64)]
    (bucket,) = plan_of(trace(backward, inputs).graph, divides_first=True).buckets
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
    """fp16 before it can overflow; bf16, which has fp32's range, where it is fp32 again."""
    assert scaling_of(module, reduce_dtype=torch.bfloat16).method == "result"
    assert scaling_of(module, reduce_dtype=torch.float16, product=True).method == "store"
