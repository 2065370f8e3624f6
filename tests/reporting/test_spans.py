"""Reading a profile of a step: lanes, names of buckets, and exposed time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.reporting.spans import Event, Span, lane_of, length, merged, timeline_of, without
from fusion_passes.reporting.timeline import RankSteps, exposed_of

NAME = "DDP 0 (Net) bucket {}"


def test_names_have_lanes() -> None:
    assert lane_of("ddp_fusion: DDP 0 (Net) bucket 0 launch") == "launch"
    assert lane_of("ddp_fusion: DDP 0 (Net) bucket 0 wait") == "wait"
    assert lane_of("ddp_fusion: DDP 0 (Net) bucket 0") == "network"
    assert lane_of("CompiledFunctionBackward") is None
    assert lane_of("_c10d_functional::wait_tensor") == "wait"
    assert lane_of("_c10d_functional::all_reduce_") == "launch"
    assert lane_of("c10d::allreduce_") == "launch"
    assert lane_of("gloo:all_reduce") == "network"
    assert lane_of("graph_0_cpp_fused_relu_1") == "compute"
    assert lane_of("## Call CompiledFxGraph f7xk ##") is None


def test_what_holds_a_launch_or_a_wait_is_not_computing_then() -> None:
    assert merged([(2, 3), (0, 1), (1, 2), (5, 6)]) == [(0, 3), (5, 6)]
    assert without([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    timeline = timeline_of(
        [
            ("aten::mm", 0.0, 4.0),
            ("_c10d_functional::all_reduce_", 1.0, 2.0),
            ("aten::empty", 1.2, 1.4),
            ("_c10d_functional::wait_tensor", 4.0, 6.0),
            ("gloo:all_reduce", 1.5, 5.0),
        ],
        6.0,
    )
    busy = {lane: timeline.busy_s(lane) for lane in ("compute", "launch", "wait", "network")}
    assert busy == {"compute": 3.0, "launch": 1.0, "wait": 2.0, "network": 3.5}
    assert timeline.hidden_s() == 2.0


intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda x: (x[0], x[0] + x[1])), max_size=8
)


@given(intervals, intervals)
def test_without_is_what_each_unit_of_time_says(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    def units(found: list[tuple[float, float]]) -> set[int]:
        return {time for low, high in found for time in range(int(low), int(high))}

    rest = without(some, others)
    assert units(rest) == units(merged(some)) - units(merged(others))
    assert length(rest) == len(units(rest))
    assert all(low < high for low, high in rest)


def _events() -> list[Event]:
    """Two buckets and a user's barrier, as the profiler shows them on the CPU."""
    events: list[Event] = []
    for number, at in enumerate((1.0, 3.0)):
        name = f"ddp_fusion: {NAME.format(number)}"
        events += [
            ("_c10d_functional::all_reduce_", at, at + 0.5),
            (f"{name} launch", at + 0.1, at + 0.4),
            ("c10d::allreduce_", at + 0.2, at + 0.3),
            ("gloo:all_reduce", at + 0.6, at + 2.6),
            ("_c10d_functional::wait_tensor", 5.0 + number, 5.9 + number),
            (f"{name} wait", 5.1 + number, 5.8 + number),
        ]
    return [("c10d::barrier", 0.0, 0.1), ("gloo:barrier", 0.1, 0.3), *events]


def test_buckets_are_called_by_name_on_the_host_and_on_the_network() -> None:
    step = timeline_of(_events(), 8.0, host_computes=True)
    named = {(span.lane, span.name, span.start_s, span.end_s) for span in step.spans}
    assert named >= {
        ("launch", NAME.format(0), 1.0, 1.5),
        ("launch", NAME.format(1), 3.0, 3.5),
        ("wait", NAME.format(0), 5.0, 5.9),
        ("wait", NAME.format(1), 6.0, 6.9),
        ("network", "gloo:barrier", 0.1, 0.3),
        ("network", NAME.format(0), 1.6, 3.6),
        ("network", NAME.format(1), 3.6, 5.6),
        ("launch", "launch", 0.0, 0.1),
    }


