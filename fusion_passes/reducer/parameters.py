"""The parameters of a managed module, as its reducer numbers them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from fusion_passes.layout.layout import Kinds, ParameterNumber


@dataclass(frozen=True)
class Parameters:
    """The parameters of a module.

    Attributes:
        all: the parameters, in DDP's order, which gives each its number.
        names: the name of each parameter.
        strides: the dense strides in which the gradient of each parameter is sent.
        kinds: the kind of each parameter that requires a gradient, by number.
        numbers: the numbers of the parameters that require a gradient.
        delayed: numbers of the parameters of ``delay_all_reduce_named_params``.
    """

    all: Sequence[nn.Parameter]
    names: Sequence[str]
    strides: Sequence[tuple[int, ...]]
    kinds: Kinds
    numbers: frozenset[ParameterNumber] = field(init=False)
    delayed: frozenset[ParameterNumber] = field(init=False)

    def __post_init__(self) -> None:
        delayed = frozenset(number for number, kind in self.kinds.items() if kind.is_delayed)
        object.__setattr__(self, "numbers", frozenset(self.kinds))
        object.__setattr__(self, "delayed", delayed)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [self.all[number] for number in self.kinds]

    def named(self, numbers: Collection[ParameterNumber]) -> str:
        """The names of these parameters, separated by commas."""
        return ", ".join(self.names[number] for number in sorted(numbers))
