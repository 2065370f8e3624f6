# ruff: noqa: E501  (a golden has one line a node)
"""All passes in their order, and what checks them."""

from __future__ import annotations

import logging

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fusion_passes import pipeline as pipeline_module
from fusion_passes.collectives import ALL_REDUCE, all_reduce, is_held, is_launch
from fusion_passes.config import FUSION_MODES, FusionConfig
from fusion_passes.graph_text import graph_text
from fusion_passes.passes.coalesced import FuseByCoalescing
from fusion_passes.passes.concat import FuseByConcat
from fusion_passes.passes.place import PlaceReductions
from fusion_passes.pipeline import passes_for, run_pipeline
from fusion_passes.planning import BucketPlan
from fusion_passes.verify import LawBrokenError
from tests.support.graphs import (
    Backward,
    assert_same_numbers,
    assert_topological,
    caps,
    check,
    check_unchanged,
    execute,
    owner_of,
    pipeline,
    reduce,
    reduce_into,
    tensor,
    trace,
)


def _layers(x, w1, w2):
    """The backward of two layers: the second one's gradient is there first."""
    g2 = reduce(torch.mm(x, w2), "w2")
    hidden = torch.mm(w2, x)
    g1 = reduce(torch.mm(hidden, w1), "w1")
    return g2, g1


