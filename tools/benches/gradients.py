"""Compares gradients with eager DDP's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from benches.processes import Checked

TOLERANCE = 1e-3
"""Largest allowed error of an element, divided by the largest element of its gradient. Compiled
kernels sum in another order, which is an error of some 1e-6; the error of a gradient that was not
averaged is a half."""

FLOOR = 1e-5
"""Gradients below this share of the largest element of all gradients are rounding errors, such as
the gradient of the bias of keys in attention, which is zero."""


def compare_with(
    reference: str, model: nn.Module, *, write: bool, are_some: bool = False
) -> Checked:
    """Compare the gradients of a model with those in a file, or write them there. ``are_some``:
    whether other ranks have the others."""
    gradients, path = gradients_of(model), Path(reference)
    if write:
        torch.save(gradients, path)
    if not path.exists():
        return Checked(compared=False)
    expected = torch.load(path, weights_only=True)
    if are_some:
        expected = {name: value for name, value in expected.items() if name in gradients}
    return compare(gradients, expected)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Existing gradients by name, on the CPU."""
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def compare(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Checked:
    """Compare gradients by name."""
    common = [name for name in expected if name in gradients]
    floor = FLOOR * max((_largest(gradient) for gradient in expected.values()), default=0.0)
    errors = {name: _error(gradients[name], expected[name], floor) for name in common}
    worst = max(errors, key=lambda name: errors[name], default="")
    missing = tuple(sorted(expected.keys() ^ gradients.keys()))
    return Checked(errors.get(worst, 0.0), worst, missing)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _error(tensor: Tensor, expected: Tensor, floor: float) -> float:
    if tensor.shape != expected.shape or not torch.isfinite(tensor).all():
        return float("inf")
    if not tensor.numel():
        return 0.0
    difference = (tensor.double() - expected.double()).abs().max().item()
    return difference / max(_largest(expected), floor) if difference else 0.0
