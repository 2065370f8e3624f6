"""Private names of process groups. Checked on torch 2.11.0, 2.13.0 and 2.14.1."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from fusion_passes.torch_private import ProcessGroup


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long a collective of the group may take; it has no public name."""
    options: Any = group._get_backend(group._device_types[0]).options
    return timedelta(seconds=options._timeout.total_seconds())


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """Name of the group's backend for a device: ``"gloo"``, ``"nccl"``."""
    return str(group._get_backend(device).name())
