"""Two training runs, tensor by tensor, under the rules of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from testing.equality import tensor_difference
from testing.scenarios.run import Run, Tensors

MAX_DIFFERENCES = 40


def differences(fused: Run, eager: Run, tolerance_eps: float) -> list[str]:
    """In what the run under the flag differs from eager DDP's, in words; the first of them.

    Args:
        fused: the run under the flag.
        eager: what it must equal.
        tolerance_eps: as in :func:`testing.equality.tensor_difference`.
    """
    if len(fused.backwards) != len(eager.backwards):
        return [f"{len(fused.backwards)} backwards instead of {len(eager.backwards)}"]
    stages = [
        (f"backward {index}, gradient", ours, theirs)
        for index, (ours, theirs) in enumerate(zip(fused.backwards, eager.backwards, strict=True))
    ]
    stages.append(("in the end,", fused.end, eager.end))
    found = [
        difference
        for stage, ours, theirs in stages
        for difference in _of_stage(stage, ours, theirs, tolerance_eps)
    ]
    for index, (ours, theirs) in enumerate(zip(fused.launches, eager.launches, strict=True)):
        # More than none: eager DDP rebuilds its buckets once, whatever the backward.
        if not ours.synced and ours.number > theirs.number + (index == 0 and theirs.number > 0):
            pair = f"{ours.number} collectives instead of {theirs.number}"
            found.append(f"backward {index}: {pair}, with no_sync")
    if fused.others != eager.others:
        found.append(f"{fused.others} instead of {eager.others}")
    return found[:MAX_DIFFERENCES]


def _of_stage(stage: str, ours: Tensors, theirs: Tensors, tolerance_eps: float) -> Iterator[str]:
    if ours.keys() != theirs.keys():
        yield f"{stage}s of {sorted(ours)} instead of {sorted(theirs)}"
        return
    for name, value in ours.items():
        expected = theirs[name]
        if value is not None and expected is not None:
            difference = _difference(value, expected, tolerance_eps)
        else:
            difference = tensor_difference(_brief(value), _brief(expected), tolerance_eps)
        if difference:
            yield f"{stage} {name}: {difference}"


def _brief(value: Tensor | None) -> Tensor | None:
    """What can be shown in a sentence."""
    return None if value is None else torch.tensor(list(value.shape))


def _difference(actual: Tensor, expected: Tensor, tolerance_eps: float) -> str | None:
    """As the tests' rule, but NaN equals NaN: a step with infinite gradients makes some."""
    if actual.is_floating_point() and actual.shape == expected.shape:
        nans = actual.isnan()
        if nans.any() or expected.isnan().any():
            if not torch.equal(nans, expected.isnan()):
                return (
                    f"{int(nans.sum())} elements are NaN instead of {int(expected.isnan().sum())}"
                )
            actual, expected = actual.masked_fill(nans, 0), expected.masked_fill(nans, 0)
    return tensor_difference(actual, expected, tolerance_eps)
