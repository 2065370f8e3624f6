"""The DDP modules that were constructed under the flag, and the group names that are theirs.

A group's name is a constant of the compiled graph, and a group can have several names. Each module
gets names of its own for its process group: ``0/ddp1`` for the second module on group ``0``, and
``0/ddp1#5`` for the gradient of its parameter 5. So the graph itself says which reduction is
whose, and what was never registered here is never touched. All names resolve to the module's
process group, so a graph that no pass has seen still runs right.

Modules are numbered per group: constructing one is collective over its group, so the numbers agree
on all ranks of the group.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement import meet_under
from fusion_passes.caps import default_cap_bytes
from fusion_passes.reductions import Owner
from fusion_passes.torch_private import (
    DEFAULT_FIRST_BUCKET_BYTES,
    backend_name,
    register_process_group,
    unregister_process_group,
)

_PARAMETER_MARK: Final = "#"


@dataclass(frozen=True)
class ManagedModule:
    """A DDP module whose gradients are reduced under the flag.

    Attributes:
        group_name: the module's own name for its process group.
        process_group: the process group's name.
        backend: name of the process group's backend for the module's device.
        world_size: number of ranks of the process group.
        label: for people: number on the group, and class of the wrapped module.
        parameters: names, in the order in which DDP counts them.
        bucket_cap_bytes: the cap that DDP was given, or ours for its gradients.
        first_bucket_cap_bytes: the cap of its first bucket, by DDP's own rule.
        listed_cap_bytes: caps of its buckets one by one, if DDP was given a list.
    """

    group_name: str
    process_group: str
    backend: str
    world_size: int
    label: str
    parameters: tuple[str, ...]
    bucket_cap_bytes: int
    first_bucket_cap_bytes: int
    listed_cap_bytes: tuple[int, ...]

    def name_for(self, index: int) -> str:
        """The group name in the graph for the gradient of parameter ``index``."""
        return f"{self.group_name}{_PARAMETER_MARK}{index}"

    def names(self) -> list[str]:
        """All names that the module has for its process group."""
        return [self.group_name, *(self.name_for(index) for index in range(len(self.parameters)))]


@dataclass
class _Entry:
    """A managed module of the registry, and what takes it out again."""

    module: ManagedModule
    remove: weakref.finalize[Any, Any]


@dataclass
class Registry:
    """The managed modules of this process."""

    _modules: dict[str, ManagedModule] = field(default_factory=dict)
    _parameter_ids: Counter[int] = field(default_factory=Counter)
    _unfused_ids: Counter[int] = field(default_factory=Counter)
    _unchecked: weakref.WeakSet[DistributedDataParallel] = field(default_factory=weakref.WeakSet)
    _moved: set[str] = field(default_factory=set)
    _entries: weakref.WeakKeyDictionary[DistributedDataParallel, _Entry] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def add(self, ddp: DistributedDataParallel) -> ManagedModule:
        """Registers a module that has been constructed, until it is freed."""
        group = ddp.process_group
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        number = self._number_on(group)
        module = ManagedModule(
            group_name=_group_name(group, number),
            process_group=group.group_name,
            backend=backend_name(group, torch.device(ddp.device_type)),
            world_size=group.size(),
            label=f"DDP {number} ({type(ddp.module).__name__})",
            parameters=tuple(names[id(parameter)] for parameter in ddp._module_parameters),
            bucket_cap_bytes=_cap_bytes(ddp),
            first_bucket_cap_bytes=(
                DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
            ),
            listed_cap_bytes=tuple(ddp.bucket_bytes_cap_list),
        )
        self._modules[module.group_name] = module
        meet_under(module.group_name, str(number))
        for alias in module.names():
            register_process_group(alias, group)
        ids = [id(parameter) for parameter in ddp._module_parameters]
        self._parameter_ids.update(ids)
        remove = weakref.finalize(ddp, self._remove, module.group_name, module, ids)
        remove.atexit = False
        self._entries[ddp] = _Entry(module, remove)
        self._unchecked.add(ddp)
        return module

    def _number_on(self, group: dist.ProcessGroup) -> int:
        numbers = self._numbers.setdefault(group, itertools.count())
        return next(n for n in numbers if _group_name(group, n) not in self._moved)

    def _remove(self, name: str, module: ManagedModule, ids: list[int]) -> None:
        self._parameter_ids -= Counter(ids)
        if name not in self._moved and self._modules.get(name) is not module:
            return  # It outlived its process group, and a module of the next one has its names.
        self._moved.discard(name)
        del self._modules[name]
        if dist.is_initialized():  # Destroying the groups has removed their names already.
            for alias in module.names():
                unregister_process_group(alias)

    def check_new(self, check: Callable[[nn.Module], None]) -> None:
        """Calls ``check`` with each wrapped model once: before the first backward of any."""
        while self._unchecked:
            check(self._unchecked.pop().module)

    def discard(self, ddp: DistributedDataParallel) -> None:
        """Forgets a managed module."""
        self._entries.pop(ddp).remove()

    def holds(self, ddp: DistributedDataParallel) -> bool:
        """Whether the module is managed."""
        return ddp in self._entries

    def module_of(self, ddp: DistributedDataParallel) -> ManagedModule:
        return self._entries[ddp].module

    def move(self, ddp: DistributedDataParallel) -> bool:
        """Follows a module to the process group that it has now: its names resolve to that, so
        compiled graphs go on over it.

        Returns:
            Whether the new group has another size or backend, which graphs depend on.
        """
        entry, group = self._entries[ddp], ddp.process_group
        old = entry.module
        entry.module = replace(
            old,
            process_group=group.group_name,
            backend=backend_name(group, torch.device(ddp.device_type)),
            world_size=group.size(),
        )
        self._modules[old.group_name] = entry.module
        self._moved.add(old.group_name)
        meet_under(old.group_name, str(self._number_on(group)))
        for alias in old.names():
            unregister_process_group(alias)
            register_process_group(alias, group)
        return (old.backend, old.world_size) != (entry.module.backend, entry.module.world_size)

    def add_unfused(self, ddp: DistributedDataParallel) -> None:
        """Notes a module that DDP's own reducer trains under the flag, until it is freed."""
        ids = [id(parameter) for parameter in ddp._module_parameters]
        self._unfused_ids.update(ids)
        weakref.finalize(ddp, self._unfused_ids.subtract, ids).atexit = False

    @property
    def has_unfused(self) -> bool:
        return any(self._unfused_ids.values())

    def is_unfused(self, parameter: nn.Parameter) -> bool:
        """Whether DDP's own reducer reduces the parameter's gradient, which must not be traced."""
        return self._unfused_ids[id(parameter)] > 0

    def __len__(self) -> int:
        return len(self._modules)

    def manages(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient is reduced by a managed module."""
        return self._parameter_ids[id(parameter)] > 0

    def module(self, group_name: str) -> ManagedModule:
        return self._modules[group_name]

    def owner_of(self, group_name: str) -> Owner | None:
        """As :data:`fusion_passes.reductions.OwnerOf`."""
        base, _, index = group_name.partition(_PARAMETER_MARK)
        module = self._modules.get(base)
        if module is None:
            return None
        number = int(index) if index else -1
        parameter = module.parameters[number] if index else "?"
        return Owner(
            module.group_name,
            module.process_group,
            module.label,
            parameter,
            module.backend,
            module.world_size,
            number,
        )

    def names(self) -> list[str]:
        """The names of the modules, each for its group."""
        return list(self._modules)

    def reached_by(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """The names of the modules that reduce the gradients of some of ``parameters``."""
        ids = {id(parameter) for parameter in parameters}
        return [
            entry.module.group_name
            for ddp, entry in self._entries.items()
            if any(id(parameter) in ids for parameter in ddp._module_parameters)
        ]

    def fingerprint(self) -> tuple[ManagedModule, ...]:
        """Everything about the modules that a compiled graph can depend on."""
        return tuple(self._modules[name] for name in sorted(self._modules))


def _cap_bytes(ddp: DistributedDataParallel) -> int:
    if not ddp.bucket_bytes_cap_default:
        return int(ddp.bucket_bytes_cap)
    gradient_bytes = sum(parameter.nbytes for parameter in ddp._module_parameters)
    return default_cap_bytes(gradient_bytes, DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)


def _group_name(group: dist.ProcessGroup, number: int) -> str:
    return f"{group.group_name}/ddp{number}"


registry: Final = Registry()
"""The one registry of the process: group names are process-wide too."""
