"""Decides where the gradients of a bucket are scaled. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from fusion_passes.config import ScalingOption
from fusion_passes.reducer.scaling import averages
from fusion_passes.traced.find import ReductionKey
from fusion_passes.traced.owners import Owner

ScalingMethod: TypeAlias = Literal["none", "collective", "store", "bucket", "result"]
"""Where the gradients of a bucket are scaled.

* ``"none"``: nowhere, since there is nothing to scale by.
* ``"collective"``: in the collective, which averages.
* ``"store"``: in the kernels that store the gradients in the bucket.
* ``"bucket"``: in one pass over the bucket, before the launch.
* ``"result"``: in the kernel that casts the result back, after the wait.
"""


@dataclass(frozen=True)
class BucketScaling:
    """Where a bucket is scaled, and by what.

    Attributes:
        method: see :data:`ScalingMethod`.
        reduce_op: reduce op of the collective: ``"sum"`` or ``"avg"``.
        divisor: number that the gradients are divided by outside of the collective.
    """

    method: ScalingMethod
    reduce_op: str
    divisor: float = 1.0

    @property
    def before(self) -> float:
        """The number that gradients are divided by before the launch: as stored, or in the
        bucket."""
        return 1.0 if self.method == "result" else self.divisor

    @property
    def after(self) -> float:
        """The number that results are divided by after the wait."""
        return self.divisor if self.method == "result" else 1.0


def choose_scaling(
    key: ReductionKey,
    owner: Owner,
    *,
    reduce_dtype: torch.dtype,
    scaling: ScalingOption,
    folds: bool,
) -> BucketScaling:
    """Where a bucket with this ``key`` is scaled: where a reducer scales it, because other ranks
    rely on that. With ``folds``, each gradient is stored by a kernel that can scale it."""
    if key.divisor == 1:
        return BucketScaling("none", "sum")
    if reduce_dtype != key.dtype:
        # fp16 has a small range: scale before the sum. Scale others where the division is exact.
        method: ScalingMethod = "store" if reduce_dtype == torch.float16 else "result"
    elif key.divisor == owner.world_size and averages(
        owner.backend, reduce_dtype, owner.world_size, scaling
    ):
        return BucketScaling("collective", "avg")
    else:
        method = "store" if folds else "bucket"
    return BucketScaling(method, "sum", float(key.divisor))
