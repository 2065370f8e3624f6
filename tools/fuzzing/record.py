"""What a training did, to be compared."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Record:
    """What a training did on a rank.

    Attributes:
        gradients: by name, after each backward or each compiled step.
        losses: after each.
        parameters: in the end.
        buffers: in the end.
        warnings: of this package.
        averaged: backwards that reducers have averaged, and gradients that each has copied.
        cpu: seconds of this rank, and of the C++ compilers that it started.
    """

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    averaged: list[tuple[int, int]] = field(default_factory=list)
    cpu: tuple[float, float] = (0.0, 0.0)
