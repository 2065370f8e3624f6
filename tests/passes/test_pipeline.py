# ruff: noqa: E501  (a golden has one line a node)
"""All passes in their order, and what checks them."""

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
from torch._logging._internal import trace_log

from fusion_passes.agreement.launches import Collective, LaunchList
from fusion_passes.config import FUSION_MODES, FusionConfig, FusionMode
from fusion_passes.graph.collectives import ALL_REDUCE, WAIT, all_reduce, is_launch, is_pinned
from fusion_passes.graph.text import graph_text
from fusion_passes.passes import pipeline as pipeline_module
from fusion_passes.passes.coalesced import FuseByCoalescing
from fusion_passes.passes.concat import FuseByConcat
from fusion_passes.passes.contract import GraphPass
from fusion_passes.passes.pipeline import (
    passes_before_planning,
    passes_that_fuse,
    passes_that_order,
    run_pipeline,
)
from fusion_passes.passes.place import PlaceReductions
from fusion_passes.passes.verify import BrokenInvariantError
from fusion_passes.plan.buckets import BucketPlan
from fusion_passes.plan.placement import PlacementPlan, plan_placement
from fusion_passes.reductions.owners import DdpGroups
from testing.graphs import (
    Backward,
    assert_same_numbers,
    assert_topological,
    caps,
    check,
    check_unchanged,
    coalesced,
    concat,
    execute,
    groups_of,
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
pack_default: f32[8] = pack([mm, mm_2], [0, 4], [2, 1, 2, 1], torch.float32, 'none', 1.0, False, 'b9749fde35c89923:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; avg float32 2-1')
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
agree__default: ? = agree_(mm, 'ddp0', 'coalesced; avg float32 2-1')
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


def test_what_the_ranks_have_agreed_on_comes_before_what_the_graph_suggests() -> None:
    """Here the second layer's gradient is there first; the other ranks send the first one's first,
    and divide in another place."""
    items = (Collective("before", "float32", (1,), 0), Collective("before", "float32", (2,), 1))
    agreed = LaunchList("concat", items)
    assert_expected_inline(
        check(_layers, _INPUTS, pipeline("concat", agreed=agreed)),
        """\
x_1: f32[2, 2]
w1_1: f32[2, 2]
w2_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, w2_1)
pack_default_1: f32[4] = pack([mm], [0], [2, 1], torch.float32, 'div', 2.0, True, 'ca312903924d0cbe:1')
mm_1: f32[2, 2] = mm(w2_1, x_1)
mm_2: f32[2, 2] = mm(mm_1, w1_1)
pack_default: f32[4] = pack([mm_2], [0], [2, 1], torch.float32, 'div', 2.0, True, 'ca312903924d0cbe:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; sum float32 1; sum float32 2')
all_reduce_default: f32[4] = all_reduce(pack_default, 'sum', 'ddp0')
all_reduce_default_1: f32[4] = all_reduce(pack_default_1, 'sum', 'ddp0')
pinned_wait_tensor_default: ? = pinned_wait_tensor_default()
pinned_wait_tensor_default_1: f32[4] = control_deps((all_reduce_default_1, all_reduce_default), pinned_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(pinned_wait_tensor_default_1, [2, 2], [2, 1], 0)
pinned_wait_tensor_default_2: ? = pinned_wait_tensor_default_1()
pinned_wait_tensor_default_3: f32[4] = control_deps((all_reduce_default_1, all_reduce_default), pinned_wait_tensor_default_2, all_reduce_default_1)
as_strided_default_1: f32[2, 2] = as_strided(pinned_wait_tensor_default_3, [2, 2], [2, 1], 0)
return (as_strided_default_1, as_strided_default)
""",
    )


def test_an_agreement_that_a_graph_cannot_keep_is_left() -> None:
    """One gradient depends on the other's average: one bucket would wait for itself."""

    def backward(x, w):
        g2 = reduce(torch.mm(x, w), "w2")
        return g2, reduce(torch.mm(g2, w), "w1")

    agreed = LaunchList("concat", (Collective("by", "float32", (1, 2), 0),))
    inputs = [tensor(2, 2)] * 2
    own = check(backward, inputs, pipeline("concat"))
    assert check(backward, inputs, pipeline("concat", agreed=agreed)) == own


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("world", "concat; avg float32 2; +1 avg float32 1; foreign 2"),
        ("pairs", "concat; avg float32 2; avg float32 1"),
    ],
)
def test_a_list_says_which_collectives_lie_between(group: str, said: str) -> None:
    """Of the model's own, on the same process group: ranks pair up with them in this order too."""

    def backward(x, w1, w2):
        g2 = reduce(torch.mm(x, w2), "w2")
        hidden = all_reduce(torch.mm(w2, x), "sum", group)
        g1 = reduce(torch.mm(hidden, w1), "w1")
        return g2, g1, all_reduce(torch.mm(hidden, x), "sum", group)

    text = check(backward, _INPUTS, pipeline("concat", caps(1)))
    assert f"'{said}')" in text


