"""Buckets that are chosen from measured costs, and what is said about them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_passes.config import FusionConfig
from fusion_passes.plan.buckets import BucketPlan
from fusion_passes.plan.caps import BucketCaps, ModuleCaps, bucket_caps, given_caps
from fusion_passes.plan.planner import NO_PROFILE, PlanOptions
from fusion_passes.plan.queue import Queue, Run
from fusion_passes.plan.ready import ready_times
from fusion_passes.plan.sharing import Slot, best_of, last_end
from fusion_passes.profile.records import Kind, Place, Profile, Rates
from fusion_passes.profile.tables import MIB, CostTable, Taken
from fusion_passes.reporting.records import report_plan
from testing.graphs import (
    caps,
    cast,
    check,
    pipeline,
    plan_of,
    reduce,
    tensor,
    trace,
)

RATES = Rates((("float32", 10**12),), 10**10, 1000)
PLACE = Place(2, ("host",), "gloo", "cpu", "", "2.13.0")


def profile(latency_ns: int, ns_per_kib: int, **tables: CostTable) -> Profile:
    """Costs of a latency and so much for each KiB, from 1 KiB to 1 GiB."""
    sizes = tuple(2**n for n in range(10, 31))
    table = CostTable(sizes, tuple(latency_ns + ns_per_kib * size // 1024 for size in sizes))
    kinds = [(Kind("float32", op), table) for op in ("sum", "avg")]
    return Profile(PLACE, (*kinds, *((Kind(name, "avg"), t) for name, t in tables.items())), RATES)


def chain(*widths: int, device: str = "cpu"):
    """A backward of matrix products, each with a gradient of its own."""

    def backward(x, *weights):
        gradients = []
        for index, weight in enumerate(weights):
            x = torch.mm(x, weight)
            gradients.append(reduce(torch.mm(x.t(), x), f"w{index}"))
        return gradients

    inputs = [tensor(64, widths[0], device=device)]
    inputs += [tensor(a, b, device=device) for a, b in itertools.pairwise(widths)]
    return backward, inputs


def plan(
    costs: Profile | None,
    *widths: int,
    limits: BucketCaps | None = None,
    device: str = "cpu",
) -> BucketPlan:
    backward, inputs = chain(*widths, device=device)
    options = PlanOptions(profile_of=lambda _: costs)
    caps_of = caps() if limits is None else lambda _: limits
    return plan_of(trace(backward, inputs).graph, caps_of, options)


def names(made: BucketPlan) -> list[str]:
    return ["".join(m.owner.parameter for m in bucket.members) for bucket in made.buckets]


WIDTHS = (512, 512, 512, 512, 512)


def test_latency_makes_one_bucket_and_bytes_make_many() -> None:
    assert names(plan(profile(10**9, 0), *WIDTHS)) == ["w0w1w2w3"]
    # Two products move their bytes in 0.26 ms, and a gradient of 1 MiB is sent in 0.1 ms.
    assert names(plan(profile(0, 100), *WIDTHS))[-1] == "w3"


def test_a_cap_of_the_users_is_an_upper_bound_and_its_cost_is_said() -> None:
    given = given_caps(2 * MIB)
    made = plan(profile(10**6, 0), *WIDTHS, limits=bucket_caps(FusionConfig(mode="auto"), given))
    assert names(made) == ["w0w1", "w2w3"]
    assert [bucket.cap_bytes for bucket in made.buckets] == [2 * MIB] * 2
    assert made.decision[1] == "your bucket cap costs 0.42 ms of that"
    many = plan(profile(0, 100), *WIDTHS, limits=bucket_caps(FusionConfig(mode="auto"), given))
    assert many.decision[1] == "your bucket cap costs nothing"
    single = bucket_caps(FusionConfig(mode="auto", bucket_cap_mb=0.5), given)
    assert names(plan(profile(10**9, 0), *WIDTHS, limits=single)) == ["w0", "w1", "w2", "w3"]


def test_defaults_of_ddp_bound_nothing() -> None:
    limits = bucket_caps(FusionConfig(mode="auto"), ModuleCaps(MIB, MIB))
    made = plan(profile(10**9, 0), *WIDTHS, limits=limits)
    assert names(made) == ["w0w1w2w3"]
    assert len(made.decision) == 1


def test_buckets_on_a_cpu_are_of_memory_that_is_kept() -> None:
    """Where one bucket would be best: of 14 MiB each, then of 36 beside smaller ones."""
    best_together = profile(10**9, 0)
    assert names(plan(best_together, *(1920,) * 5)) == ["w0w1", "w2w3"]
    assert names(plan(best_together, *(1920,) * 5, device="cuda")) == ["w0w1w2w3"]
    widths = (512, 512, 512, 3072, 512, 512)
    assert names(plan(best_together, *widths)) == ["w0w1", "w2", "w3w4"]


def test_no_bucket_of_several_gradients_is_larger_than_what_was_measured() -> None:
    """Where one bucket would be best: of gradients of 1 MiB, and one of 4."""
    widths, known = (512, 512, 512, 512, 1024, 512), profile(10**9, 0)
    short = CostTable((1024, 2 * MIB), (10**9, 10**9))
    measured = replace(known, tables=tuple((kind, short) for kind, _ in known.tables))
    assert names(plan(known, *widths)) == ["w0w1w2w3w4"]
    assert names(plan(measured, *widths)) == ["w0", "w1w2", "w3", "w4"]


def test_the_memory_bound_holds() -> None:
    limits = bucket_caps(FusionConfig(mode="auto", max_hold_mb=2), ModuleCaps(MIB, MIB))
    assert names(plan(profile(10**9, 0), *WIDTHS, limits=limits)) == ["w0w1", "w2w3"]


def test_a_gradient_that_is_overwritten_is_sent_before() -> None:
    def backward(x, y):
        first = reduce(x, "a")
        x.add_(1)
        return first, reduce(torch.mm(y, y), "b"), x

    made = plan_of(
        trace(backward, [tensor(512, 512), tensor(512, 512)]).graph,
        caps(),
        PlanOptions(profile_of=lambda _: profile(10**9, 0)),
    )
    assert names(made) == ["a", "b"]


def test_without_a_profile_caps_fill_buckets_and_it_is_said() -> None:
    made = plan(None, *WIDTHS, limits=BucketCaps(MIB, 2 * MIB, 1 << 40))
    assert names(made) == ["w0", "w1w2", "w3"]
    assert made.decision == (NO_PROFILE,)


def test_the_decision_is_said_with_predicted_times() -> None:
    made = plan(profile(10**6, 0), *WIDTHS, limits=BucketCaps(MIB, MIB, 1 << 40))
    (said,) = made.decision
    assert said.startswith("chosen from profile ")
    assert "(2 ranks on host, gloo on cpu)" in said
    assert "the last all-reduce ends 1.00 ms later" in said


def test_each_bucket_says_when_it_is_expected_on_the_network() -> None:
    made = plan(profile(1000, 10), *WIDTHS)
    times = [bucket.predicted for bucket in made.buckets]
    assert len(times) > 1
    costs = [item.end_ns - item.start_ns for item in times]
    assert costs == [1000 + 10 * bucket.sent_bytes // 1024 for bucket in made.buckets]
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(times)), "one after the other"
    assert plan(None, *WIDTHS).buckets[0].predicted is None
    reported = report_plan(made, "auto").buckets
    assert [(item.predicted_start_s, item.predicted_end_s) for item in reported] == [
        (item.start_ns / 1e9, item.end_ns / 1e9) for item in times
    ]
    unpredicted = tuple(dataclasses.replace(bucket, predicted=None) for bucket in made.buckets)
    assert dataclasses.replace(made, buckets=unpredicted).digest() == made.digest()


def test_kinds_that_share_the_network_are_planned_together() -> None:
    def backward(*inputs):
        return [
            reduce(
                cast(torch.mm(x, x), torch.bfloat16) if index % 2 else torch.mm(x, x), f"w{index}"
            )
            for index, x in enumerate(inputs)
        ]

    graph = trace(backward, [tensor(256, 256)] * 8).graph
    made = plan_of(graph, caps(MIB // 4), PlanOptions(profile_of=lambda _: profile(10**7, 0)))
    assert names(made) == ["w0w2w4w6", "w1w3w5w7"]
    assert "gradients of 2 kinds share the network" in made.decision[-1]


def test_what_all_reduces_take_from_compute_is_counted_and_said() -> None:
    free = profile(100_000, 100)
    taking = replace(free, rates=replace(RATES, taken=Taken(90_000, 90_000)))
    alone, beside = plan(free, *WIDTHS), plan(taking, *WIDTHS)
    assert len(names(beside)) < len(names(alone))
    assert (
        "(an all-reduce takes 0.09 ms and 0.09 ms for each MiB from the compute beside it)"
        in beside.decision[0]
    )
    assert "takes" not in alone.decision[0]


def test_kinds_that_share_the_network_take_from_each_others_compute() -> None:
    costs = CostTable((1, 100), (100, 100))
    one = Slot((0,), Queue((0,), (10,)), costs, Taken(50))
    other = Slot((1,), Queue((200,), (10,)), costs, Taken(50))
    assert last_end([one, other], [[Run(0, 1)], [Run(0, 1)]]) == 200 + 50 + 100


def test_a_plan_from_measurement_is_carried_out() -> None:
    costs = profile(10**9, 0)
    backward, inputs = chain(8, 8, 8)
    text = check(backward, inputs, pipeline("auto", profile_of=lambda _: costs))
    assert text.count(" = pack(") == 1, text


# --- Several kinds -----------------------------------------------------------------------------


@st.composite
def slots(draw) -> list[Slot]:
    kinds = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    ready = sorted(draw(st.lists(st.integers(0, 60), min_size=len(kinds), max_size=len(kinds))))
    made = []
    for kind in sorted(set(kinds)):
        mine = [i for i, other in enumerate(kinds) if other == kind]
        sizes = draw(st.lists(st.integers(1, 20), min_size=len(mine), max_size=len(mine)))
        times = sorted(draw(st.lists(st.integers(0, 30), min_size=2, max_size=2)))
        queue = Queue(tuple(ready[i] for i in mine), tuple(sizes))
        made.append(Slot(tuple(mine), queue, CostTable((2, 20), tuple(times))))
    return made


@settings(max_examples=150)
@given(slots())
def test_several_kinds_are_never_worse_than_given_buckets_and_one_is_best(made) -> None:
    alone = [[Run(i, i + 1) for i in range(len(slot.positions))] for slot in made]
    together = [[Run(0, len(slot.positions))] for slot in made]
    for filled in (alone, together):
        runs = best_of(made, filled)
        assert last_end(made, runs) <= last_end(made, filled)
        for slot, mine in zip(made, runs, strict=True):
            edges = [run.begin for run in mine] + [len(slot.positions)]
            assert edges == [0, *(run.end for run in mine)]


# --- Ready times -------------------------------------------------------------------------------


def test_products_take_their_operations_and_fused_operators_nothing() -> None:
    def backward(x, y):
        product = torch.mm(x, y)
        pointwise = torch.relu(torch.neg(product))
        return torch.mm(pointwise, y), torch.sum(pointwise, 0)

    fast = Rates((("float32", 10**9),), 10**12, 1)
    graph = trace(backward, [tensor(64, 32), tensor(32, 32)]).graph
    times = dict(zip((node.name for node in graph.nodes), ready_times(graph, fast), strict=True))
    product = 2 * 64 * 32 * 32
    assert times["mm"] == product
    assert times["neg"] == product, "a part of the kernel of relu"
    stored = 64 * 32 * 4 // 1000
    assert times["relu"] == product + stored
    assert times["mm_1"] == 2 * product + stored
    assert list(times.values()) == sorted(times.values())


@pytest.mark.parametrize("backward", [False, True])
def test_attention_and_convolutions_are_counted(backward: bool) -> None:
    def attention(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(out.sum(), (q, k, v)) if backward else out

    def convolution(x, w):
        out = torch.conv2d(x, w)
        return torch.autograd.grad(out.sum(), (x, w)) if backward else out

    rates = Rates((("float32", 10**9),), 10**15, 0)
    factor = 1 + 2.5 * backward
    for function, inputs, flops in (
        (attention, [tensor(2, 4, 8, 16)] * 3, 2 * 2 * 2 * 4 * 8 * 8 * 16 * factor),
        (
            convolution,
            [tensor(2, 3, 8, 8), tensor(5, 3, 3, 3)],
            2 * 2 * 5 * 36 * 27 * (1 + 2 * backward),
        ),
    ):

        def traced(*values, function=function):
            return function(*(value.requires_grad_() for value in values))

        graph = trace(traced, inputs).graph
        assert math.isclose(ready_times(graph, rates)[-1], flops, rel_tol=0.02), function


def test_a_convolution_whose_input_needs_no_gradient_is_counted() -> None:
    """The first of a model: its backward gives ``(None, weight, None)``."""

    def backward(x, w, gradient):
        sizes = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
        return torch.ops.aten.convolution_backward(gradient, x, w, [0], *sizes)[1]

    inputs = [tensor(2, 3, 8, 8), tensor(5, 3, 3, 3), tensor(2, 5, 6, 6)]
    rates = Rates((("float32", 10**9),), 10**15, 0)
    times = ready_times(trace(backward, inputs).graph, rates)
    assert math.isclose(times[-1], 2 * 2 * 5 * 36 * 27, rel_tol=0.02)


def test_symbolic_sizes_are_those_of_the_trace_and_stay_symbolic() -> None:
    module = trace(torch.mm, [tensor(6, 4), tensor(4, 4)], symbolic=True)
    rates = replace(RATES, kernel_ns=0)
    fixed = trace(torch.mm, [tensor(6, 4), tensor(4, 4)])
    assert ready_times(module.graph, rates)[-1] == ready_times(fixed.graph, rates)[-1]
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert not isinstance(product.meta["val"].shape[0], int)