def test_names_are_left_out_where_launches_and_transfers_do_not_match() -> None:
    events = [*_events(), ("gloo:broadcast", 7.0, 7.5)]
    step = timeline_of(events, 8.0, host_computes=True)
    assert [span.name for span in step.spans if span.lane == "network"] == [
        "gloo:barrier", "gloo:all_reduce", "gloo:all_reduce", "gloo:broadcast",
    ]  # fmt: skip


def test_launches_that_stay_on_their_rank_take_no_bucket_its_name() -> None:
    """Under no_sync, nothing is sent."""
    events = [event for event in _events() if event[0] not in ("gloo:barrier", "c10d::barrier")]
    events.append(("c10d::allreduce_", 0.0, 0.1))
    step = timeline_of(events, 8.0, host_computes=True)
    assert [span.name for span in step.spans if span.lane == "network"] == [
        NAME.format(0),
        NAME.format(1),
    ]


def test_a_gpus_ranges_are_the_network_and_its_kernels_in_them_are_not_counted_twice() -> None:
    name = NAME.format(0)
    events = [
        (f"ddp_fusion: {name}", 1.0, 2.0),
        ("ncclDevKernel_AllReduce", 1.1, 2.0),
        ("ncclDevKernel_Broadcast", 4.0, 5.0),
        ("triton_poi_fused", 0.0, 1.5),
    ]
    step = timeline_of(events, 6.0)
    assert [(s.lane, s.name) for s in step.spans] == [
        ("compute", "compute"),
        ("network", name),
        ("network", "ncclDevKernel_Broadcast"),
    ]
    assert (step.busy_s("network"), step.hidden_s()) == (2.0, 0.5)


def test_what_is_exposed_is_the_first_buckets_that_is_there() -> None:
    spans = (
        Span("compute", "compute", 0.0, 2.0),
        Span("network", "a", 1.0, 4.0),
        Span("network", "b", 1.5, 6.0),
        Span("network", "c", 5.0, 5.5),
    )
    rank = RankSteps(0, "", 0.0, 0.0, (7.0,), spans)
    ((_, step),) = rank.steps()
    assert [(span.name, times) for span, times in exposed_of(step)] == [
        ("a", [(2.0, 4.0)]),
        ("b", [(4.0, 6.0)]),
        ("c", []),
    ]
    assert rank.times().exposed_s == 4.0
    times = rank.bucket_times(["a", "b", "c"])
    assert sum(item.exposed_s for item in times.values()) == pytest.approx(4.0)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=8),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=4),
)
def test_exposed_times_of_buckets_sum_up(
    sent: list[tuple[int, int]], computed: list[tuple[int, int]]
) -> None:
    spans = [Span("network", f"b{n}", at, at + long) for n, (at, long) in enumerate(sent)]
    spans += [Span("compute", "compute", at, at + long) for at, long in computed]
    rank = RankSteps(0, "", 0.0, 0.0, (50.0,), tuple(spans))
    ((_, step),) = rank.steps()
    found = sum(high - low for _, times in exposed_of(step) for low, high in times)
    assert found == rank.times().exposed_s


def test_steps_are_cut_at_their_ends_and_medians_are_taken() -> None:
    spans = tuple(
        Span("network", "a", begin + 1.0, begin + 1.0 + long)
        for begin, long in ((0.0, 1.0), (10.0, 3.0), (20.0, 2.0))
    )
    rank = RankSteps(0, "", 0.0, 0.0, (10.0, 20.0, 30.0), spans)
    assert [step.busy_s("network") for _, step in rank.steps()] == [1.0, 3.0, 2.0]
    times = rank.bucket_times(["a", "never sent"])
    assert list(times) == ["a"]
    assert (times["a"].started_s, times["a"].ended_s) == (1.0, 3.0)
