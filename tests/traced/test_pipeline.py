# ruff: noqa: E501  (a golden has one line a node)
"""All passes in their order, and the checks after them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._inductor.config as inductor_config
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._dynamo.utils import compilation_time_metrics

from fusion_passes.config import ReduceMode
from fusion_passes.graph.collectives import ALL_REDUCE, WAIT, all_reduce, is_launch, is_pinned
from fusion_passes.graph.text import graph_text
from fusion_passes.traced import pipeline as pipeline_module
from fusion_passes.traced.buckets import BucketPlan, CannotLaunchError
from fusion_passes.traced.pipeline import run_pipeline
from fusion_passes.traced.place import PlaceReductions
from fusion_passes.traced.verify import BrokenInvariantError, GraphPass
from tests.support.artifacts import traced_artifacts
from tests.support.graphs import (
    Backward,
    assert_same_numbers,
    buckets_of,
    buckets_with,
    check,
    execute,
    groups_of,
    owner_of,
    piece,
    pipeline,
    reduce,
    tensor,
    trace,
)


def _layers(x, w1, w2):
    """The backward of two layers: the second layer's gradient is computed first."""
    g2 = reduce(torch.mm(x, w2), "w2")
    hidden = torch.mm(w2, x)
    g1 = reduce(torch.mm(hidden, w1), "w1")
    return g2, g1


_INPUTS = [tensor(2, 2)] * 3

PASSES = ("EraseDeadCode", "FuseByConcat", "PlaceReductions", "PinOrder")


def test_concat() -> None:
    assert_expected_inline(
        check(_layers, _INPUTS, pipeline("concat")),
        """\
x_1: f32[2, 2]
w1_1: f32[2, 2]
w2_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, w2_1)
mm_1: f32[2, 2] = mm(w2_1, x_1)
mm_2: f32[2, 2] = mm(mm_1, w1_1)
pack_default: f32[8] = pack([mm, mm_2], [0, 4], [2, 1, 2, 1], torch.float32, 1.0, False, '66cc2a3ca81c7404:0')
all_reduce_default: f32[8] = all_reduce(pack_default, 'avg', 'ddp0')
pinned_wait_tensor_default: ? = pinned_wait_tensor_default()
pinned_wait_tensor_default_1: f32[8] = control_deps((all_reduce_default), pinned_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(pinned_wait_tensor_default_1, [2, 2], [2, 1], 0)
as_strided_default_1: f32[2, 2] = as_strided(pinned_wait_tensor_default_1, [2, 2], [2, 1], 4)
return (as_strided_default, as_strided_default_1)
""",
    )


def test_coalesced() -> None:
    assert_expected_inline(
        check(_layers, _INPUTS, pipeline("coalesced")),
        """\
x_1: f32[2, 2]
w1_1: f32[2, 2]
w2_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, w2_1)
mm_1: f32[2, 2] = mm(w2_1, x_1)
mm_2: f32[2, 2] = mm(mm_1, w1_1)
all_reduce_coalesced_default: (f32[2, 2], f32[2, 2]) = all_reduce_coalesced([mm, mm_2], 'avg', 'ddp0')
getitem: f32[2, 2] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[2, 2] = getitem(all_reduce_coalesced_default, 1)
pinned_wait_tensor_default: ? = pinned_wait_tensor_default()
pinned_wait_tensor_default_1: (f32[2, 2], f32[2, 2]) = control_deps((getitem), pinned_wait_tensor_default, getitem, getitem_1)
getitem_2: f32[2, 2] = getitem(pinned_wait_tensor_default_1, 0)
getitem_3: f32[2, 2] = getitem(pinned_wait_tensor_default_1, 1)
return (getitem_2, getitem_3)
""",
    )


def test_passes_that_order_can_be_switched_off() -> None:
    module = trace(_layers, _INPUTS)
    with inductor_config.patch(disabled_passes="PinOrder"):
        assert _run(module).buckets
    assert "control_deps" not in graph_text(module.graph)


@pytest.mark.parametrize("disabled", ["FuseByConcat", "EraseDeadCode"])
def test_without_a_pass_that_fuses_a_graph_cannot_be_run(disabled: str) -> None:
    """Other ranks launch buckets. A gradient with a dead reader cannot be fused."""

    def backward(x):
        launch = ALL_REDUCE(torch.div(x, 2), "sum", "ddp0#a")
        torch.neg(launch)
        return WAIT(launch)

    def run() -> BucketPlan:
        graph = trace(backward, [tensor(4)]).graph
        return run_pipeline(graph, "concat", owner_of, lambda _: buckets_with([piece(0)]))

    assert run().buckets
    with inductor_config.patch(disabled_passes=disabled), pytest.raises(CannotLaunchError):
        run()


def test_each_pass_is_timed_under_its_name() -> None:
    _run(trace(_layers, _INPUTS))
    _run(trace(_layers, _INPUTS), "coalesced")
    names = {f"pass.post_grad_passes.{name}" for name in (*PASSES, "FuseByCoalescing")}
    assert names <= compilation_time_metrics.keys()


