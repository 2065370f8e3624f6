"""Compares two records of a training.

Rounding may differ: compiled kernels and collectives sum in another order, and keep numbers in fp32
where eager autocast rounds to bf16. The error of a tensor is bounded by

    relative x (its own largest element) + absolute x (the largest of all in this backward)

The second term is for gradients that cancel, such as that of a bias before a BatchNorm: the rest is
rounding of numbers as large as the others. ``relative`` is 300 roundings of fp32 (3e-5), for sums
of up to 512 terms and a few consecutive steps, or 8 of bf16 (0.06) if anything is rounded to it;
``absolute`` is 3e-6, or 0.02. The error of a missing average is a factor of 2 to 4, or the
difference between two ranks' gradients, which is as large as they are: both are far above the
bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.training import Record

Named = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Tolerance:
    """The allowed difference of a tensor: see the module."""

    relative: float
    absolute: float


FINE = Tolerance(3e-5, 3e-6)
COARSE = Tolerance(6e-2, 2e-2)
LOW = (torch.bfloat16, torch.float16)


def tolerance_of(case: Case) -> Tolerance:
    """The tolerance for fp32 tensors of a case."""
    reduced = isinstance(case.flag, dict) and "reduce_dtype" in case.flag
    hooked = any(part.hook not in (None, "allreduce_hook") for part in case.parts)
    low = any("bf16" in part.blocks for part in case.parts)
    return COARSE if reduced or hooked or low or case.loop.autocast else FINE


def differences(
    actual: Sequence[Record], expected: Sequence[Record], tolerance: Tolerance
) -> list[str]:
    """Differences between two trainings, in words; each training has one record per rank."""
    return [
        f"rank {rank}: {difference}"
        for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True))
        for difference in _of_rank(ours, theirs, tolerance)
    ]


def _of_rank(ours: Record, theirs: Record, tolerance: Tolerance) -> Iterator[str]:
    if len(ours.gradients) != len(theirs.gradients):
        yield f"{len(ours.gradients)} backwards instead of {len(theirs.gradients)}"
        return
    pairs: list[tuple[str, Named, Named]] = [
        (f"backward {number}, gradient of", *_divided(ours, number, a, b))
        for number, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
    ]
    losses = [{str(n): loss for n, loss in enumerate(r.losses)} for r in (ours, theirs)]
    pairs += [
        ("loss", losses[0], losses[1]),
        ("parameter", ours.parameters, theirs.parameters),
        ("buffer", ours.buffers, theirs.buffers),
    ]
    for what, a, b in pairs:
        for text in _of_all(a, b, tolerance):
            yield f"{what} {text}"


def _divided(ours: Record, number: int, actual: Named, expected: Named) -> tuple[Named, Named]:
    """The gradients after a backward, and those that this rank must have. With ``shard_optimizer``,
    it has no average of a parameter that another rank owns. What it has under ``no_sync`` is not
    compared: all of it goes into an average, or there is an average in eager DDP's sum alone."""
    if not ours.elsewhere:
        return actual, expected
    elsewhere, left_out = ours.elsewhere, ours.elsewhere & ours.local[number]
    wanted = {n: None if n in elsewhere else gradient for n, gradient in expected.items()}
    pairs = [{n: g for n, g in each.items() if n not in left_out} for each in (actual, wanted)]
    return pairs[0], pairs[1]


def _of_all(actual: Named, expected: Named, tolerance: Tolerance) -> Iterator[str]:
    if actual.keys() != expected.keys():
        yield f"{sorted(actual)} instead of {sorted(expected)}"
        return
    sizes = [_largest(tensor) for tensor in expected.values() if tensor is not None]
    largest = max([size for size in sizes if size == size], default=0.0)  # noqa: PLR0124
    for name, tensor in actual.items():
        text = _of_tensor(tensor, expected[name], tolerance, largest)
        if text:
            yield f"{name}: {text}"


def _of_tensor(
    actual: Tensor | None, expected: Tensor | None, tolerance: Tolerance, largest: float
) -> str | None:
    allowed = 0.0
    if expected is not None and (expected.is_floating_point() or expected.is_complex()):
        tolerance = COARSE if expected.dtype in LOW else tolerance
        own = _largest(expected[torch.isfinite(expected)])
        allowed = tolerance.relative * own + tolerance.absolute * largest
    try:
        torch.testing.assert_close(actual, expected, rtol=0, atol=allowed, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