@pytest.mark.parametrize(
    ("disabled", "is_fused", "is_pinned"),
    [("", True, True), ("PinOrder", True, False), ("FuseByConcat", False, False)],
)
def test_passes_can_be_switched_off(disabled: str, is_fused: bool, is_pinned: bool) -> None:
    module = trace(_layers, _INPUTS)
    with inductor_config.patch(disabled_passes=disabled):
        plan = _run(module)
    text = graph_text(module.graph)
    assert bool(plan.buckets) == ("pack(" in text) == ("agree_(" in text) == is_fused
    assert ("control_deps" in text) == is_pinned


def test_dead_code_removal_can_be_switched_off() -> None:
    """A gradient with a dead reader beside its wait is none that can be fused."""

    def backward(x):
        launch = ALL_REDUCE(torch.div(x, 2), "sum", "ddp0#a")
        torch.neg(launch)
        return WAIT(launch)

    assert _run(trace(backward, [tensor(4)])).buckets
    with inductor_config.patch(disabled_passes="EraseDeadCode"):
        assert not _run(trace(backward, [tensor(4)])).buckets


def test_the_agreement_of_the_ranks_cannot_be_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = trace(_layers, _INPUTS)
    with inductor_config.patch(disabled_passes="AgreeBeforeLaunch"):
        _run(module)
    assert "agree_(" in graph_text(module.graph)
    said = (
        "AgreeBeforeLaunch runs, though TORCHINDUCTOR_DISABLED_PASSES names it: "
        "without it, ranks whose graphs differ would hang."
    )
    assert said in caplog.messages


def test_each_pass_is_timed_under_its_name() -> None:
    _run(trace(_layers, _INPUTS))
    names = {f"pass.post_grad_passes.{graph_pass.name}" for graph_pass in _all_passes()}
    assert names <= compilation_time_metrics.keys()


def test_each_pass_leaves_its_graph_in_a_trace() -> None:
    """As for ``tlparse``: what is before a pass is after the one before it."""
    module = trace(_layers, _INPUTS)
    traced, records = graph_text(module.graph), _Records()
    trace_log.addHandler(records)
    try:
        _run(module)
    finally:
        trace_log.removeHandler(records)
    names = ["traced", *(graph_pass.name for graph_pass in _all_passes())]
    graphs = [f"ddp_fusion_{i}_{name}" for i, name in enumerate(names)]
    assert list(records.texts) == [*graphs, "ddp_fusion_plan"]
    assert records.texts["ddp_fusion_0_traced"] == traced
    assert records.texts["ddp_fusion_7_PinOrder"] == graph_text(module.graph)


def _all_passes() -> list[GraphPass]:
    config, plan, groups = FusionConfig(mode="concat"), BucketPlan((), ()), DdpGroups({})
    return [
        *passes_before_planning(groups),
        *passes_that_fuse(config, plan, groups),
        *passes_that_order(config, plan, PlacementPlan({}, (), ()), groups),
    ]


