"""Compares tensors, and says where they differ."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor_difference(
    actual: Tensor | None, expected: Tensor | None, tolerance_eps: float
) -> str | None:
    """In what two tensors differ: dtype, shape, strides, or values. ``None`` if in nothing."""
    if actual is None or expected is None:
        return None if actual is expected else f"{actual} instead of {expected}"
    for what in ("dtype", "shape", "stride"):
        ours, theirs = (_aspect(tensor, what) for tensor in (actual, expected))
        if ours != theirs:
            return f"{what} {ours} instead of {theirs}"
    if torch.equal(actual, expected):
        return None
    if not actual.is_floating_point():
        return "values differ"
    error = errors_eps(actual, expected)
    if error <= tolerance_eps:
        return None
    return f"differs by {error:.3g} eps of its largest element (allowed: {tolerance_eps:g})"


def errors_eps(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in eps of the dtype and of the largest element. NaN is infinite."""
    if torch.equal(actual, expected):
        return 0.0
    scale = expected.abs().max().double() * torch.finfo(expected.dtype).eps
    error = ((actual.double() - expected.double()).abs().max() / scale).item()
    return error if error == error else float("inf")  # noqa: PLR0124


def _aspect(tensor: Tensor, what: str) -> object:
    return {"dtype": tensor.dtype, "shape": tuple(tensor.shape), "stride": tensor.stride()}[what]
