"""The calls of a process group for a bucket, and what a reducer does to the bucket before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusion_passes.config import FusionConfig
from fusion_passes.layout.layout import Bucket
from fusion_passes.reducer.communication import AllReduce


class Group:
    """A process group that records its calls."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size
        self.operation: Any = None
        self.sent: list[Tensor] = []

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self.operation = options.reduceOp
        self.sent = [tensor.clone() for tensor in tensors]
        return SimpleNamespace(wait=lambda: None)

    allreduce_coalesced = allreduce


VALUES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def launch(config: FusionConfig, ranks: int, dtype: torch.dtype, backend: str) -> Group:
    """The call of the process group for a bucket of two gradients."""
    group = Group(ranks)
    communication = AllReduce(
        group,
        backend,
        is_coalesced=config.reduces_by == "coalesced",
        scaling_option=config.scales_by,
    )
    bucket: Any = (0, (0, 1), (0, 2), 4, dtype, torch.device("cpu"))
    communication.launch(Bucket(*bucket), VALUES.clone().to(dtype))()
    is_averaged = group.operation == dist.ReduceOp.AVG
    assert communication.scaling(dtype) == ("collective" if is_averaged else "bucket")
    return group


def is_divided(group: Group, dtype: torch.dtype) -> bool:
    sent = torch.cat([torch.view_as_real(t) if t.is_complex() else t for t in group.sent])
    gradients = VALUES.to(dtype)
    gradients = torch.view_as_real(gradients) if gradients.is_complex() else gradients
    if group.operation == dist.ReduceOp.AVG:
        torch.testing.assert_close(sent, gradients, rtol=0, atol=0)
        return False
    assert group.operation == dist.ReduceOp.SUM
    torch.testing.assert_close(sent, gradients / group.size(), rtol=0, atol=0)
    return True


@pytest.mark.parametrize("mode", ["concat", "coalesced"])
@pytest.mark.parametrize(
    ("options", "ranks", "dtype", "backend", "divided"),
    [
        ({}, 3, torch.bfloat16, "nccl", True),
        ({}, 4, torch.bfloat16, "nccl", False),
        ({}, 3, torch.bfloat16, "gloo", False),
        ({}, 3, torch.float32, "nccl", False),
        ({}, 3, torch.complex64, "nccl", False),
        ({}, 2, torch.float16, "nccl", True),
        ({"scaling": "collective"}, 3, torch.bfloat16, "nccl", False),
        ({"scaling": "bucket"}, 2, torch.float32, "nccl", True),
        ({"scaling": "bucket"}, 2, torch.complex64, "nccl", True),
        ({"memory": "registered"}, 2, torch.float32, "nccl", True),
        ({"memory": "registered"}, 3, torch.bfloat16, "nccl", True),
        ({"memory": "registered", "scaling": "collective"}, 2, torch.float32, "nccl", False),
    ],
)
def test_a_bucket_is_divided_or_averaged(
    mode: Any, options: dict[str, Any], ranks: int, dtype: torch.dtype, backend: str, divided: bool
) -> None:
    """In both modes, a bucket is one block of memory, which is divided in one pass. Registered
    memory is summed, because NCCL sums it with symmetric kernels and NVLink SHARP; before 2.30 it
    averages copies."""
    group = launch(FusionConfig(mode=mode, **options), ranks, dtype, backend)
    assert is_divided(group, dtype) == divided
    assert len(group.sent) == (2 if mode == "coalesced" else 1)


def test_a_coalesced_bucket_is_a_list_in_a_smaller_dtype_too() -> None:
    """A rank whose backward is traced sends a list there."""
    group = Group(2)
    communication = AllReduce(group, "nccl", is_coalesced=True, dtype=torch.bfloat16)
    bucket: Any = (0, (0, 1), (0, 2), 4, torch.float32, torch.device("cpu"))
    communication.launch(Bucket(*bucket), VALUES.clone())()
    assert [(t.dtype, t.numel()) for t in group.sent] == [(torch.bfloat16, 2)] * 2
