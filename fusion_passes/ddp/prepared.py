"""Which forwards were compiled with a backward that reduces gradients, and under whose names.

Dynamo compiles one forward for all instances of a class whose parameters have the same shapes: DDP
modules, or the blocks of one. The backward has the names and numbers of those for which that was
done. Where it runs for others, these stand for their own: they borrow them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch.distributed as dist
from torch import nn

from fusion_passes.agreement.protocol import borrowed, participants
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.comm_hooks import is_hooked, sent_as
from fusion_passes.ddp.modules import registry
from fusion_passes.torch_private import local_process_group
from fusion_passes.torch_private.stand_ins import redirect

NOT_COMPILED: Final = (
    "no forward was compiled for just its parameters, with these options and groups: a part of it "
    "is not compiled"
)
SHARED: Final = "two modules of this backward share a compiled forward"
PERMUTED: Final = "other parameters have compiled forwards like this one in several orders"

_BORROWED_AT_MOST: Final = 16
"""Names of the latest forwards only: each costs some microseconds in each backward."""

Numbered: TypeAlias = tuple[str, int]
"""A parameter: its DDP module's name, and its number there."""


@dataclass(frozen=True)
class Described:
    """What a compiled forward and its backward depend on.

    Attributes:
        key: all but names and numbers: the parameters among its inputs, the options, and what is
            known of the modules and their groups.
        parameters: in the order in which the inputs have them.
    """

    key: object
    parameters: tuple[Numbered, ...]

    @staticmethod
    def of(inputs: Sequence[tuple[int, Numbered]], config: FusionConfig) -> Described:
        """Describe a forward.

        Args:
            inputs: which of its inputs are parameters, and which ones.
            config: the options.
        """
        parameters = tuple(parameter for _, parameter in inputs)
        names = _modules_of(parameters)
        place = {name: place for place, name in enumerate(names)}
        modules = {name: registry.module(name) for name in names}
        places = tuple(
            (index, place[name], modules[name].kinds[number]) for index, (name, number) in inputs
        )
        return Described((config, places, tuple(map(_kind_of, names))), parameters)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules, in the order in which the inputs have them."""
        return _modules_of(self.parameters)


def numbered(parameter: nn.Parameter) -> Numbered:
    """A parameter that one managed module has."""
    found = registry.numbered(parameter)
    assert found is not None, "it is managed"
    return found


def _modules_of(parameters: Iterable[Numbered]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(module for module, _ in parameters))


def _kind_of(name: str) -> object:
    """All that a graph, and whether it may be used, can depend on of a module, but for names."""
    module, ddp = registry.module(name), registry.ddp_of(name)
    assert ddp is not None, "it is compiled, or has a backward"
    of_ddp = (ddp.static_graph, is_hooked(ddp), sent_as(ddp))
    return (
        (module.backend, module.world_size, module.caps, module.strides, module.dense),
        (module.flag_dtype, module.profile, of_ddp),
    )


@dataclass(frozen=True)
class Lent:
    """Whose parameters those in a graph stand for, when it runs.

    Attributes:
        parameters: by those in the graph.
    """

    parameters: Mapping[Numbered, Numbered]

    @functools.cached_property
    def modules(self) -> Mapping[str, str]:
        """Whose names stand for each module's."""
        return {theirs[0]: mine[0] for theirs, mine in self.parameters.items()}

    @functools.cached_property
    def is_own(self) -> bool:
        """Whether each stands for itself."""
        return all(theirs == mine for theirs, mine in self.parameters.items())


@dataclass
class PreparedForwards:
    """The forwards that were compiled so.

    Attributes:
        version: how often one has been added.
    """

    version: int = 0
    _parameters: dict[object, dict[tuple[Numbered, ...], None]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def add(self, described: Described) -> None:
        self.version += 1
        known = self._parameters.setdefault(described.key, {})
        known.pop(described.parameters, None)
        known[described.parameters] = None  # The latest last.

    def lent_to(self, described: Described) -> Lent | str:
        """Find what the backward of a forward may call its parameters.

        Args:
            described: the forward.

        Returns:
            What each name and number that its graph may have stands for, or why the backward
            cannot reduce them.
        """
        known = self._parameters.get(described.key)
        if not known:
            return NOT_COMPILED
        mine = described.parameters
        found = dict(zip(mine, mine, strict=True)) if mine in known else {}
        for other in list(known)[-_BORROWED_AT_MOST:]:
            lent = found | dict(zip(other, mine, strict=True))
            if _is_consistent(lent, found):
                found = lent
            elif frozenset(other) != frozenset(mine):
                return PERMUTED  # Which of these forwards has run, nobody can tell.
        return Lent(found | _flags_of(found)) if found else SHARED


def _flags_of(lent: Mapping[Numbered, Numbered]) -> dict[Numbered, Numbered]:
    """What the flags stand for that modules send with these parameters. Modules that share a
    forward have as many parameters, and so one number for them."""
    modules = {theirs: mine for (theirs, _), (mine, _) in lent.items()}
    flags = {mine: registry.module(mine).flags for mine in modules.values()}
    return {(theirs, flags[mine]): (mine, flags[mine]) for theirs, mine in modules.items()}


def _is_consistent(lent: Mapping[Numbered, Numbered], found: Mapping[Numbered, Numbered]) -> bool:
    """Whether nothing stands for two parameters, nor a module for two."""
    modules: dict[str, str] = {}
    return all(
        found.get(theirs, mine) == mine and modules.setdefault(theirs[0], mine[0]) == mine[0]
        for theirs, mine in lent.items()
    )


@contextlib.contextmanager
def borrowing(
    lent: Sequence[tuple[Any, Lent]], groups: Mapping[str, dist.ProcessGroup]
) -> Iterator[None]:
    """Around a backward whose graphs may have the names and numbers of others.

    Args:
        lent: for the autograd node of each compiled forward, what those in its graph stand for.
        groups: what the own names of the modules that the backward reaches stand for.
    """
    if all(item.is_own for _, item in lent):
        yield
        return
    names = {theirs for _, item in lent for theirs, mine in item.modules.items() if theirs != mine}
    borrowed.names.update(names)
    handles = [node.register_prehook(functools.partial(_lend, item, groups)) for node, item in lent]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        borrowed.reset()
        for name in names:
            owner = registry.ddp_of(name)  # Or the graph has outlived its module.
            redirect(name, None if owner is None else registry.group_of(owner))


def _lend(item: Lent, groups: Mapping[str, dist.ProcessGroup], *_: object) -> None:
    """Called before a graph runs: from now on, its names and numbers stand for what they shall."""
    borrowed.parameters = item.parameters
    borrowed.modules = item.modules
    for theirs, mine in item.modules.items():
        if theirs in borrowed.names:  # In this graph, or in the one before.
            is_local = participants[mine].is_local
            redirect(theirs, local_process_group() if is_local else groups[mine])
