"""Decides where the gradients of a bucket are scaled. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import torch

from fusion_passes.config import ReduceDtype, ScalingOption
from fusion_passes.reductions.find import ReductionKey
from fusion_passes.reductions.owners import Owner

ScalingMethod: TypeAlias = Literal["none", "collective", "store", "bucket", "result"]
"""Where a bucket is scaled.

* ``"none"``: nowhere: there is nothing to scale by.
* ``"collective"``: the collective averages.
* ``"store"``: by the kernels that store the gradients in the bucket.
* ``"bucket"``: by one pass over the bucket, before the launch.
* ``"result"``: by the kernel that casts the result back, after the wait.
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
nothing, by 1/n rounded to the gradients' dtype (``hostToDevRedOp``, read in 2.27.3 to 2.30.7). Gloo
divides after the sum, in its own thread, in about the time that a pass before it takes
(docs/buckets.md), but nothing waits for it before the launch."""


@dataclass(frozen=True)
class BucketScaling:
    """Where and by what a bucket is scaled.

    Attributes:
        method: see :data:`ScalingMethod`.
        reduce_op: what the collective does.
        divisor: what the gradients are divided by outside of the collective.
    """

    method: ScalingMethod
    reduce_op: str
    divisor: float = 1.0

    @property
    def before(self) -> float:
        """What the gradients are divided by before the launch: stored, or in the bucket."""
        return 1.0 if self.method == "result" else self.divisor

    @property
    def after(self) -> float:
        """What the results are divided by after the wait."""
        return self.divisor if self.method == "result" else 1.0


def choose_scaling(
    key: ReductionKey,
    owner: Owner,
    *,
    reduce_dtype: torch.dtype,
    scaling: ScalingOption,
    folds: bool,
) -> BucketScaling:
    """Where a bucket of ``key`` is scaled: as a reducer scales it, on which other ranks rely. If it
    ``folds``, each gradient is stored by a kernel that can scale it."""
    if key.divisor == 1:
        return BucketScaling("none", "sum")
    if reduce_dtype != key.dtype:
        # A dtype with a small range is scaled before it is summed, the others where it is exact.
        method: ScalingMethod = "store" if reduce_dtype == torch.float16 else "result"
    elif key.divisor == owner.world_size and averages(
        owner.backend, reduce_dtype.to_real(), owner.world_size, scaling
    ):
        return BucketScaling("collective", "avg")
    else:
        method = "store" if folds else "bucket"
    return BucketScaling(method, "sum", float(key.divisor))


def sent_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of a dtype are sent, where wider ones are sent in another."""
    if reduce_dtype is None or not dtype.is_floating_point:
        return dtype
    return reduce_dtype if dtype.itemsize > reduce_dtype.itemsize else dtype


def averages(backend: str, dtype: torch.dtype, world_size: int, scaling: ScalingOption) -> bool:
    """Whether the collective itself averages gradients that are sent in this (real) dtype. NCCL
    averages bf16 on a number of ranks that is no power of two only if the user asks for it: all
    averages are off by one factor there, up to 0.2 %, since 1/n has no more than 8 bits."""
    if scaling == "bucket" or backend not in _AVERAGING or dtype not in _WIDE_RANGE:
        return False
    is_exact = world_size.bit_count() == 1
    return scaling == "collective" or backend != "nccl" or dtype != torch.bfloat16 or is_exact
