"""Trainings compared with eager DDP that are not in the catalogue, because they need a GPU or
``"auto"``.

Each takes a :class:`testing.scenarios.run.Run`, like the features of the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_passes
from testing import models
from testing.models import Batch
from testing.scenarios.loop import sgd, train
from testing.scenarios.run import Run

CAP_MB: Final = 300 / 2**20
"""More than one layer of the model of :func:`measured`."""


def measured(run: Run) -> None:
    """``"auto"``, until it has chosen its buckets."""
    # Parameters stay integers for this number of steps.
    train(run, run.ddp(run.mlp(), bucket_cap_mb=CAP_MB), steps=110, optimizer=sgd(0.0))
    if not run.is_fused:
        return
    decisions = [sentence for m in fusion_passes.report().modules for sentence in m.decision]
    print(*decisions, sep="\n", flush=True)
    if not any("is kept" in sentence for sentence in decisions):
        raise RuntimeError("no buckets were chosen from measured steps")


def synced_batch_norm(run: Run) -> None:
    """``SyncBatchNorm``, which torch has for GPUs only."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(models.ConvNet())
    rounding = {"loss": models.square_loss, "draw": models.images}
    train(run, run.ddp(model), **rounding, optimizer=sgd(2.0**-6))


def thirds(run: Run) -> None:
    """Averages over three ranks. In 16 bits each is rounded separately; an error that makes all of
    them too large or too small shows in their mean."""
    ddp, forward = run.compiled(nn.Linear(256, 256, bias=False).to(run.dtype))

    def draw(generator: torch.Generator, _: int) -> Batch:
        x, weights = (torch.rand(1, 256, generator=generator).to(run.dtype) for _ in range(2))
        return x, weights

    for step in range(2):  # The second backward uses rebuilt buckets.
        ddp.zero_grad()
        x, weights = run.drawn(draw, step)
        (forward(x) * weights).sum().backward()
        gradient = ddp.module.weight.grad
        assert gradient is not None
        run.note_values(**{f"mean {step}": gradient.double().mean().float()})


# --- Norms -------------------------------------------------------------------------------------

ROWS: Final = 8192
WIDTH: Final = 768
"""From 5 * 2 ** 20 elements on, Inductor uses mix-order reductions."""

SMALL_ROWS: Final = 64
SMALL_WIDTH: Final = 32
"""Width on the CPU."""

NAN_BYTES: Final = (*[2**30] * 2, *[2**18] * 64)
"""Sizes of memory that is filled with NaN, to detect memory that is not written: large and small
blocks of the device's cache."""


class HandNorm(nn.Module):
    """RMSNorm as in Llama's code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, True) + 1e-6).rsqrt()).to(x.dtype)


NORMS: Final[Mapping[str, Callable[[int], nn.Module]]] = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "by hand": HandNorm,
}


class Norms(nn.Module):
    """Layers around norms.

    Args:
        place: place of norms: ``"post"``, ``"pre"``, or one ``"between"`` two linear layers.
        width: width of all layers.
        norm: makes a norm.
        autocasts: whether its forward runs under bf16 autocast.
    """

    def __init__(
        self, place: str, width: int, norm: Callable[[int], nn.Module], autocasts: bool
    ) -> None:
        super().__init__()
        self.place, self.autocasts = place, autocasts
        norms = 1 if place == "between" else 2
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(norms + 1))
        self.norms = nn.ModuleList(norm(width) for _ in range(norms))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocasts):
            output = self._output(self.linears[0](x))
        return (output.float() * weights).sum() / 64

    def _output(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears[1:], self.norms, strict=True):
            if self.place == "between":
                x = linear(norm(x))
            elif self.place == "pre":
                x = x + F.gelu(linear(norm(x)))
            else:
                x = norm(x + F.gelu(linear(x)))
        return x


def norms(run: Run, place: str, norm: str, *, autocasts: bool = False) -> None:
    """Norms of sizes for which Inductor computes reductions over rows and over columns of one
    tensor in one kernel (mix-order reductions)."""
    is_small = run.device.type == "cpu"
    rows, width = (SMALL_ROWS, SMALL_WIDTH) if is_small else (ROWS, WIDTH)

    def draw(generator: torch.Generator, _: int) -> Batch:
        x, weights = (torch.randn(rows, width, generator=generator) for _ in range(2))
        return x.to(run.dtype), weights

    train(
        run,
        run.ddp(Norms(place, width, NORMS[norm], autocasts).to(run.dtype)),
        steps=2,
        draw=draw,
        loss=lambda model, batch: model(*batch),
        optimizer=sgd(0.0),
        before_step=lambda _: None if is_small else _fill_with_nan(run.device),
    )


def _fill_with_nan(device: torch.device) -> None:
    """Fill memory that is allocated next with NaN."""
    torch.cuda.empty_cache()
    blocks = [torch.full([size // 4], torch.nan, device=device) for size in NAN_BYTES]
    del blocks
