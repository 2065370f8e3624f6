"""Real processes: training under the flag against eager DDP, on every rank.

Each case trains the same model on the same data twice, or three times (see
:func:`testing.training.train_all_ways`), and compares the gradients after each backward,
dtypes and strides included, and the parameters and buffers in the end.

Equality is in every bit

* against eager DDP for models in which nothing is ever rounded (see ``testing/models.py``,
  and ``test_exact_models_round_nothing``), whatever the number of ranks;
* against gradients that are averaged one by one *by hand*, with the model compiled in the same
  way, for all models on two ranks: ``a / 2 + b / 2`` has one order only.

Models that round differ from eager DDP by what their compiled kernels round otherwise than
PyTorch's own, and by nothing else, as the second rule shows. ``ROUNDING_EPS`` says how much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig, FusionReport
from fusion_passes.config import FusionMode
from testing import models
from testing.equality import assert_same_runs, tensor_difference
from testing.training import Recipe, Record, Site, Style, Way, in_ddp, train_all_ways

RUN = Callable[..., list[Any]]


EVERY_LOOP = ("concat-inside", "concat-outside", "coalesced-inside", "coalesced-outside")
"""Modes and styles of loop."""


def loops(*now: str) -> pytest.MarkDecorator:
    """Modes and styles of loop, as ``"concat-inside"``; those that are not named are left to the
    nightly jobs."""
    return pytest.mark.parametrize(
        ("mode", "style"),
        [
            pytest.param(
                *loop.split("-"),
                marks=[] if loop in now else [pytest.mark.nightly],
            )
            for loop in EVERY_LOOP
        ],
    )


ROUNDING_EPS = 32.0
"""What a model that rounds may differ by from eager DDP after three steps, in eps of fp32 and of a
tensor's largest element. Sums of n terms in two orders differ by about sqrt(n) eps; n is at most
4 x 8 x 8 = 256 here (a BatchNorm statistic; a row of the embedding's gradient has fewer), which
gives 16, and twice that is left to the steps that follow from it. 10.6 was measured."""

BF16_EPS = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float32).eps
"""Half of what one rounding to bf16 more or less makes, in eps of fp32."""


def train(
    run_on_ranks: RUN, recipe: Recipe, flag: Any, *ways: Way, ranks: int = 2
) -> tuple[list[Record], ...]:
    """The records of all ranks, for each way of training."""
    results = run_on_ranks(ranks, train_all_ways, recipe=recipe, flag=flag, ways=ways)
    return tuple([result[way] for result in results] for way in ways)


def assert_fused(records: list[Record], *, before: int, after: int, others: int = 0) -> None:
    """The run was fused on every rank, by what is reported and by what Gloo was given.

    Args:
        records: the run on each rank.
        before: gradients' collectives in each graph as it was traced.
        after: collectives of each graph as it runs.
        others: collectives of a step that are not in the backward's graph: buffers.
    """
    for record in records:
        assert record.warnings == []
        assert record.reports
        for report in record.reports:
            assert (report.collectives_before, report.collectives_after) == (before, after)
        for backward in record.backwards:
            assert backward.launches == others + after


# Models


@pytest.mark.parametrize(
    ("mode", "style", "training", "channels_last"),
    [
        ("concat", "inside", True, False),
        ("coalesced", "outside", False, True),
        pytest.param("coalesced", "outside", True, False, marks=pytest.mark.nightly),
        pytest.param("coalesced", "outside", True, True, marks=pytest.mark.nightly),
        pytest.param("concat", "inside", False, False, marks=pytest.mark.nightly),
        pytest.param("concat", "inside", True, True, marks=pytest.mark.nightly),
    ],
)
def test_convolutions_with_batch_norm(
    run_on_ranks: RUN, mode: str, style: Style, training: bool, channels_last: bool
) -> None:
    recipe = Recipe(
        in_ddp(functools.partial(models.ConvNet, channels_last=channels_last)),
        loss=models.square_loss,
        data=models.images,
        learning_rate=0.1,
        style=style,
        training=training,
    )
    fused, eager, by_hand = train(run_on_ranks, recipe, mode, "fused", "eager", "by hand")
    # Before each forward, one broadcast of the floating-point buffers and one of the counters.
    assert_fused(fused, before=8, after=1, others=2)
    assert_same_runs(fused, by_hand)
    assert_same_runs(fused, eager, tolerance_eps=ROUNDING_EPS)


@loops("concat-outside")
def test_transformer(run_on_ranks: RUN, mode: str, style: Style) -> None:
    recipe = Recipe(
        in_ddp(functools.partial(models.gpt2, layers=1)),
        loss=models.language_loss,
        data=models.tokens,
        learning_rate=0.1,
        style=style,
    )
    fused, eager, by_hand = train(run_on_ranks, recipe, mode, "fused", "eager", "by hand")
    assert_fused(fused, before=16, after=1)
    assert_same_runs(fused, by_hand)
    assert_same_runs(fused, eager, tolerance_eps=ROUNDING_EPS)


# Buckets


@loops("concat-inside")
def test_several_buckets(run_on_ranks: RUN, mode: FusionMode, style: Style) -> None:
    cap_bytes = 300
    flag = FusionConfig(
        mode=mode, bucket_cap_mb=cap_bytes / 2**20, first_bucket_cap_mb=cap_bytes / 2**20
    )
    recipe = Recipe(in_ddp(functools.partial(models.mlp, depth=5)), style=style)
    fused, eager = train(run_on_ranks, recipe, flag, "fused", "eager")
    # In ready order: 16 + 128 + 32 + 256, and then 32 + 256 three times, of which the last two
    # gradients of one layer may change places.
    buckets = fused[0].reports[0].buckets
    assert len(buckets) > 2
    assert_fused(fused, before=10, after=len(buckets))
    for bucket in buckets:
        assert bucket.cap_bytes == cap_bytes
    assert all(bucket.num_bytes >= cap_bytes for bucket in buckets[:-1])
    assert sum(bucket.num_bytes for bucket in buckets) == 16 + 128 + 4 * (32 + 256)
    assert len({report.digest for record in fused for report in record.reports}) == 1
    assert_same_runs(fused, eager)


def build_with_two_caps(site: Site) -> nn.Module:
    """Two DDP modules over the same group: the second is cut into buckets, the first is not."""
    return nn.Sequential(
        site.ddp(models.mlp(3, models.WIDTH)),
        nn.ReLU(),
        site.ddp(models.mlp(3), bucket_cap_mb=300 / 2**20),
    )


@loops("concat-inside")
def test_two_modules_with_different_caps(run_on_ranks: RUN, mode: str, style: Style) -> None:
    recipe = Recipe(build_with_two_caps, style=style)
    fused, eager = train(run_on_ranks, recipe, mode, "fused", "eager")
    for record in fused:
        (report,) = record.reports
        caps = _caps_of_modules(report)
        assert len(caps) == 2
        # DDP's default for a first bucket is 1 MiB.
        assert sorted(caps.values()) == [[300, 300], [2**20]]
    assert_fused(fused, before=12, after=3)
    assert_same_runs(fused, eager)


def _caps_of_modules(report: FusionReport) -> dict[str, list[int]]:
    caps: dict[str, list[int]] = {}
    for bucket in report.buckets:
        caps.setdefault(bucket.module, []).append(bucket.cap_bytes)
    return caps


# Groups of ranks

PAIRS = ((0, 1), (2, 3))


def build_with_users_hook(site: Site) -> nn.Module:
    """DDP over all ranks, but the last layer is averaged over pairs, by the user's own hook."""
    model = models.mlp()
    names = ["4.weight", "4.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    for name in names:
        hook = functools.partial(average_gradient, group=site.groups["rows"])
        model.get_parameter(name).register_post_accumulate_grad_hook(hook)
    return site.ddp(model)


def average_gradient(parameter: nn.Parameter, *, group: ProcessGroup) -> None:
    """Line by line what DDP's own hook does, which is why it is easily taken for one."""
    assert parameter.grad is not None
    gradient = parameter.grad / group.size()
    gradient = functional_collectives.all_reduce(gradient, "sum", group)
    parameter.grad.copy_(gradient)


@pytest.mark.xdist_group("four ranks")
@loops("concat-inside")
def test_users_hook_over_another_group_is_left_alone(
    run_on_ranks: RUN, mode: FusionMode, style: Style
) -> None:
    recipe = Recipe(build_with_users_hook, style=style, groups={"rows": PAIRS})
    # Only compiled autograd traces a user's hook.
    flag = FusionConfig(mode=mode, backward_graph="compiled_autograd")
    fused, eager = train(run_on_ranks, recipe, flag, "fused", "eager", ranks=4)
    assert_fused(fused, before=6, after=1 + 2)
    for record in fused:
        (report,) = record.reports
        assert [len(bucket.parameters) for bucket in report.buckets] == [4]
        assert len(report.rejections) == 2
        for rejection in report.rejections:
            assert "belongs to no DistributedDataParallel module" in rejection.reason
    users = _gradients(fused, "4.weight")
    assert [_equals(users, pair) for pair in ((0, 1), (2, 3), (0, 2))] == [True, True, False]
    assert_same_runs(fused, eager)


def _gradients(records: list[Record], name: str) -> list[Any]:
    """After the first backward, on each rank."""
    return [record.backwards[0].gradients[name] for record in records]


def _equals(tensors: list[torch.Tensor], pair: tuple[int, int]) -> bool:
    return torch.equal(tensors[pair[0]], tensors[pair[1]])


# Loops


@loops("concat-outside")
def test_autocast(run_on_ranks: RUN, mode: str, style: Style) -> None:
    recipe = Recipe(in_ddp(models.mlp), loss=models.autocast_loss, style=style)
    fused, eager, by_hand = train(run_on_ranks, recipe, mode, "fused", "eager", "by hand")
    assert_fused(fused, before=6, after=1)
    assert_same_runs(fused, by_hand)
    # A compiled kernel sums a bias gradient in fp32, where eager rounds each step to bf16: half
    # a rounding in the gradient, and as much again in the bf16 copies of the trained weights.
    assert_same_runs(fused, eager, tolerance_eps=BF16_EPS)


# What these tests stand on


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(in_ddp(models.mlp), steps=4, batch_sizes=(2, 4, 3, 5)), id="mlp"),
        pytest.param(Recipe(in_ddp(models.mlp), steps=2, micro_batches=3), id="accumulated"),
        pytest.param(Recipe(in_ddp(functools.partial(models.mlp, depth=5))), id="deep"),
        pytest.param(Recipe(build_with_two_caps), id="two modules"),
        pytest.param(Recipe(in_ddp(models.Tied)), id="tied"),
        pytest.param(Recipe(in_ddp(models.Layouts)), id="layouts"),
        pytest.param(Recipe(in_ddp(models.Shapes)), id="shapes"),
    ],
)
def test_exact_models_round_nothing(run_on_ranks: RUN, recipe: Recipe) -> None:
    """fp64 has 29 bits more: had fp32 rounded anything, it would show."""
    single, double = train(run_on_ranks, recipe, None, "eager", "eager in double")
    assert_same_runs(single, [_in_single(record) for record in double])


def _in_single(record: Record) -> Record:
    gradients = (backward.gradients for backward in record.backwards)
    kept: list[dict[str, Any]] = [record.parameters, *gradients]
    for values in kept:
        for name, value in values.items():
            single = value.float()
            assert torch.equal(single.double(), value), f"{name} has more bits than fp32"
            values[name] = single
    return record


def test_a_difference_of_one_bit_is_found() -> None:
    one = torch.ones(2, 2)
    next_to_one = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-23]])
    assert tensor_difference(next_to_one, one, 0.0) is not None
    assert tensor_difference(next_to_one, one, 1.0) is None
    assert tensor_difference(one * 2, one, 32.0) is not None
    assert tensor_difference(one * float("nan"), one, 1e9) is not None
    assert tensor_difference(torch.ones(2, 3).t(), torch.ones(3, 2), 0.0) is not None
    assert tensor_difference(one.double(), one, 1.0) is not None
    assert tensor_difference(None, one, 1.0) is not None
