"""What a backward averages by itself, in the graphs that were compiled with its forwards."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.aot_obstacles import NOT_COMPILED_MOSTLY
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.prepared import Described, Lent, Numbered
from fusion_passes.ddp.sparse import dense_parameters
from fusion_passes.torch_private.ddp import parameters_of


@dataclass(frozen=True)
class AveragedModule:
    """A DDP module that a backward averages by itself.

    Attributes:
        participant: the module.
        kept: by their parameters' numbers, the gradients of its graphs that there are already.
        outside: numbers of the parameters whose gradients come from none of its graphs.
    """

    participant: Participant
    kept: Mapping[int, Tensor]
    outside: frozenset[int]


@dataclass(frozen=True)
class AveragedForward:
    """A compiled forward whose backward averages what it gives.

    Attributes:
        node: of autograd's graph.
        forward: what was compiled.
        parameters: whose gradients it gives.
        lent: whose parameters those in its graph stand for.
    """

    node: Any
    forward: Any
    parameters: tuple[Numbered, ...]
    lent: Lent


@dataclass(frozen=True)
class Averaged:
    """What a backward averages by itself.

    Attributes:
        modules: nothing, if there is one that it must not average.
        forwards: the compiled forwards that it is the backward of.
        why_not: why there are no modules, for people; what follows "because".
    """

    modules: tuple[AveragedModule, ...] = ()
    forwards: tuple[AveragedForward, ...] = ()
    why_not: str = ""

    @functools.cached_property
    def participants(self) -> tuple[Participant, ...]:
        """The modules among those of the other ranks."""
        return tuple(module.participant for module in self.modules)

    @property
    def labels(self) -> tuple[str, ...]:
        """The modules, for people."""
        return tuple(registry.module(p.module).label for p in self.participants)

    @property
    def outside(self) -> int:
        """How many gradients come from none of the graphs."""
        return sum(len(module.outside) for module in self.modules)

    @property
    def is_in_flight(self) -> bool:
        """Whether there is something to compute beside what a graph has launched last."""
        return len(self.forwards) > 1 or self.outside > 0

    def borrows_names_for(self, module: str) -> bool:
        """Whether some of its graphs have names or numbers of others for parameters of a module."""
        return any(
            theirs != mine and mine[0] == module
            for item in self.forwards
            for theirs, mine in item.lent.parameters.items()
        )


NONE_AVERAGED: Final = Averaged()


def why_incomplete(described: Sequence[Described], outside: Sequence[Numbered]) -> str:
    """Why the backwards of some forwards, with what comes from outside of them, do not give each
    module all of its gradients once, or most of them come from outside; empty if that is not so.

    Args:
        described: the forwards.
        outside: the parameters whose gradients come from elsewhere.
    """
    inside = [parameter for item in described for parameter in item.parameters]
    every = {*inside, *outside}
    if len(every) < len(inside) + len(outside):
        return "its gradients come from several forwards"
    forwards_of = Counter(name for item in described for name in item.modules)
    for name in dict.fromkeys(name for name, _ in (*inside, *outside)):
        ddp, module = registry.ddp_of(name), registry.module(name)
        assert ddp is not None, "it has a backward"
        trained = dense_parameters(ddp)
        beside = sum(trained[n].numel() for of, n in outside if of == name and n in trained)
        if not forwards_of[name] or (
            beside and 2 * beside > sum(parameter.numel() for parameter in trained.values())
        ):
            return NOT_COMPILED_MOSTLY
        if module.flag_dtype is None and any((name, number) not in every for number in trained):
            return "it does not reach all of its parameters"
    return ""


def has_parts_beside_others(described: Sequence[Described], modules: Sequence[str]) -> bool:
    """Whether a module that may lack gradients is reduced in parts, and another one on its process
    group is reduced in the same backward.

    Args:
        described: the forwards of the backward.
        modules: that it reaches.
    """
    if len(modules) == 1:
        return False
    on_group = Counter(registry.module(name).process_group for name in modules)
    forwards_of = Counter(name for item in described for name in item.modules)
    return any(
        usage is not None
        and on_group[registry.module(name).process_group] > 1
        and (forwards_of[name] > 1 or len(usage.parts) > 1)
        for name in modules
        for usage in (participants[name].usage,)
    )


def kept_of(module: str, parameters: Iterable[Numbered]) -> dict[int, Tensor]:
    """The gradients of a module that there are already, by their parameters' numbers: nothing where
    this rank alone is the average, so that autograd adds what comes.

    Args:
        module: its name.
        parameters: of any modules.
    """
    ddp = registry.ddp_of(module)
    assert ddp is not None, "it has a backward"
    if registry.module(module).world_size == 1:
        return {}
    own = parameters_of(ddp)
    kept = {number: own[number].grad for name, number in parameters if name == module}
    return {number: gradient for number, gradient in kept.items() if gradient is not None}
