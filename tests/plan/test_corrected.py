"""Ready times by what was measured in steps, and the buckets that follow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.plan.corrected import corrected
from fusion_passes.plan.planner import PlanOptions
from fusion_passes.profile.steps import MeasuredSteps
from testing.graphs import caps, plan_of, trace
from tests.plan.test_measured import WIDTHS, chain, names, profile


def test_between_two_buckets_the_estimates_share_the_time() -> None:
    measured = MeasuredSteps(5, ((3, 2), (1, 0)), (100, 500))
    estimates = {3: 5, 2: 10, 1: 15, 0: 20}
    assert corrected(estimates, measured) == {3: 50, 2: 100, 1: 300, 0: 500}
    # Of a graph that makes them in another order, what is ready last says when a bucket was.
    assert corrected({3: 10, 2: 5, 1: 15, 0: 20}, measured) == {3: 100, 2: 50, 1: 300, 0: 500}


def test_steps_of_other_gradients_say_nothing() -> None:
    measured = MeasuredSteps(5, ((1, 0),), (100,))
    assert corrected({0: 1}, measured) is None
    assert corrected({0: 1, 1: 2, 2: 3}, measured) is None


@given(st.data())
def test_times_never_fall_and_are_those_that_were_measured(data) -> None:
    count = data.draw(st.integers(1, 8))
    many = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    estimates = dict(enumerate(sorted(data.draw(many))))
    edges = sorted({count, *data.draw(st.lists(st.integers(1, count), max_size=3))})
    buckets = [tuple(range(a, b)) for a, b in zip([0, *edges], edges, strict=False)]
    ready = sorted(
        data.draw(st.lists(st.integers(0, 99), min_size=len(edges), max_size=len(edges)))
    )
    times = corrected(estimates, MeasuredSteps(1, tuple(buckets), tuple(ready)))
    assert times is not None
    assert list(times.values()) == sorted(times.values())
    assert times[count - 1] == ready[-1] or estimates[count - 1] == 0


def test_buckets_follow_measured_steps_and_it_is_said() -> None:
    backward, inputs = chain(*WIDTHS)
    costs = profile(100_000, 100)

    def plan(*ready: int):
        measured = MeasuredSteps(5, ((0,), (1,), (2,), (3,)), ready) if ready else None
        options = PlanOptions(profile_of=lambda _: costs, steps_of=lambda _: measured)
        return plan_of(trace(backward, inputs).graph, caps(), options)

    numbers = [member.owner.number for bucket in plan().buckets for member in bucket.members]
    assert sorted(numbers) == [0, 1, 2, 3]
    assert "that are estimated from shapes" in plan().decision[0]
    late = plan(10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6)
    assert "that were measured in 5 steps" in late.decision[0]
    assert (
        "the last gradient is ready at 4.00 ms, the last all-reduce ends 0.20 ms later"
        in " ".join(late.decision)
    )
    assert len(names(plan(0, 0, 0, 10))) == 1
    assert len(names(late)) > 1