def test_each_pass_leaves_its_graph_in_a_trace() -> None:
    """As for ``tlparse``: the trace before a pass is the trace after the previous one."""
    module = trace(_layers, _INPUTS)
    traced = graph_text(module.graph)
    with traced_artifacts() as texts:
        _run(module)
    assert list(texts) == [f"ddp_fusion_{n}_{name}" for n, name in enumerate(("traced", *PASSES))]
    assert texts["ddp_fusion_0_traced"] == traced
    assert texts["ddp_fusion_4_PinOrder"] == graph_text(module.graph)


def test_the_plan_says_where_buckets_were_placed() -> None:
    plan = _run(trace(_layers, _INPUTS))
    assert [placement.why_waited() for placement in plan.placements] == ["at the end"]
    with inductor_config.patch(disabled_passes="PlaceReductions"):
        assert _run(trace(_layers, _INPUTS)).placements == ()


def test_the_plan_of_a_graph_without_reductions_keeps_the_reasons() -> None:
    module = trace(lambda x: all_reduce(x, "sum", "other"), [tensor(4)])
    plan = _run(module)
    assert plan.buckets == ()
    assert [rejection.node.name for rejection in plan.rejections] == ["all_reduce"]


def _run(module: fx.GraphModule, mode: ReduceMode = "concat") -> BucketPlan:
    return run_pipeline(module.graph, mode, owner_of, buckets_of(module.graph))


@dataclass(frozen=True)
class _Calls(GraphPass):
    function: Callable[[fx.Graph], bool]

    def __call__(self, graph: fx.Graph) -> bool:
        return self.function(graph)


def _place_silently(graph: fx.Graph) -> bool:
    return PlaceReductions(groups_of(graph))(graph) and False


def _send_elsewhere(graph: fx.Graph) -> bool:
    start = next(iter(graph.find_nodes(op="call_function", target=ALL_REDUCE)))
    start.args = (*start.args[:2], "ddp2#w")
    return True


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda graph: True, "returned True, which is not what it did"),
        (_place_silently, "returned False"),
        (_send_elsewhere, "other elements are reduced"),
    ],
)
def test_a_pass_that_lies_or_breaks_an_invariant_stops_the_compile(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[fx.Graph], bool], said: str
) -> None:
    """It replaces the passes that fuse and place."""
    monkeypatch.setattr(pipeline_module, "FuseByConcat", lambda *_: _Calls(function))
    monkeypatch.setattr(pipeline_module, "PlaceReductions", lambda *_: _Calls(lambda _: False))
    with pytest.raises(BrokenInvariantError, match=said):
        _run(trace(_layers, _INPUTS))


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fusion_passes.traced.pipeline"):
        plan = _run(trace(_layers, _INPUTS))
    assert plan.digest() in caplog.text
    assert "PlaceReductions: " in caplog.text


# --- Properties --------------------------------------------------------------------------------

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "kernel", "reduce", "use", "foreign"]),
        st.integers(0, 5),
        st.sampled_from(["ddp0", "ddp1", "ddp2"]),
    ),
    max_size=12,
)


def _backward_of(steps: list[tuple[str, int, str]]) -> Backward:
    def backward(x, y, grad):
        values, results = [x, y], []
        for number, (kind, pick, module) in enumerate(steps):
            value = values[pick % len(values)]
            if kind == "compute":
                values.append(torch.neg(value))
            elif kind == "kernel":
                values.append(torch.mm(value, y))
            elif kind == "reduce":
                results.append(reduce(value, str(number), module=module))
            elif kind == "foreign":
                name = "world" if pick % 2 else "other"
                results.append(all_reduce(value, "sum", name))
            elif results:
                values.append(torch.abs(results[pick % len(results)]))
        if results:
            grad.copy_(results[0])
        return [*results, values[-1]]

    return backward


@pytest.mark.parametrize("mode", ["concat", "coalesced"])
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(steps=_STEPS, cap=st.sampled_from([1, 40, 1000]))
def test_any_graph_gives_the_same_numbers(mode, steps, cap) -> None:
    """The pipeline also raises if its own invariants do not hold."""
    module = trace(_backward_of(steps), _INPUTS)
    before, numbers = graph_text(module.graph), execute(module)
    try:
        plan = run_pipeline(module.graph, mode, owner_of, buckets_of(module.graph, cap))
    except CannotLaunchError:
        return
    module.graph.lint()
    assert_same_numbers(numbers, execute(module))
    launches = [n for n in module.graph.nodes if n.op == "call_function" and is_launch(n)]
    assert len(launches) == len(plan.buckets) + len(plan.rejections)
    if not plan.buckets:
        assert graph_text(module.graph) == before
        assert not any(is_pinned(node) for node in module.graph.nodes)
