"""Real processes: where gradients are scaled and in which dtype they are sent, against eager DDP
with the same communication hook."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fusion_passes import FusionConfig
from fusion_passes.config import FusionMode, ReduceDtype, ScalingOption
from testing import models
from testing.equality import assert_same_runs
from testing.training import Recipe, Record, Site, Style, Way, in_ddp, train_all_ways

RUN = Callable[..., list[Any]]

MODES = pytest.mark.parametrize("mode", ["concat", "coalesced"])

THIRDS_EPS = 4.0
"""What gradients averaged over three ranks may differ by, in eps of fp32 and of a tensor's largest
element. Each rank's share is rounded once by a division and twice by a multiplication with the
rounded reciprocal, and two sums are rounded in another order: at most half an eps each, of values
that are at most the largest, is 3; a cancelled sum makes it a little more. 0.83 was measured."""


def train(
    run_on_ranks: RUN, recipe: Recipe, flag: Any, *ways: Way, ranks: int = 2
) -> tuple[list[Record], ...]:
    """The records of all ranks, for each way of training."""
    results = run_on_ranks(ranks, train_all_ways, recipe=recipe, flag=flag, ways=ways)
    return tuple([result[way] for result in results] for way in ways)


def scalings(records: list[Record]) -> set[str]:
    return {b.scaling for record in records for report in record.reports for b in report.buckets}


def sent_and_stored(records: list[Record]) -> set[tuple[int, int]]:
    return {
        (bucket.sent_bytes, bucket.num_bytes)
        for record in records
        for report in record.reports
        for bucket in report.buckets
    }


# Where gradients are scaled


@pytest.mark.parametrize(
    ("mode", "scaling", "set_to_none"),
    [
        pytest.param(mode, scaling, is_new, marks=() if is_now else pytest.mark.nightly)
        for mode, scaling, first in (
            ("concat", "collective", True),
            ("concat", "store", False),
            ("concat", "bucket", True),
            ("coalesced", "collective", False),
            ("coalesced", "store", True),
        )
        for is_new, is_now in ((first, True), (not first, False))
    ],
    ids=lambda value: {True: "new", False: "kept"}.get(value, value),
)
def test_every_way_of_scaling_is_eager_ddps_on_two_ranks(
    run_on_ranks: RUN, mode: FusionMode, scaling: ScalingOption, set_to_none: bool
) -> None:
    recipe = Recipe(in_ddp(models.mlp), set_to_none=set_to_none, style="outside")
    flag = FusionConfig(mode=mode, scaling=scaling)
    fused, eager = train(run_on_ranks, recipe, flag, "fused", "eager")
    assert scalings(fused) == {scaling}
    assert_same_runs(fused, eager)


@pytest.mark.xdist_group("three ranks")
@pytest.mark.parametrize(
    ("mode", "scaling"),
    [("concat", "collective"), ("concat", "store"), ("concat", "bucket"), ("coalesced", "auto")],
)
def test_three_ranks_round_and_no_more(
    run_on_ranks: RUN, mode: FusionMode, scaling: ScalingOption
) -> None:
    """One over three has no end in binary: each way rounds it in another place."""
    recipe = Recipe(in_ddp(models.mlp), steps=1, style="outside")
    flag = FusionConfig(mode=mode, scaling=scaling)
    fused, eager = train(run_on_ranks, recipe, flag, "fused", "eager", ranks=3)
    for ours, theirs in zip(fused, eager, strict=True):
        ours.parameters, theirs.parameters = {}, {}  # A gradient of zero can get either sign.
    assert_same_runs(fused, eager, tolerance_eps=THIRDS_EPS)


def one_layer(dtype: torch.dtype) -> nn.Module:
    return models.fill_whole(nn.Linear(models.WIDTH, 1, bias=False)).to(dtype)


def large_rows(_: torch.Generator, size: int) -> models.Batch:
    return torch.full((size, models.WIDTH), 40000.0 / size).half(), torch.ones(size, 1).half()


@MODES
def test_fp16_does_not_overflow_where_eager_ddp_does_not(run_on_ranks: RUN, mode: str) -> None:
    recipe = Recipe(
        in_ddp(functools.partial(one_layer, torch.float16)),
        loss=large_sum,
        data=large_rows,
        steps=1,
        learning_rate=2.0**-14,
    )
    fused, eager = train(run_on_ranks, recipe, mode, "fused", "eager")
    gradient = eager[0].backwards[0].gradients["weight"]
    assert gradient is not None
    assert gradient.min() == gradient.max() == 40000
    assert_same_runs(fused, eager)


def large_sum(model: nn.Module, batch: models.Batch) -> torch.Tensor:
    """Whose gradients are near the end of fp16's range: their sum over two ranks is beyond it."""
    return model(batch[0] * 2.0**-13).sum() * 2.0**13


