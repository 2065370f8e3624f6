"""Decides where the gradients of a bucket are scaled. Pure, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from fusion_passes.config import ScalingOption
from fusion_passes.hook_form import Scaling
from fusion_passes.reductions import GradientReduction, ReductionKey

ScalingWay: TypeAlias = Literal["none", "collective", "store", "bucket", "result"]
"""Where a bucket is scaled.

* ``"none"``: nowhere: there is nothing to scale by.
* ``"collective"``: the collective averages.
* ``"store"``: by the kernels that store the gradients in the bucket.
* ``"bucket"``: by one pass over the bucket, before the launch.
* ``"result"``: by the kernel that casts the result back, behind the wait.
"""

_WIDE_RANGE: Final = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which a sum over all ranks is far from overflow. In fp16 it is not: there gradients are
divided before they are summed, as in eager DDP."""

_AVERAGING: Final = ("nccl", "gloo")
"""Backends that average without a kernel of ours. NCCL multiplies while it reads, which costs
nothing. Gloo divides behind the sum, in its own thread, in about the time that a pass in front of
it takes (``python tools/bench_scaling.py``), but nothing waits for it before the launch."""


@dataclass(frozen=True)
class BucketScaling:
    """Where and by what a bucket is scaled.

    Attributes:
        way: see :data:`ScalingWay`.
        reduce_op: what the collective does.
        scaling: what the gradients are scaled by outside of the collective.
    """

    way: ScalingWay
    reduce_op: str
    scaling: Scaling


def choose_scaling(
    key: ReductionKey, members: Sequence[GradientReduction], option: ScalingOption, folds: bool
) -> BucketScaling:
    """Where a bucket of ``members`` is scaled.

    Args:
        key: the members' key.
        members: at least one.
        option: what the user asks for.
        folds: whether each gradient is stored by a kernel that can scale it.
    """
    if key.scaling.kind == "none" or key.scaling.value == 1:
        return BucketScaling("none", key.reduce_op, Scaling("none"))
    owner = members[0].owner
    is_average = key.reduce_op == "sum" and key.scaling == Scaling("div", owner.world_size)
    averages = owner.backend in _AVERAGING and key.reduce_dtype in _WIDE_RANGE and is_average
    way: ScalingWay
    if option != "auto":
        way = option
    elif key.reduce_dtype != key.dtype:
        # A dtype with a small range is scaled before it is summed, the others where it is exact.
        way = "store" if key.reduce_dtype == torch.float16 else "result"
    elif folds and not (averages and owner.backend == "nccl"):
        way = "store"
    else:
        way = "collective" if averages else "bucket"
    if way == "collective":
        if is_average:
            return BucketScaling(way, "avg", Scaling("none"))
        way = "store" if folds else "bucket"
    return BucketScaling(way, key.reduce_op, key.scaling)
