"""Compares the gradients of a run with those of eager DDP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

Gradients: TypeAlias = "Mapping[str, Tensor]"

TOLERANCE: Final = 2e-4
"""Largest error allowed, as a share of the largest element of the eager gradient.

It lies between two numbers. Rounding: the compiled and the eager kernels sum the same fp32 products
in another order, which moves an element by a few 2**-24 (6e-8) of the sum of their magnitudes;
carried through the layers and amplified by Adam over the compared steps, it is about 3e-5 (the run
prints it). A wrong reduction: a gradient that was not averaged, averaged twice, from the wrong
bucket, or from the step before is wrong by 0.1 to 1 or more, because the ranks train on different
text.
"""


@dataclass(frozen=True)
class GradientDifference:
    """The difference between the gradients of one step and the reference.

    Attributes:
        step: the optimizer step, from 0.
        parameter: name of the parameter with the largest error.
        max_abs_error: largest error of one element of any gradient; inf for a gradient that is
            missing or not finite.
        max_relative_error: the largest error of an element divided by the largest element of its
            gradient, for the worst parameter.
    """

    step: int
    parameter: str
    max_abs_error: float
    max_relative_error: float

    @property
    def ok(self) -> bool:
        """Whether the gradients are equal except for rounding."""
        return self.max_relative_error <= TOLERANCE


def copy_gradients(module: nn.Module) -> dict[str, Tensor]:
    """A copy of each gradient, by parameter name."""
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def compare_gradients(step: int, actual: Gradients, expected: Gradients) -> GradientDifference:
    """The largest differences over all parameters, on this rank only."""
    names = sorted(actual.keys() | expected.keys())
    errors = {name: _errors(actual.get(name), expected.get(name)) for name in names}
    worst = max(names, key=lambda name: errors[name][1])
    return GradientDifference(
        step=step,
        parameter=worst,
        max_abs_error=max(absolute for absolute, _ in errors.values()),
        max_relative_error=errors[worst][1],
    )


def worst_over_ranks(difference: GradientDifference) -> GradientDifference:
    """The difference on the rank where it is largest, so that all ranks decide the same."""
    gathered: list[GradientDifference | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, difference)
    return max((d for d in gathered if d is not None), key=lambda d: d.max_relative_error)


def _errors(actual: Tensor | None, expected: Tensor | None) -> tuple[float, float]:
    """Largest error of an element, and that error divided by the largest expected element."""
    if actual is None or expected is None or actual.shape != expected.shape:
        return math.inf, math.inf
    if expected.numel() == 0:
        return 0.0, 0.0
    error = (actual.double() - expected.double()).abs().max().item()
    if not math.isfinite(error):
        return math.inf, math.inf
    largest = expected.abs().max().item()
    if largest == 0.0:
        return error, 0.0 if error == 0.0 else math.inf
    return error, error / largest
