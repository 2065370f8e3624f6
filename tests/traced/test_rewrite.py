"""The common parts of both ways of fusing: which gradients share a bucket, which nodes are left
alone, and the order of the rest of the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion_passes.graph.collectives import ALL_REDUCE, all_reduce
from testing.graphs import (
    Backward,
    RewriteFor,
    TensorSpec,
    check,
    coalesced,
    concat,
    names_of,
    plan_of,
    reduce,
    reduce_into,
    tensor,
    trace,
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
    ],
)
def test_forms_of_gradients(fuse: RewriteFor, backward: Backward, spec: TensorSpec) -> None:
    assert _launches(check(backward, [spec] * 2, fuse)) == 1


# --- Only equal keys share a bucket ------------------------------------------------------------

NEAR_MISSES: dict[str, tuple[Backward, list[TensorSpec]]] = {
    "two modules on one group": (
        lambda x, y: (reduce(x, "a"), reduce(y, "b", module="ddp1")),
        [tensor(4), tensor(4)],
    ),
    "two groups": (
        lambda x, y: (reduce(x, "a"), reduce(y, "b", module="ddp2")),
        [tensor(4), tensor(4)],
    ),
    "two dtypes": (
        lambda x, y: (reduce(x, "a"), reduce(y, "b")),
        [tensor(4), tensor(4, dtype=torch.bfloat16)],
    ),
    "two devices": (
        lambda x, y: (reduce(x, "a"), reduce(y, "b")),
        [tensor(4), tensor(4, device="cuda")],
    ),
    "two divisors": (
        lambda x, y: (reduce(x, "a"), reduce(y, "b", divide=4)),
        [tensor(4), tensor(4)],
    ),
    "a division and none": (
        lambda x, y: (reduce(x, "a"), reduce(y, "b", divide=None)),
        [tensor(4), tensor(4)],
    ),
    "one is no module's": (
        lambda x, y: (reduce(x, "a"), all_reduce(torch.div(y, 2), "sum", "elsewhere")),
        [tensor(4), tensor(4)],
    ),
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_do_not_share_a_bucket(fuse: RewriteFor, case: str) -> None:
    assert _launches(check(*NEAR_MISSES[case], fuse)) == 2


def test_one_alone_is_a_bucket_too(fuse: RewriteFor) -> None:
    assert _launches(check(lambda x: reduce(x, "a"), [tensor(4)], fuse)) == 1


def test_equal_keys_need_not_be_neighbours(fuse: RewriteFor) -> None:
    def backward(x, y, z):
        first = reduce(torch.neg(x), "a")
        between = reduce(torch.neg(y), "b")
        return first, between, reduce(torch.neg(z), "c")

    inputs = [tensor(4), tensor(4, dtype=torch.bfloat16), tensor(4)]
    assert _launches(check(backward, inputs, fuse)) == 2


@pytest.mark.parametrize("fuse_under", [concat, coalesced])
def test_three_buckets_of_one_key(fuse_under: Callable[..., RewriteFor]) -> None:
    def backward(*inputs):
        return [reduce(torch.neg(x), str(index)) for index, x in enumerate(inputs)]

    assert _launches(check(backward, [tensor(4)] * 6, fuse_under(32))) == 3


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


def test_the_plan_names_what_was_fused() -> None:
    module = trace(lambda x, y: (reduce(x, "a"), reduce(y, "b")), [tensor(4)] * 2)
    plan = plan_of(module.graph)
    assert names_of(module.graph, ALL_REDUCE) == [m.start.name for m in plan.buckets[0].members]
