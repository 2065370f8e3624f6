"""What the bench compares with: the lower bound, eager DDP's gradients, models, timelines."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from bench_steps.gradients import compare
from bench_steps.limits import earliest_end, lower_bound, ready_shares
from bench_steps.processes import cores_of
from bench_steps.rows import Assignment, Row, groups_of, rows_of
from fusion_passes.profile.tables import MIB, CostTable, Taken
from fusion_passes.reporting.spans import lane_of, merged, timeline_of, without
from workloads import models
from workloads.models import MAKERS, TINY, subject, users_subject

# The lower bound


def test_gradients_are_sent_in_the_order_in_which_they_are_ready() -> None:
    costs = CostTable.of((1, 100), (0.01, 1.0))
    assert earliest_end([2.0, 0.0, 1.0], [20, 10, 10], costs) == pytest.approx(2.2)


def test_without_overlap_there_is_one_bucket_and_with_free_launches_one_a_gradient() -> None:
    latency_only = CostTable.of((1, 100), (1.0, 1.0))
    assert earliest_end([0.0, 1.0, 2.0], [10, 10, 10], latency_only) == 3.0
    by_size = CostTable.of((1, 100), (0.01, 1.0))
    assert earliest_end([0.0, 1.0, 2.0], [10, 10, 10], by_size) == pytest.approx(2.1)
    assert earliest_end([], [], by_size) == 0.0


def test_a_step_is_never_shorter_than_its_compute() -> None:
    costs = CostTable.of((1, 100), (0.01, 1.0))
    assert lower_bound(10.0, [0.1], [10], costs) == 10.0
    assert lower_bound(10.0, [1.0], [10], costs) == pytest.approx(10.1)


def test_the_bound_with_contention_counts_what_compute_loses() -> None:
    costs, size = CostTable.of((1, MIB), (0.5, 1.0)), MIB // 2
    # The first ends at 1.75 and has taken a quarter of a second from what the second waits for.
    taken = Taken(each_ns=200_000_000, mib_ns=100_000_000)
    assert lower_bound(2.0, [0.5, 1.0], [size, size], costs) == pytest.approx(2.75)
    found = lower_bound(2.0, [0.5, 1.0], [size, size], costs, taken)
    assert found == pytest.approx(3.0, abs=1e-5)


def test_a_gradient_is_ready_when_it_is_on_the_last_rank() -> None:
    fast, slow = [[0.1, 0.4], [0.2, 0.4]], [[0.3, 0.3], [0.3, 0.3]]
    assert ready_shares([fast, slow], [[1.0, 1.0], [1.0, 1.0]]) == pytest.approx([0.3, 0.4])


# Rows


def test_caps_that_hold_all_gradients_are_tried_once() -> None:
    rows = rows_of(["eager DDP", "x"], ["eager DDP"], (25.0, 1.0, 50.0, 100.0), 20 * MIB)
    labels = [row.label for row in rows]
    assert labels == ["eager DDP", "x", "eager DDP, 1 MB", "eager DDP, 25 MB"]
    assert len(rows_of([], ["x"], (1.0, 25.0, 50.0), 25 * MIB + 1)) == 3


def test_groups_keep_the_order_of_rows() -> None:
    rows = [Row("way", str(number)) for number in range(7)]
    groups = groups_of(rows, 3)
    assert [len(group) for group in groups] == [3, 3, 1]
    assert [row for group in groups for row in group] == rows


def test_cores_are_shared() -> None:
    assert cores_of(2, [0, 1, 2, 3, 4]) == ((0, 1), (2, 3))
    assert cores_of(3, [4, 5]) == ((4,), (5,), (4,))


def test_an_assignment_survives_the_command_line() -> None:
    given = Assignment(Row("way", "concat", 2.5), "mlp", "tiny", 1, 2, (3,), "host", 9.0)
    assert Assignment.from_json(given.to_json()) == given


# Gradients


def gradient_pair() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    expected = {"weight": torch.linspace(-1, 1, 64), "bias": torch.full((4,), 1e-9)}
    return {name: tensor.clone() for name, tensor in expected.items()}, expected


def test_rounding_is_no_difference() -> None:
    gradients, expected = gradient_pair()
    gradients["weight"] *= 1 + 1e-6
    gradients["bias"] *= -3
    assert compare(gradients, expected, {}, {}).error < 1e-3


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.01, float("nan")])
def test_another_gradient_is_found(factor: float) -> None:
    gradients, expected = gradient_pair()
    gradients["weight"] *= factor
    checked = compare(gradients, expected, {}, {})
    assert checked.worst == "weight"
    assert not checked.error <= 1e-3


def test_gradients_of_one_side_and_other_buffers_are_named() -> None:
    gradients, expected = gradient_pair()
    del gradients["bias"]
    buffers = {"mean": torch.ones(2), "count": torch.tensor(3)}
    checked = compare(gradients, expected, buffers, {**buffers, "mean": torch.zeros(2)})
    assert (checked.missing, checked.buffers) == (("bias",), ("mean",))


# Timelines


def test_the_profilers_names_have_lanes() -> None:
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


# Models


@pytest.mark.parametrize("name", MAKERS)
def test_every_model_has_a_loss_and_gradients(name: str) -> None:
    made = subject(name, TINY)
    model = made.build()
    model(*made.batch(0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    same = [torch.equal(a, b) for a, b in zip(made.batch(0), made.batch(1), strict=True)]
    assert not all(same), "ranks must have different batches"


@pytest.mark.parametrize("name", MAKERS)
def test_every_model_is_one_graph(name: str) -> None:
    """Else the lower bound is not known."""
    made = subject(name, TINY)
    torch._dynamo.reset()
    assert torch._dynamo.explain(made.build())(*made.batch(0)).graph_count == 1
    torch._dynamo.reset()


def test_models_of_the_bench_have_several_ddp_buckets() -> None:
    sizes = {name: subject(name, models.MEDIUM) for name in MAKERS}
    for name, made in sizes.items():
        num_bytes = sum(p.nbytes for p in made.build().parameters())
        assert 26 * MIB < num_bytes < 100 * MIB, f"{name}: {num_bytes / MIB:.0f} MiB"


def pair_factory():
    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0)), batch_of


def loss_factory():
    return torch.nn.Linear(2, 2), batch_of, lambda model, batch: model(*batch).sum()


def broken_factory():
    return torch.nn.Linear(2, 2)


def batch_of(seed):
    return [torch.full((1, 2), float(seed))]


@pytest.mark.parametrize("name", ["pair_factory", "loss_factory"])
def test_a_users_factory_is_trained(name: str) -> None:
    made = users_subject(f"{__name__}:{name}")
    model = made.build()
    model(*made.batch(3)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_factory_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be imported"):
        users_subject("no_such_module:factory")
    with pytest.raises(ValueError, match=r"must return \(model, batch\)"):
        users_subject(f"{__name__}:broken_factory").build()
