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
"""The dtype of the option ``reduce_dtype``; ``None``: as the gradients."""

_WIDE_RANGE: Final = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which a sum over all ranks is far from overflow. In fp16 it is not: there gradients are
divided before they are summed, as in eager DDP."""

_AVERAGING: Final = ("nccl", "gloo")
"""Backends that average without a kernel of ours. NCCL multiplies while it reads, which costs
nothing, by 1/n rounded to the gradients' dtype (``hostToDevRedOp``, read in 2.27.3 to 2.30.7). Gloo
divides after the sum, in its own thread, in about the time that a pass before it takes
(docs/buckets.md), but nothing waits for it before the launch."""


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
