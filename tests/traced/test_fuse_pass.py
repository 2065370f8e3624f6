"""The report of a plan."""

from __future__ import annotations

from fusion_passes.graph.collectives import all_reduce
from fusion_passes.traced.fuse_pass import report_plan
from tests.support.graphs import plan_of, reduce, tensor, trace


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