_INPUTS = [tensor(2, 2)] * 3


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
pack_default: f32[8] = pack([mm, mm_2], [0, 4], [2, 1, 2, 1], torch.float32, 'none', 1.0, 'b9749fde35c89923:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; avg float32 2-1')
all_reduce_default: f32[8] = all_reduce(pack_default, 'avg', 'ddp0')
held_wait_tensor_default: ? = held_wait_tensor_default()
held_wait_tensor_default_1: f32[8] = control_deps((all_reduce_default), held_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(held_wait_tensor_default_1, [2, 2], [2, 1], 0)
as_strided_default_1: f32[2, 2] = as_strided(held_wait_tensor_default_1, [2, 2], [2, 1], 4)
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
agree__default: ? = agree_(mm, 'ddp0', 'coalesced; avg float32 2-1')
all_reduce_coalesced_default: (f32[2, 2], f32[2, 2]) = all_reduce_coalesced([mm, mm_2], 'avg', 'ddp0')
getitem: f32[2, 2] = getitem(all_reduce_coalesced_default, 0)
getitem_1: f32[2, 2] = getitem(all_reduce_coalesced_default, 1)
held_wait_tensor_default: ? = held_wait_tensor_default()
held_wait_tensor_default_1: (f32[2, 2], f32[2, 2]) = control_deps((getitem), held_wait_tensor_default, getitem, getitem_1)
getitem_2: f32[2, 2] = getitem(held_wait_tensor_default_1, 0)
getitem_3: f32[2, 2] = getitem(held_wait_tensor_default_1, 1)
return (getitem_2, getitem_3)
""",
    )


def test_single_reductions_are_placed_and_held_too() -> None:
    assert_expected_inline(
        check(_layers, _INPUTS, pipeline("concat", caps(1))),
        """\
x_1: f32[2, 2]
w1_1: f32[2, 2]
w2_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, w2_1)
pack_default: f32[4] = pack([mm], [0], [2, 1], torch.float32, 'none', 1.0, '2cd998c85c8d6f01:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; avg float32 2; avg float32 1')
all_reduce_default: f32[4] = all_reduce(pack_default, 'avg', 'ddp0')
held_mm_1: ? = held_mm_1()
held_mm_2: f32[2, 2] = control_deps((all_reduce_default), held_mm_1, w2_1, x_1)
mm_2: f32[2, 2] = mm(held_mm_2, w1_1)
pack_default_1: f32[4] = pack([mm_2], [0], [2, 1], torch.float32, 'none', 1.0, '2cd998c85c8d6f01:1')
all_reduce_default_1: f32[4] = all_reduce(pack_default_1, 'avg', 'ddp0')
held_wait_tensor_default: ? = held_wait_tensor_default()
held_wait_tensor_default_1: f32[4] = control_deps((all_reduce_default_1), held_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(held_wait_tensor_default_1, [2, 2], [2, 1], 0)
held_wait_tensor_default_2: ? = held_wait_tensor_default_1()
held_wait_tensor_default_3: f32[4] = control_deps((all_reduce_default_1), held_wait_tensor_default_2, all_reduce_default_1)
as_strided_default_1: f32[2, 2] = as_strided(held_wait_tensor_default_3, [2, 2], [2, 1], 0)
return (as_strided_default, as_strided_default_1)
""",
    )


def test_existing_grads_are_written_where_they_were() -> None:
    def backward(x, g1, g2):
        reduce_into(g2, torch.mm(x, x), "w2")
        reduce_into(g1, torch.sin(x), "w1")
        return torch.cos(x)

    assert_expected_inline(
        check(backward, _INPUTS, pipeline("concat")),
        """\
x_1: f32[2, 2]
g1_1: f32[2, 2]
g2_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, x_1)
add: f32[2, 2] = add(g2_1, mm)
sin: f32[2, 2] = sin(x_1)
add_1: f32[2, 2] = add(g1_1, sin)
pack_default: f32[8] = pack([add, add_1], [0, 4], [2, 1, 2, 1], torch.float32, 'div', 2.0, '74f4771723083d46:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; sum float32 2-1')
all_reduce_default: f32[8] = all_reduce(pack_default, 'sum', 'ddp0')
held_wait_tensor_default: ? = held_wait_tensor_default()
held_wait_tensor_default_1: f32[8] = control_deps((all_reduce_default, mm), held_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(held_wait_tensor_default_1, [2, 2], [2, 1], 0)
as_strided_default_1: f32[2, 2] = as_strided(held_wait_tensor_default_1, [2, 2], [2, 1], 4)
_foreach_copy__default: ? = _foreach_copy_([g2_1, g1_1], [as_strided_default, as_strided_default_1])
cos: f32[2, 2] = cos(x_1)
return cos
""",
    )


@pytest.mark.parametrize("mode", FUSION_MODES)
def test_a_second_run_changes_nothing(mode: str) -> None:
    """Two kernels stand behind the first bucket."""

    def backward(x):
        a, b = reduce(x, "a"), reduce(torch.neg(x), "b")
        return a, b, torch.mm(x, torch.mm(x, x))

    check(backward, [tensor(2, 2)], pipeline(mode))


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda x: torch.mm(x, x), id="no collective"),
        pytest.param(
            lambda x: (all_reduce(x, "sum", "other"), torch.mm(x, x)), id="nothing of DDP's"
        ),
    ],
)
@pytest.mark.parametrize("mode", FUSION_MODES)
def test_graphs_that_are_none_of_its_business(mode: str, backward: Backward) -> None:
    check_unchanged(backward, [tensor(2, 2)], pipeline(mode))


def test_the_plan_of_a_graph_without_reductions_keeps_the_reasons() -> None:
    module = trace(lambda x: all_reduce(x, "sum", "other"), [tensor(4)])
    plan = _run(module)
    assert plan.buckets == ()
    assert [rejection.node.name for rejection in plan.rejections] == ["all_reduce"]


def _run(module: fx.GraphModule, mode: str = "concat") -> BucketPlan:
    return run_pipeline(module.graph, FusionConfig(mode=mode), owner_of, caps())


@pytest.mark.parametrize(
    ("mode", "fuse"), [("concat", FuseByConcat), ("coalesced", FuseByCoalescing)]
)
def test_the_mode_chooses_the_pass(mode: str, fuse: type) -> None:
    plan = BucketPlan((), ())
    assert isinstance(passes_for(FusionConfig(mode=mode), plan, owner_of)[0], fuse)


def test_a_pass_that_lies_about_change_stops_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "passes_for", lambda *_: [lambda graph: True])
    with pytest.raises(LawBrokenError, match="returned True, which is not what it did"):
        _run(trace(_layers, _INPUTS))


def test_a_pass_that_is_silent_about_change_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def place_silently(graph: fx.Graph) -> bool:
        return PlaceReductions(owner_of)(graph) and False

    monkeypatch.setattr(pipeline_module, "passes_for", lambda *_: [place_silently])
    with pytest.raises(LawBrokenError, match="returned False"):
        _run(trace(_layers, _INPUTS))


def test_a_pass_that_breaks_a_law_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_elsewhere(graph: fx.Graph) -> bool:
        start = next(iter(graph.find_nodes(op="call_function", target=ALL_REDUCE)))
        start.args = (*start.args[:2], "ddp2#w")
        return True

    monkeypatch.setattr(pipeline_module, "passes_for", lambda *_: [send_elsewhere])
    with pytest.raises(LawBrokenError, match="other elements are reduced"):
        _run(trace(_layers, _INPUTS))


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fusion_passes.pipeline"):
        plan = _run(trace(_layers, _INPUTS))
    assert plan.digest() in caplog.text
    assert "PlaceReductions: " in caplog.text


# --- Properties --------------------------------------------------------------------------------

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "kernel", "reduce", "use", "stranger"]),
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
            elif kind == "stranger":
                name = "world" if pick % 2 else "other"
                results.append(all_reduce(value, "sum", name))
            elif results:
                values.append(torch.abs(results[pick % len(results)]))
        if results:
            grad.copy_(results[0])
        return [*results, values[-1]]

    return backward


@pytest.mark.parametrize("mode", FUSION_MODES)
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(steps=_STEPS, cap=st.sampled_from([1, 40, 1000]))
def test_any_graph_gives_the_same_numbers(mode, steps, cap) -> None:
    """The pipeline's own laws hold too: it raises where they do not."""
    module = trace(_backward_of(steps), _INPUTS)
    before, numbers = graph_text(module.graph), execute(module)
    plan = run_pipeline(module.graph, FusionConfig(mode=mode), owner_of, caps(cap))
    assert_topological(module.graph)
    assert_same_numbers(numbers, execute(module))
    launches = [n for n in module.graph.nodes if n.op == "call_function" and is_launch(n)]
    assert len(launches) == len(plan.buckets) + len(plan.rejections) + sum(
        len(bucket.members) - 1 for bucket in plan.buckets if bucket.is_empty
    )
    if not plan.buckets:
        assert graph_text(module.graph) == before
        assert not any(is_held(node) for node in module.graph.nodes)
