"""Which forwards were compiled with a backward that reduces gradients, and under whose names.

Dynamo compiles one forward for all instances of a class whose parameters have the same shapes. The
backward has the group names of the module for which that was done. For a backward of another
instance, these names stand for its own: it borrows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch.distributed as dist

from fusion_passes.agreement.protocol import borrowed
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.comm_hooks import is_hooked, sent_as
from fusion_passes.ddp.managed_module import PARAMETER_MARK
from fusion_passes.ddp.modules import registry
from fusion_passes.torch_private.stand_ins import redirect

NOT_COMPILED: Final = (
    "no forward was compiled for just its parameters, with these options and groups: a part of it "
    "is not compiled"
)
SHARED: Final = "two modules of this backward share a compiled forward"

_BORROWED_AT_MOST: Final = 16
"""Names of the latest modules only: each costs some microseconds in each backward."""


@dataclass(frozen=True)
class Described:
    """What a compiled forward and its backward depend on.

    Attributes:
        key: all but names: the parameters among its inputs, the options, and what is known of the
            modules and their groups.
        modules: the names of the modules, in the order in which the inputs have them.
    """

    key: object
    modules: tuple[str, ...]

    @staticmethod
    def of(inputs: Iterable[tuple[int, str]], config: FusionConfig) -> Described:
        """Describe a forward.

        Args:
            inputs: which of its inputs are parameters, and the group names of their gradients.
            config: the options.
        """
        named = [(index, *name.split(PARAMETER_MARK)) for index, name in inputs]
        modules = tuple(dict.fromkeys(str(name) for _, name, _ in named))
        places = tuple((index, modules.index(name), number) for index, name, number in named)
        return Described((config, places, tuple(map(_kind_of, modules))), modules)


def _kind_of(name: str) -> object:
    """All that a graph, and whether it may be used, can depend on of a module, but for names."""
    module, ddp = registry.module(name), registry.ddp_of(name)
    assert ddp is not None, "it is compiled, or has a backward"
    of_ddp = (ddp.static_graph, is_hooked(ddp), sent_as(ddp))
    return (
        (module.backend, module.world_size, module.caps, module.strides, module.trained),
        (module.flag_dtype, module.profile, of_ddp),
    )


@dataclass
class PreparedForwards:
    """The forwards that were compiled so."""

    _modules: dict[object, dict[tuple[str, ...], None]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._modules)

    def add(self, described: Described) -> None:
        modules = self._modules.setdefault(described.key, {})
        modules.pop(described.modules, None)
        modules[described.modules] = None  # The latest last.

    def names_for(self, described: Described, reached: Sequence[str]) -> dict[str, str] | str:
        """Find the names that the backward of a forward may have.

        Args:
            described: the forward.
            reached: all modules that the backward which runs reaches.

        Returns:
            The module of this forward that each name of another module stands for, or why the
            backward cannot reduce them.
        """
        known = self._modules.get(described.key)
        if not known:
            return NOT_COMPILED
        others = [names for names in known if names != described.modules]
        own = set(described.modules)
        if any(name in reached and name not in own for names in others for name in names):
            return SHARED
        is_own = described.modules in known
        if any(registry.module(name).flag_dtype is not None for name in described.modules):
            return {} if is_own else SHARED
        found: dict[str, str] = {}
        for names in others[-_BORROWED_AT_MOST:]:
            if own.isdisjoint(names):
                found |= dict(zip(names, described.modules, strict=True))
        return found if found or is_own else SHARED


@contextlib.contextmanager
def borrowing(names: Mapping[str, str], groups: Mapping[str, dist.ProcessGroup]) -> Iterator[None]:
    """Around a backward that may have the names of other modules: they stand for those that it
    reaches.

    Args:
        names: the module that each stands for.
        groups: what the module's own name stands for.
    """
    for name, module in names.items():
        redirect(name, groups[module])
    borrowed.update(names)
    try:
        yield
    finally:
        for name in names:
            del borrowed[name]
            owner = registry.ddp_of(name)  # Or the graph has outlived its module.
            redirect(name, None if owner is None else registry.group_of(owner))