class _Records(logging.Handler):
    """Keeps the texts of a structured trace, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        artifact = record.metadata.get("artifact", {})  # type: ignore[attr-defined]
        if artifact.get("name", "").startswith("ddp_fusion_"):
            self.texts[artifact["name"]] = record.payload  # type: ignore[attr-defined]


def test_the_plan_says_where_buckets_were_placed() -> None:
    plan = _run(trace(_layers, _INPUTS))
    assert [placement and placement.why_waited() for placement in plan.placements] == ["at the end"]
    with inductor_config.patch(disabled_passes="PlaceReductions"):
        assert _run(trace(_layers, _INPUTS)).placements == (None,)


def test_a_bucket_without_elements_is_placed_nowhere() -> None:
    """It stays as it was traced; the next bucket's place is its own."""

    def backward(x, empty):
        return reduce(empty, "e"), reduce(torch.mm(x, x), "a"), torch.mm(x, x)

    plan = _run(trace(backward, [tensor(2, 2), tensor(0, dtype=torch.float64)]))
    assert [bucket.is_empty for bucket in plan.buckets] == [True, False]
    assert [placement and placement.following for placement in plan.placements] == [None, 1]


def test_single_reductions_are_placed_and_pinned_too() -> None:
    assert_expected_inline(
        check(_layers, _INPUTS, pipeline("concat", caps(1))),
        """\
x_1: f32[2, 2]
w1_1: f32[2, 2]
w2_1: f32[2, 2]
mm: f32[2, 2] = mm(x_1, w2_1)
pack_default: f32[4] = pack([mm], [0], [2, 1], torch.float32, 'none', 1.0, False, '2cd998c85c8d6f01:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; avg float32 2; avg float32 1')
all_reduce_default: f32[4] = all_reduce(pack_default, 'avg', 'ddp0')
pinned_mm_1: ? = pinned_mm_1()
pinned_mm_2: f32[2, 2] = control_deps((all_reduce_default), pinned_mm_1, w2_1, x_1)
mm_2: f32[2, 2] = mm(pinned_mm_2, w1_1)
pack_default_1: f32[4] = pack([mm_2], [0], [2, 1], torch.float32, 'none', 1.0, False, '2cd998c85c8d6f01:1')
all_reduce_default_1: f32[4] = all_reduce(pack_default_1, 'avg', 'ddp0')
pinned_wait_tensor_default: ? = pinned_wait_tensor_default()
pinned_wait_tensor_default_1: f32[4] = control_deps((all_reduce_default_1), pinned_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(pinned_wait_tensor_default_1, [2, 2], [2, 1], 0)
pinned_wait_tensor_default_2: ? = pinned_wait_tensor_default_1()
pinned_wait_tensor_default_3: f32[4] = control_deps((all_reduce_default_1), pinned_wait_tensor_default_2, all_reduce_default_1)
as_strided_default_1: f32[2, 2] = as_strided(pinned_wait_tensor_default_3, [2, 2], [2, 1], 0)
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
pack_default: f32[8] = pack([add, add_1], [0, 4], [2, 1, 2, 1], torch.float32, 'div', 2.0, False, '74f4771723083d46:0')
agree__default: ? = agree_(pack_default, 'ddp0', 'concat; sum float32 2-1')
all_reduce_default: f32[8] = all_reduce(pack_default, 'sum', 'ddp0')
pinned_wait_tensor_default: ? = pinned_wait_tensor_default()
pinned_wait_tensor_default_1: f32[8] = control_deps((all_reduce_default, mm), pinned_wait_tensor_default, all_reduce_default)
as_strided_default: f32[2, 2] = as_strided(pinned_wait_tensor_default_1, [2, 2], [2, 1], 0)
as_strided_default_1: f32[2, 2] = as_strided(pinned_wait_tensor_default_1, [2, 2], [2, 1], 4)
_foreach_copy__default: ? = _foreach_copy_([g2_1, g1_1], [as_strided_default, as_strided_default_1])
cos: f32[2, 2] = cos(x_1)
return cos
""",
    )


