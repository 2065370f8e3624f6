"""What gradients are divided or multiplied by, and how that is computed. Where, for a bucket, is
decided in :mod:`fusion_passes.plan.scaling`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

ScalingKind: TypeAlias = Literal["none", "div", "mul"]


@dataclass(frozen=True)
class Scaling:
    """What a gradient is divided or multiplied by."""

    kind: ScalingKind
    value: float = 1.0

    def __str__(self) -> str:
        return {"none": "", "div": f" / {self.value:g}", "mul": f" * {self.value:g}"}[self.kind]


NO_SCALING: Final = Scaling("none")

_TOGETHER: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {"div": torch._foreach_div, "mul": torch._foreach_mul}
)


def scaled(value: _T, kind: str, factor: float, operations: Any = torch) -> _T:
    """``value`` divided or multiplied by a number, in its own dtype.

    Args:
        value: a tensor, or what stands for one where ``operations`` are.
        kind: a :data:`ScalingKind`; ``"none"`` gives ``value`` itself.
        factor: the number.
        operations: whose ``div`` and ``mul`` it is: torch's, or Inductor's lowerings.
    """
    if kind == "none":
        return value
    result: _T = _operation(kind, operations)(value, factor)
    return result


def store_scaled(place: Tensor, value: Tensor, kind: str, factor: float) -> None:
    """Write what :func:`scaled` gives into ``place``, cast to its dtype, without a tensor between.
    ``kind`` is not ``"none"``."""
    _operation(kind, torch)(value, factor, out=place)


def scaled_together(tensors: Sequence[Tensor], scaling: Scaling) -> list[Tensor]:
    """What :func:`scaled` gives for each tensor, by one operator for all of them."""
    if scaling.kind == "none" or len(tensors) == 1:
        return [scaled(tensor, scaling.kind, scaling.value) for tensor in tensors]
    return list(_TOGETHER[scaling.kind](tensors, scaling.value))


def _operation(kind: str, operations: Any) -> Callable[..., Any]:
    operation: Callable[..., Any] = {"div": operations.div, "mul": operations.mul}[kind]
    return operation
