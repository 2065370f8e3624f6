"""Whether gradients are eager DDP's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from benches.processes import Checked

TOLERANCE = 1e-3
"""Of an element, over the largest of its gradient. Kernels of the compiler add in another order,
which is some 1e-6 of the largest element; a gradient that was not averaged is wrong by half."""

FLOOR = 1e-5
"""Of the largest element of all gradients: what is smaller is rounding, as the gradient of the bias
of keys in attention, which is zero."""


def compare_with(reference: str, model: nn.Module, *, write: bool) -> Checked:
    """Compare gradients and buffers of a model with those in a file.

    Args:
        reference: the file.
        model: after a backward.
        write: write them into the file instead.
    """
    gradients = gradients_of(model)
    buffers = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    path = Path(reference)
    if write:
        torch.save((gradients, buffers), path)
    if not path.exists():
        return Checked(compared=False)
    expected, expected_buffers = torch.load(path, weights_only=True)
    return compare(gradients, expected, buffers, expected_buffers)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that there are, by name, on the CPU."""
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def compare(
    gradients: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
    expected_buffers: Mapping[str, Tensor] = MappingProxyType({}),
) -> Checked:
    """Compare gradients and buffers by name."""
    common = [name for name in expected if name in gradients]
    floor = FLOOR * max((_largest(gradient) for gradient in expected.values()), default=0.0)
    errors = {name: _error(gradients[name], expected[name], floor) for name in common}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Checked(
        errors.get(worst, 0.0),
        worst,
        tuple(sorted(expected.keys() ^ gradients.keys())),
        tuple(
            name
            for name, buffer in expected_buffers.items()
            if not torch.allclose(buffers[name].double(), buffer.double(), rtol=1e-3, atol=1e-5)
        ),
    )


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _error(tensor: Tensor, expected: Tensor, floor: float) -> float:
    if tensor.shape != expected.shape or not torch.isfinite(tensor).all():
        return float("inf")
    if not tensor.numel():
        return 0.0
    difference = (tensor.double() - expected.double()).abs().max().item()
    return difference / max(_largest(expected), floor) if difference else 0.0
