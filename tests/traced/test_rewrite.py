"""The common parts of both ways of fusing: which gradients share a bucket, which nodes are left
alone, and the order of the rest of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_passes.graph.collectives import all_reduce
from tests.support.graphs import (
    Backward,
    RewriteFor,
    TensorSpec,
    check,
    coalesced,
    concat,
    reduce,
    reduce_into,
    tensor,
)


@pytest.fixture(params=["concat", "coalesced"])
def fuse(request: pytest.FixtureRequest) -> RewriteFor:
    return {"concat": concat(), "coalesced": coalesced()}[request.param]


def _launches(text: str) -> int:
    return sum(" = all_reduce" in line for line in text.splitlines())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_all_dtypes(fuse: RewriteFor, dtype: torch.dtype) -> None:
    def backward(x, y, z):
        return reduce(torch.neg(x), "a"), reduce(torch.neg(y), "b"), reduce(torch.neg(z), "c")

    inputs = [tensor(2, 3, dtype=dtype), tensor(dtype=dtype), tensor(4, 0, dtype=dtype)]
    assert _launches(check(backward, inputs, fuse)) == 1


def test_gradients_in_any_layout(fuse: RewriteFor) -> None:
    def backward(x, y, z):
        expanded = torch.ops.aten.expand.default(z, [2, 3])
        return reduce(torch.neg(x), "a"), reduce(y, "b"), reduce(expanded, "c")

    inputs = [
        tensor(2, 3, 2, 2, stride=(12, 1, 6, 3)),
        tensor(3, 2, stride=(1, 3)),
        tensor(3),
    ]
    assert _launches(check(backward, inputs, fuse)) == 1


@pytest.mark.parametrize(
    ("backward", "spec"),
    [
        pytest.param(
            lambda x, y: (reduce(torch.neg(x), "a"), reduce_into(y, x, "b"), reduce(x.abs(), "c")),
            tensor(4),
            id="new and existing ones",
        ),
        pytest.param(
            lambda x, y: [reduce(gradient, name) for gradient in [x + y] for name in "ab"],
            tensor(4),
            id="the same gradient twice",
        ),
        pytest.param(
            lambda x, y: reduce_into(y, torch.neg(x), "a"),
            tensor(2, 3, stride=(1, 2)),
            id="an existing one in another layout",
        ),
        pytest.param(lambda x, y: reduce(x, "a"), tensor(4), id="one alone"),
    ],
)
def test_forms_of_gradients(fuse: RewriteFor, backward: Backward, spec: TensorSpec) -> None:
    assert _launches(check(backward, [spec] * 2, fuse)) == 1


# --- Only equal keys share a bucket ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        pytest.param({"module": "ddp1"}, tensor(4), id="two modules on one group"),
        pytest.param({"module": "ddp2"}, tensor(4), id="two groups"),
        pytest.param({}, tensor(4, dtype=torch.bfloat16), id="two dtypes"),
        pytest.param({}, tensor(4, device="cuda"), id="two devices"),
        pytest.param({"divide": 4}, tensor(4), id="two divisors"),
        pytest.param({"divide": None}, tensor(4), id="a division and none"),
    ],
)
def test_near_misses_do_not_share_a_bucket(
    fuse: RewriteFor, options: dict[str, Any], spec: TensorSpec
) -> None:
    def backward(x, y):
        return reduce(x, "a"), reduce(y, "b", **options)

    assert _launches(check(backward, [tensor(4), spec], fuse)) == 2


def test_a_collective_of_no_module_is_in_no_bucket(fuse: RewriteFor) -> None:
    def backward(x, y):
        return reduce(x, "a"), all_reduce(torch.div(y, 2), "sum", "elsewhere")

    assert _launches(check(backward, [tensor(4)] * 2, fuse)) == 2


def _negated(*inputs):
    return [reduce(torch.neg(x), name) for x, name in zip(inputs, "abcdef", strict=False)]


def test_equal_keys_need_not_be_neighbours(fuse: RewriteFor) -> None:
    inputs = [tensor(4), tensor(4, dtype=torch.bfloat16), tensor(4)]
    assert _launches(check(_negated, inputs, fuse)) == 2


@pytest.mark.parametrize("fuse_under", [concat, coalesced])
def test_three_buckets_of_one_key(fuse_under: Callable[..., RewriteFor]) -> None:
    assert _launches(check(_negated, [tensor(4)] * 6, fuse_under(32))) == 3


# --- The rest of the graph ---------------------------------------------------------------------


def test_a_write_that_moves_stays_behind_the_reads_before_it(fuse: RewriteFor) -> None:
    def backward(x, y, grad):
        before = torch.neg(grad)
        grad.copy_(reduce(x, "a"))
        return before, reduce(y, "b"), torch.neg(y)

    check(backward, [tensor(4)] * 3, fuse)


def test_a_read_behind_a_write_that_moves_stays_behind_it(fuse: RewriteFor) -> None:
    def backward(x, y, grad):
        grad.copy_(reduce(x, "a"))
        view = torch.ops.aten.reshape.default(grad, [2, 2])
        return torch.neg(view), reduce(y, "b")

    check(backward, [tensor(4)] * 3, fuse)


def test_other_collectives_keep_their_order(fuse: RewriteFor) -> None:
    """The first needs the result of ``a`` and so moves after the bucket; the second moves with
    it."""

    def backward(x, y):
        first = all_reduce(reduce(x, "a"), "sum", "tensor_parallel")
        second = all_reduce(torch.neg(y), "max", "tensor_parallel")
        return first, second, reduce(torch.abs(y), "b")

    check(backward, [tensor(4)] * 2, fuse)
