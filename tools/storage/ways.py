"""The ways of reducing gradients that are compared: each makes a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusion_passes  # noqa: F401  (adds the flag)
from storage.models import Subject

PLAIN = "no DDP"
OURS = ("concat", "coalesced")
TORCHS = {
    "torch concat": "fuse_ddp_with_concat_op",
    "torch coalesced": "fuse_ddp_with_coalesced_op",
}
WAYS = (PLAIN, *OURS, *TORCHS)

BUCKETS = 20
"""As many as DDP's 25 MiB make of the 500 MB of gradients of the smallest GPT-2: these models are
smaller, and one bucket for all gradients would be allocated before the first of them exists."""


@dataclass
class Training:
    """A compiled forward and backward of a model, with fresh gradients each time."""

    model: nn.Module
    step: Callable[[Tensor], None]
    batch: Tensor

    def run(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.step(self.batch)


def prepare(way: str, subject: Subject, device: torch.device) -> Training:
    """Makes the training of ``subject``; the default process group must be there.

    In every way the backward is part of one compiled step and is traced by compiled autograd.
    """
    torch._dynamo.config.compiled_autograd = True
    torch.manual_seed(0)
    model = subject.build().to(device)
    if way in OURS:
        inductor_config.ddp_fusion = way  # type: ignore[attr-defined]
    elif way in TORCHS:
        torch._dynamo.config.optimize_ddp = "python_reducer"
        inductor_config._fuse_ddp_communication_passes = [TORCHS[way], "schedule_comm_wait"]
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    cap_mb = num_bytes / BUCKETS / 2**20
    wrapped = model if way == PLAIN else DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    if way in TORCHS:
        # DDP has set it to whole MiB.
        inductor_config._fuse_ddp_bucket_size = cap_mb  # type: ignore[assignment]

    @torch.compile
    def step(batch: Tensor) -> None:
        subject.loss(wrapped, batch).backward()

    return Training(model, step, subject.batch().to(device))