# In which dtype they are sent

HOOKS = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
    None: default_hooks.allreduce_hook,
}


def renamed(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same hook for eager DDP, which refuses the name of the bf16 hook where there is no
    NCCL."""

    def users_hook(state, bucket):
        return hook(state, bucket)

    return users_hook


def build_with_hook(dtype: str | None, site: Site) -> nn.Module:
    """In DDP with the hook that sends ``dtype``: under the flag and in eager."""
    module: Any = site.ddp(models.mlp())
    is_eager = not module._use_python_reducer
    module.register_comm_hook(None, renamed(HOOKS[dtype]) if is_eager else HOOKS[dtype])
    return module


@pytest.mark.parametrize(
    ("mode", "style", "dtype"),
    [
        pytest.param("concat", "inside", "bf16", marks=pytest.mark.nightly),
        ("coalesced", "outside", "bf16"),
        ("concat", "outside", "fp16"),
        pytest.param("coalesced", "inside", "fp16", marks=pytest.mark.each_torch),
        ("concat", "inside", None),
    ],
)
def test_hooks(run_on_ranks: RUN, mode: str, style: Style, dtype: str | None) -> None:
    recipe = Recipe(functools.partial(build_with_hook, dtype), style=style)
    fused, eager = train(run_on_ranks, recipe, mode, "fused", "eager")
    assert fused[0].warnings == []
    ((sent, stored),) = sent_and_stored(fused)
    assert stored == sent * (1 if dtype is None else 2)
    assert all(backward.launches == 1 for backward in fused[0].backwards)
    assert_same_runs(fused, eager)


def build_for_option(dtype: str, site: Site) -> nn.Module:
    """Plain DDP under the flag, whose option says what is sent; with the hook in eager."""
    module: Any = site.ddp(models.mlp())
    if not module._use_python_reducer:
        module.register_comm_hook(None, renamed(HOOKS[dtype]))
    return module


@pytest.mark.parametrize(
    ("dtype", "set_to_none", "mode"),
    [
        ("bf16", False, "coalesced"),
        ("fp16", False, "concat"),
        pytest.param("bf16", True, "concat", marks=pytest.mark.nightly),
        pytest.param("fp16", True, "coalesced", marks=pytest.mark.nightly),
        pytest.param("bf16", True, "coalesced", marks=pytest.mark.nightly),
        pytest.param("bf16", False, "concat", marks=pytest.mark.nightly),
        pytest.param("fp16", True, "concat", marks=pytest.mark.nightly),
        pytest.param("fp16", False, "coalesced", marks=pytest.mark.nightly),
    ],
    ids=lambda value: {True: "new", False: "kept"}.get(value, value),
)
def test_the_option(
    run_on_ranks: RUN, mode: FusionMode, dtype: ReduceDtype, set_to_none: bool
) -> None:
    build = functools.partial(build_for_option, dtype)
    recipe = Recipe(build, set_to_none=set_to_none, style="outside")
    flag = FusionConfig(mode=mode, reduce_dtype=dtype)
    fused, eager = train(run_on_ranks, recipe, flag, "fused", "eager")
    ((sent, stored),) = sent_and_stored(fused)
    assert stored == 2 * sent
    assert scalings(fused) == {"result" if dtype == "bf16" else "store"}
    assert_same_runs(fused, eager)


@pytest.mark.parametrize("scaling", ["collective", "store", "bucket"])
def test_the_option_with_every_way_of_scaling(run_on_ranks: RUN, scaling: ScalingOption) -> None:
    recipe = Recipe(functools.partial(build_for_option, "bf16"), style="outside")
    flag = FusionConfig(scaling=scaling, reduce_dtype="bf16")
    fused, eager = train(run_on_ranks, recipe, flag, "fused", "eager")
    assert scalings(fused) == {scaling}
    assert_same_runs(fused, eager)


@MODES
def test_what_is_small_already_is_sent_as_it_is(run_on_ranks: RUN, mode: FusionMode) -> None:
    recipe = Recipe(in_ddp(models.TwoDtypes), style="outside")
    flag = FusionConfig(mode=mode, reduce_dtype="fp16")
    (fused,) = train(run_on_ranks, recipe, flag, "fused")
    buckets = fused[0].reports[0].buckets
    sent = {bucket.dtype: bucket.sent_bytes / bucket.num_bytes for bucket in buckets}
    assert sent == {"float32": 0.5, "bfloat16": 1.0}
