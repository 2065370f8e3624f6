"""Whether buckets are worth planning once more: predicted from measured steps alone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fusion_passes.plan.again import WORTH_PER_MILLE, ChosenFrom, Forecast, forecast
from fusion_passes.plan.planner import PlanOptions
from fusion_passes.plan.queue import Queue
from fusion_passes.plan.sharing import Slot
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.profile.tables import CostTable
from testing.graphs import caps, plan_of, trace
from tests.plan.test_measured import WIDTHS, chain, profile

COSTS = CostTable((1, 100), (10, 109))
"""10 ns, and 1 ns for each byte beyond the first."""


def chosen(sizes: list[int], estimates: list[int]) -> ChosenFrom:
    """One kind of gradients, whose numbers fall as they become ready."""
    queue = Queue(tuple(estimates), tuple(sizes))
    slot = Slot(tuple(range(len(sizes))), queue, COSTS)
    numbers = tuple(reversed(range(len(sizes))))
    return ChosenFrom((slot,), (numbers,), (tuple(estimates),))


def test_buckets_that_run_late_are_worth_planning_anew() -> None:
    known = chosen([20, 20, 20, 20], [1, 2, 3, 4])
    one = MeasuredSteps(5, ((3, 2, 1, 0),), (400,))
    found = forecast(known, one)
    assert found is not None
    assert found.first_ns == 400 + 89
    assert found.second_ns == 400 + 29, "the last gradient alone"
    assert found.is_worth_it
    several = MeasuredSteps(5, ((3,), (2,), (1,), (0,)), (100, 200, 300, 400))
    assert forecast(known, several) == Forecast(429, 429)


def test_the_same_prediction_needs_five_per_cent() -> None:
    assert WORTH_PER_MILLE == 50
    assert Forecast(1000, 950).is_worth_it
    assert not Forecast(1000, 951).is_worth_it
    assert not Forecast(0, 0).is_worth_it


def test_steps_that_no_plan_has_say_nothing() -> None:
    known = chosen([20, 20, 20], [1, 2, 3])
    assert forecast(known, MeasuredSteps(5, ((2, 1),), (9,))) is None, "of other gradients"
    assert forecast(known, MeasuredSteps(5, ((2, 0), (1,)), (8, 9))) is None, "no neighbours"


@given(st.data())
def test_the_second_plan_is_never_predicted_to_be_worse(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=7))
    count = len(sizes)
    estimates = sorted(data.draw(st.lists(st.integers(0, 90), min_size=count, max_size=count)))
    edges = sorted({0, count, *data.draw(st.lists(st.integers(1, count), max_size=3))})
    numbers = [*reversed(range(count))]
    buckets = tuple(tuple(numbers[a:b]) for a, b in pairwise(edges))
    times = st.lists(st.integers(0, 900), min_size=len(buckets), max_size=len(buckets))
    measured = MeasuredSteps(5, buckets, tuple(sorted(data.draw(times))))
    known = chosen(sizes, estimates)
    found = forecast(known, measured)
    assert found is not None
    assert found.second_ns <= found.first_ns
    assert found.is_worth_it == (found.second_ns <= 0.95 * found.first_ns and found.first_ns > 0)
    assert found == forecast(chosen(sizes, estimates), measured), "the same on each rank"
    assert known.digest() == chosen(sizes, estimates).digest()


def test_a_plan_says_from_what_it_was_chosen() -> None:
    backward, inputs = chain(*WIDTHS)
    costs = profile(100_000, 100)
    of_one = plan_of(trace(backward, inputs).graph, caps(), PlanOptions(profile_of=lambda _: costs))
    assert of_one.chosen_from is not None
    members = [member.owner.number for bucket in of_one.buckets for member in bucket.members]
    assert sorted(*of_one.chosen_from.numbers) == sorted(members)
    assert plan_of(trace(backward, inputs).graph, caps()).chosen_from is None
