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
"""Where a bucket is scaled.

* ``"none"``: nowhere: there is nothing to scale by.
* ``"collective"``: the collective averages.
* ``"store"``: by the kernels that store the gradients in the bucket.
* ``"bucket"``: by one pass over the bucket, before the launch.
* ``"result"``: by the kernel that casts the result back, after the wait.
"""


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
