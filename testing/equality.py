"""Compares training runs, tensor by tensor, and says where they differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from testing.training import Record


def assert_same_runs(
    actual: list[Record], expected: list[Record], *, tolerance_eps: float = 0.0
) -> None:
    """Compares gradients after each backward, and what was trained in the end, on every rank.

    Args:
        actual: a run's record of each rank.
        expected: that of the run which it must equal.
        tolerance_eps: 0 for equality in every bit. Otherwise what an element may differ by, in
            units of the dtype's eps, relative to the largest element of its tensor.
    """
    differences = [
        f"rank {rank}: {difference}"
        for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True))
        for difference in _differences(ours, theirs, tolerance_eps)
    ]
    shown = "\n".join(differences[:20])
    assert not differences, f"{len(differences)} differences:\n{shown}"


def _differences(actual: Record, expected: Record, tolerance_eps: float) -> list[str]:
    stages: list[tuple[str, Mapping[str, Tensor | None], Mapping[str, Tensor | None]]] = [
        (f"backward {index}, gradient of", ours.gradients, theirs.gradients)
        for index, (ours, theirs) in enumerate(
            zip(actual.backwards, expected.backwards, strict=True)
        )
    ]
    stages.append(("trained parameter", actual.parameters, expected.parameters))
    stages.append(("buffer", actual.buffers, expected.buffers))
    found = []
    for stage, ours, theirs in stages:
        if ours.keys() != theirs.keys():
            found.append(f"{stage}: {sorted(ours)} instead of {sorted(theirs)}")
            continue
        for name, value in ours.items():
            difference = tensor_difference(value, theirs[name], tolerance_eps)
            if difference:
                found.append(f"{stage} {name}: {difference}")
    return found


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


def largest_error_eps(actual: list[Record], expected: list[Record]) -> Mapping[str, float]:
    """For measuring: the largest error of gradients, parameters and buffers over all ranks."""
    errors = {"gradients": 0.0, "parameters": 0.0, "buffers": 0.0}
    for ours, theirs in zip(actual, expected, strict=True):
        pairs: list[tuple[str, Mapping[str, Tensor | None], Mapping[str, Tensor | None]]] = [
            ("gradients", a.gradients, b.gradients)
            for a, b in zip(ours.backwards, theirs.backwards, strict=True)
        ]
        pairs.append(("parameters", ours.parameters, theirs.parameters))
        pairs.append(("buffers", ours.buffers, theirs.buffers))
        for kind, a, b in pairs:
            for name, value in a.items():
                other = b[name]
                if value is None or other is None:
                    continue
                if value.is_floating_point() and value.numel():
                    errors[kind] = max(errors[kind], errors_eps(value, other))
    return errors


def _aspect(tensor: Tensor, what: str) -> object:
    return {"dtype": tensor.dtype, "shape": tuple(tensor.shape), "stride": tensor.stride()}[what]