@pytest.mark.parametrize("mode", FUSION_MODES)
def test_a_second_run_changes_nothing(mode: FusionMode) -> None:
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
def test_graphs_that_are_none_of_its_business(mode: FusionMode, backward: Backward) -> None:
    check_unchanged(backward, [tensor(2, 2)], pipeline(mode))


def test_the_plan_of_a_graph_without_reductions_keeps_the_reasons() -> None:
    module = trace(lambda x: all_reduce(x, "sum", "other"), [tensor(4)])
    plan = _run(module)
    assert plan.buckets == ()
    assert [rejection.node.name for rejection in plan.rejections] == ["all_reduce"]


def _run(module: fx.GraphModule, mode: FusionMode = "concat") -> BucketPlan:
    return run_pipeline(module.graph, FusionConfig(mode=mode), owner_of, caps())


@pytest.mark.parametrize(
    ("mode", "fuse"), [("concat", FuseByConcat), ("coalesced", FuseByCoalescing)]
)
def test_the_mode_chooses_the_pass(mode: FusionMode, fuse: type) -> None:
    plan = BucketPlan((), ())
    assert isinstance(passes_that_fuse(FusionConfig(mode=mode), plan, DdpGroups({}))[0], fuse)


@dataclass(frozen=True)
class _Calls(GraphPass):
    function: Callable[[fx.Graph], bool]

    def __call__(self, graph: fx.Graph) -> bool:
        return self.function(graph)


def _run_only(monkeypatch: pytest.MonkeyPatch, function: Callable[[fx.Graph], bool]) -> None:
    """Lets the pipeline run one function in the place of its passes."""
    monkeypatch.setattr(pipeline_module, "passes_that_fuse", lambda *_: [_Calls(function)])
    monkeypatch.setattr(pipeline_module, "passes_that_order", lambda *_: [])


def test_a_pass_that_lies_about_change_stops_the_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    _run_only(monkeypatch, lambda graph: True)
    with pytest.raises(BrokenInvariantError, match="returned True, which is not what it did"):
        _run(trace(_layers, _INPUTS))


def test_a_pass_that_is_silent_about_change_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def place_silently(graph: fx.Graph) -> bool:
        return PlaceReductions(plan_placement(graph, groups_of(graph)))(graph) and False

    _run_only(monkeypatch, place_silently)
    with pytest.raises(BrokenInvariantError, match="returned False"):
        _run(trace(_layers, _INPUTS))


def test_a_pass_that_breaks_an_invariant_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_elsewhere(graph: fx.Graph) -> bool:
        start = next(iter(graph.find_nodes(op="call_function", target=ALL_REDUCE)))
        start.args = (*start.args[:2], "ddp2#w")
        return True

    _run_only(monkeypatch, send_elsewhere)
    with pytest.raises(BrokenInvariantError, match="other elements are reduced"):
        _run(trace(_layers, _INPUTS))


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fusion_passes.passes.pipeline"):
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


@pytest.mark.parametrize("mode", FUSION_MODES)
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(steps=_STEPS, cap=st.sampled_from([1, 40, 1000]))
def test_any_graph_gives_the_same_numbers(mode, steps, cap) -> None:
    """The pipeline's own invariants hold too: it raises where they do not."""
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
        assert not any(is_pinned(node) for node in module.graph.nodes)


@pytest.mark.parametrize("fuse", [concat, coalesced])
@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(steps=_STEPS, cap=st.sampled_from([1, 40, 1000]))
def test_placing_changes_nothing_that_the_placement_says(fuse, steps, cap) -> None:
    """The report reads the plan that was made before anything moved: one of the graph as it then
    stands would say the same."""
    graph = trace(_backward_of(steps), _INPUTS).graph
    fuse(caps(cap))(graph)(graph)
    plan = plan_placement(graph, groups_of(graph))
    PlaceReductions(plan)(graph)
    assert _said(plan_placement(graph, groups_of(graph))) == _said(plan)


def _said(plan: PlacementPlan) -> dict[str, tuple[object, ...]]:
    return {
        item.launch.name: (
            item.why_launched(),
            item.why_waited(),
            item.overlapped,
            item.following,
        )
        for item in plan.placements
    }
