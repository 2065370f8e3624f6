"""Decides where the gradients of a bucket are scaled. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import torch

from fusion_passes.agreement.launches import Divided
from fusion_passes.config import ReduceDtype, ScalingOption
from fusion_passes.graph.scaling import NO_SCALING, Scaling
from fusion_passes.reductions.find import ReductionKey
from fusion_passes.reductions.owners import Owner

ScalingMethod: TypeAlias = Literal["none", "collective", "store", "bucket", "result", "hook"]
"""Where a bucket is scaled.

* ``"none"``: nowhere: there is nothing to scale by.
* ``"collective"``: the collective averages.
* ``"store"``: by the kernels that store the gradients in the bucket.
* ``"bucket"``: by one pass over the bucket, before the launch.
* ``"result"``: by the kernel that casts the result back, after the wait.
* ``"hook"``: by a communication hook, which is called in the place of the collective.
"""

REDUCE_DTYPE_OF: Final[Mapping[ReduceDtype | None, torch.dtype | None]] = MappingProxyType(
    {
        None: None,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
)
"""The dtype of the option ``reduce_dtype``; ``None``: as the gradients."""

_WIDE_RANGE: Final = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which a sum over all ranks is far from overflow. In fp16 it is not: there gradients are
divided before they are summed, as in eager DDP."""

_AVERAGING: Final = ("nccl", "gloo")
"""Backends that average without a kernel of ours. NCCL multiplies while it reads, which costs
nothing. Gloo divides after the sum, in its own thread, in about the time that a pass before
it takes (``python tools/bench.py scaling``), but nothing waits for it before the launch."""


@dataclass(frozen=True)
class BucketScaling:
    """Where and by what a bucket is scaled.

    Attributes:
        method: see :data:`ScalingMethod`.
        reduce_op: what the collective does.
        by: what the gradients are divided or multiplied by outside of the collective.
    """

    method: ScalingMethod
    reduce_op: str
    by: Scaling

    @property
    def before(self) -> Scaling:
        """What the gradients are scaled by before the launch: stored, or in the bucket."""
        return NO_SCALING if self.method == "result" else self.by

    @property
    def after(self) -> Scaling:
        """What the results are scaled by after the wait."""
        return self.by if self.method == "result" else NO_SCALING

    @property
    def is_by_collective(self) -> bool:
        """Whether nothing is scaled outside of the collective."""
        return self.method in ("none", "collective")

    @property
    def divided(self) -> Divided:
        """Where the gradients are divided, as far as other ranks can see it."""
        if self.method == "collective":
            return "by"
        if self.method == "hook":
            return "hook"
        return "after" if self.method == "result" else "before"


_AVERAGED: Final = BucketScaling("collective", "avg", NO_SCALING)


def scaling_as_agreed(
    key: ReductionKey, divided: Divided, option: ScalingOption, folds: bool
) -> BucketScaling:
    """How a bucket of ``key`` is scaled where the ranks have agreed on where it is divided."""
    if divided == "by":
        return _AVERAGED
    if divided == "hook":
        return BucketScaling("hook", "sum", key.scaling)
    if _is_unscaled(key):
        return BucketScaling("none", key.reduce_op, NO_SCALING)
    if divided == "after":
        return BucketScaling("result", key.reduce_op, key.scaling)
    method: ScalingMethod = "store" if folds or key.reduce_dtype != key.dtype else "bucket"
    if option in ("store", "bucket"):
        method = option
    return BucketScaling(method, key.reduce_op, key.scaling)


def choose_scaling(
    key: ReductionKey, owner: Owner, option: ScalingOption, folds: bool
) -> BucketScaling:
    """Where a bucket of ``key`` is scaled.

    Args:
        key: the members' key.
        owner: of one of them.
        option: what the user asks for.
        folds: whether each gradient is stored by a kernel that can scale it.
    """
    if key.calls_hook:  # What was traced is a scaling of the model's own.
        return BucketScaling("hook", "sum", key.scaling)
    if _is_unscaled(key):
        return BucketScaling("none", key.reduce_op, NO_SCALING)
    is_average = key.reduce_op == "sum" and key.scaling == Scaling("div", owner.world_size)
    averages = can_average(owner.backend, key.reduce_dtype) and is_average
    method: ScalingMethod
    if option != "auto":
        method = option
    elif key.reduce_dtype != key.dtype:
        # A dtype with a small range is scaled before it is summed, the others where it is exact.
        method = "store" if key.reduce_dtype == torch.float16 else "result"
    elif folds and not (averages and owner.backend == "nccl"):
        method = "store"
    else:
        method = "collective" if averages else "bucket"
    if method == "collective":
        if is_average:
            return _AVERAGED
        method = "store" if folds else "bucket"
    return BucketScaling(method, key.reduce_op, key.scaling)


def can_average(backend: str, dtype: torch.dtype) -> bool:
    """Whether the collective itself may average gradients of this dtype."""
    return backend in _AVERAGING and dtype in _WIDE_RANGE


def _is_unscaled(key: ReductionKey) -> bool:
    return key.scaling.kind == "none" or key.scaling.value == 1
