"""Decides in which dtype a bucket is sent, and whether its collective averages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from fusion_passes.config import ReduceDtype, ScalingOption

REDUCE_DTYPE_OF: Final[Mapping[ReduceDtype | None, torch.dtype | None]] = MappingProxyType(
    {
        None: None,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
)
"""The dtype for each value of the option ``reduce_dtype``; ``None``: the gradients' own."""

_WIDE_RANGE: Final = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which a sum over all ranks is far from overflow. In fp16 it is not, so fp16 gradients
are divided before they are summed, as in eager DDP."""

_AVERAGING: Final = ("nccl", "gloo")
"""Backends whose all-reduce averages, so that the package launches no kernel for it. NCCL
multiplies by 1/n, rounded to the gradients' dtype, while it reads the gradients, which costs
nothing (``hostToDevRedOp``, read in 2.27.3 to 2.30.7). Gloo divides after the sum, in its own
thread. That takes about as long as a pass over the bucket before the launch (docs/buckets.md), but
does not delay the launch."""


def smaller_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are sent: ``reduce_dtype`` if that is smaller, and
    they are floating-point."""
    if reduce_dtype is None or not dtype.is_floating_point:
        return dtype
    return reduce_dtype if dtype.itemsize > reduce_dtype.itemsize else dtype


def collective_averages(
    backend: str, dtype: torch.dtype, world_size: int, scaling: ScalingOption
) -> bool:
    """Whether the collective itself averages gradients that are sent in this (real) dtype. If the
    number of ranks is no power of two, NCCL averages bf16 only if the user asks for it: 1/n has no
    more than 8 bits there, so all averages are off by one common factor, up to 0.2 %."""
    if scaling == "bucket" or backend not in _AVERAGING or dtype not in _WIDE_RANGE:
        return False
    is_exact = world_size.bit_count() == 1
    return scaling == "collective" or backend != "nccl" or dtype != torch.bfloat16 or is_exact
