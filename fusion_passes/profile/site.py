"""Where this rank is, as a profile knows it."""

from __future__ import annotations

import os
import socket
from typing import Final

import torch

from fusion_passes.profile.records import Site

_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE")


def site_of(device: torch.device) -> Site:
    """Where this rank is, which has its gradients on a device."""
    said = (f"{name}={os.environ[name]}" for name in _INTERFACES if name in os.environ)
    return Site(socket.gethostname(), device_name(device), " ".join(said))


def device_name(device: torch.device) -> str:
    """What a device is called in a profile: ``"cpu"``, or the card's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type
