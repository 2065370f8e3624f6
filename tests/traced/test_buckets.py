"""A traced backward launches the buckets of its modules' layouts, or none."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from fusion_passes.graph.collectives import all_reduce
from fusion_passes.traced.buckets import BucketPlan, CannotLaunchError, plan_buckets
from fusion_passes.traced.fuse_pass import report_plan
from tests.support.graphs import (
    Backward,
    TensorSpec,
    buckets_with,
    cast,
    find,
    piece,
    plan_of,
    reduce,
    tensor,
    trace,
)


def _plan(function: Backward, *inputs: TensorSpec, **layouts: list[list[int]]) -> BucketPlan:
    """The plan of a function's graph, with the parameter numbers in each bucket of each module: 0
    for ``a``."""
    graph = trace(function, inputs).graph
    return plan_buckets(
        graph,
        find(graph),
        lambda module: buckets_with([piece(*numbers) for numbers in layouts[module]], module),
    )


def _names(plan: BucketPlan) -> list[list[str]]:
    return [[member.owner.parameter for member in bucket.members] for bucket in plan.buckets]


def _three(x):
    return [reduce(torch.mul(x, n), name) for n, name in ((2, "a"), (3, "b"), (4, "c"))]


def test_a_plan_says_what_it_does() -> None:
    def backward(x, y, z):
        other = all_reduce(torch.div(z, 2), "sum", "elsewhere")
        return reduce(x, "a"), reduce(y, "b"), other

    plan = _plan(backward, tensor(4), tensor(2, 3), tensor(4), ddp0=[[1, 0]])
    assert_expected_inline(
        plan.describe().replace(": group", ":\ngroup"),
        """\
bucket 0: 2 gradients, 40 bytes, sum(gradient / 2) float32 cpu on ddp0, sent as float32, scaled: collective: b, a
left alone: all_reduce (_c10d_functional.all_reduce.default):
group 'elsewhere' belongs to no DistributedDataParallel module that was constructed under ddp_fusion""",  # noqa: E501
    )
    assert plan.buckets[0].num_bytes == plan.buckets[0].sent_bytes == 40


def test_the_report_of_a_plan() -> None:
    def backward(x, y, z):
        gradients = [reduce(x, "a"), reduce(y, "b"), reduce(z, "c", module="ddp2")]
        return *gradients, all_reduce(y, "max", "elsewhere")

    module = trace(backward, [tensor(4), tensor(2, 3), tensor(4)])
    report = report_plan(plan_of(module.graph, 1000), "concat")
    assert (report.collectives_before, report.collectives_after) == (4, 3)
    first, second = report.buckets
    assert (first.module, first.group, first.parameters) == ("DDP0", "world", ("a", "b"))
    assert (first.num_bytes, first.dtype) == (40, "float32")
    assert (second.module, second.group, second.parameters) == ("DDP2", "pairs", ("c",))
    assert ["group 'elsewhere'" in item.reason for item in report.rejections] == [True]
    other_mode = report_plan(plan_of(module.graph, 1000), "coalesced")
    assert other_mode.digest != report.digest


@pytest.mark.parametrize("layout", [[[0, 1, 2]], [[0], [1, 2]], [[2, 0], [1]], [[2], [1], [0]]])
def test_buckets_and_what_lies_in_them_are_the_layouts(layout: list[list[int]]) -> None:
    plan = _plan(_three, tensor(4), ddp0=layout)
    assert _names(plan) == [["abc"[number] for number in bucket] for bucket in layout]


def test_a_bucket_is_launched_after_those_before_it() -> None:
    """The last gradient fills the first bucket: the other two buckets wait for it."""
    plan = _plan(_three, tensor(4), ddp0=[[2], [1], [0]])
    assert [bucket.ready.owner.parameter for bucket in plan.buckets] == ["c", "c", "c"]


def test_each_module_has_its_layout() -> None:
    def backward(x):
        names = ["a", "b"]
        return [reduce(x, name, module=module) for name in names for module in ("ddp0", "ddp2")]

    plan = _plan(backward, tensor(4), ddp0=[[0, 1]], ddp2=[[1], [0]])
    assert sorted(_names(plan)) == [["a"], ["a", "b"], ["b"]]


def test_gradients_are_sent_in_the_dtype_that_is_asked_for() -> None:
    graph = trace(_three, [tensor(4)]).graph
    of = buckets_with([piece(0, 1, 2)], reduce_dtype=torch.bfloat16)
    (bucket,) = plan_buckets(graph, find(graph), lambda _: of).buckets
    assert (bucket.num_bytes, bucket.sent_bytes) == (48, 24)


ONE = [tensor(4)]


def _some(x):
    return reduce(x, "a"), reduce(torch.neg(x), "b")


def _twice(x):
    return reduce(x, "a"), reduce(torch.neg(x), "a")


def _of_two_kinds(x):
    return reduce(x, "a"), reduce(cast(x, torch.float64), "b")


def _from_an_average(x):
    return reduce(torch.neg(reduce(x, "a")), "b")


def _beside_a_collective(x):
    return reduce(x, "a"), reduce(torch.neg(x), "b"), all_reduce(x, "sum", "world")


def _read_before_its_wait(x):
    return reduce(x, "a"), reduce(x, "b", op="max")


def _overwritten(x, grad):
    first = reduce(grad, "a")
    grad.zero_()
    return first, reduce(x, "b")


@pytest.mark.parametrize(
    ("function", "inputs", "layout", "why"),
    [
        (_some, ONE, [[0, 1, 2]], "has 2 of the 3 gradients of DDP0"),
        (_some, ONE, [[0]], "has 2 of the 1 gradients"),
        (_twice, ONE, [[0]], "has 2 of the 1 gradients"),
        (_of_two_kinds, ONE, [[0, 1]], "bucket of DDP0 differ in dtype, device or divisor"),
        (_from_an_average, ONE, [[0, 1]], "depends on another gradient that is already averaged"),
        (_beside_a_collective, ONE, [[0, 1]], "a collective of its own on the same process group"),
        (_read_before_its_wait, ONE, [[0, 1]], "of b cannot be fused: .* reduce op is max"),
        (_overwritten, ONE * 2, [[0, 1]], "the gradient of a before the launch of its bucket"),
        (_some, [tensor(0)], [[0, 1]], "all gradients in a bucket of DDP0 are empty"),
    ],
)
def test_a_graph_that_cannot_launch_all_of_it_is_refused(
    function: Backward, inputs: list[TensorSpec], layout: list[list[int]], why: str
) -> None:
    with pytest.raises(CannotLaunchError, match=why):
        _plan(function, *inputs, ddp0=layout)
