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

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import borrowed, participants
from fusion_passes.ddp.exiting import pause_for
from fusion_passes.ddp.managed_module import (
    PARAMETER_MARK,
    ManagedModule,
    describe,
    group_name_of,
    let_stand_for,
    settings_of,
    usage_of,
)
from fusion_passes.ddp.unfinished import refuse_changed, refuse_repeated
from fusion_passes.ddp.unfused_parameters import UnfusedParameters
from fusion_passes.profile.records import Profile
from fusion_passes.profile.steps import MeasuredSteps
from fusion_passes.reductions.owners import Owner
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import (
    local_process_group,
    register_process_group,
    unregister_process_group,
)
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.stand_ins import MakeStandIn, StandInGroup

_numbers: Final = process_state.keep(
    weakref.WeakKeyDictionary[dist.ProcessGroup, "itertools.count[int]"](),
    "the number of the next module on each process group; kept, since the group's store knows it",
    Lifetime.GROUP,
    reset=lambda _: None,
)


@dataclass
class _Entry:
    """A managed module of the registry, what takes it out again, and the group that does its
    collectives otherwise than its process group would, if there is one, with what makes it."""

    module: ManagedModule
    remove: weakref.finalize[Any, Any]
    make_stand_in: MakeStandIn | None = None
    stand_in: StandInGroup | None = None


@dataclass
class Registry:
    """The managed modules of this process.

    Attributes:
        version: how often they, or what is known of them, have changed.
        unfused: the parameters of modules that DDP's own reducer trains.
    """

    version: int = 0
    unfused: UnfusedParameters = field(default_factory=UnfusedParameters)
    _modules: dict[str, ManagedModule] = field(default_factory=dict)
    _parameter_ids: Counter[int] = field(default_factory=Counter)
    _unchecked: weakref.WeakSet[DistributedDataParallel] = field(default_factory=weakref.WeakSet)
    _moved: set[str] = field(default_factory=set)
    _entries: weakref.WeakKeyDictionary[DistributedDataParallel, _Entry] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _named: weakref.WeakValueDictionary[str, DistributedDataParallel] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _numbered: dict[int, tuple[str, int]] | None = None

    def add(self, ddp: DistributedDataParallel) -> ManagedModule:
        """Register a module that has been constructed, until it is freed."""
        group = ddp.process_group
        number = self._number_on(group)
        module = describe(ddp, number)
        self._modules[module.group_name] = module
        self._meet_under(ddp, module.group_name, str(number))
        for alias in module.names():
            register_process_group(alias, group)
        self._parameter_ids.update(module.trained_ids(parameters_of(ddp)))
        self._note_change()
        self._entries[ddp] = self._entry(ddp, module)
        self._named[module.group_name] = ddp
        self._unchecked.add(ddp)
        return module

    def _entry(self, ddp: DistributedDataParallel, module: ManagedModule) -> _Entry:
        ids = module.trained_ids(parameters_of(ddp))
        remove = weakref.finalize(ddp, self._remove, module.group_name, module, ids)
        remove.atexit = False
        return _Entry(module, remove)

    def _number_on(self, group: dist.ProcessGroup) -> int:
        numbers = _numbers.setdefault(group, itertools.count())
        return next(n for n in numbers if group_name_of(group, n) not in self._moved)

    def _remove(self, name: str, module: ManagedModule, ids: list[int]) -> None:
        self._parameter_ids -= Counter(ids)
        self._note_change()
        if name not in self._moved and self._modules.get(name) is not module:
            return  # It outlived its process group, and a module of the next one has its names.
        self._moved.discard(name)
        del self._modules[name]
        participants.pop(name, None)
        if not dist.is_initialized():  # Destroying the groups has removed their names already.
            pause_for(module.backend)  # The last reference to its group may go with the module.
        else:
            for alias in set(module.names()).difference(borrowed.names):  # A backward needs those.
                unregister_process_group(alias)

    def check_new(self, check: Callable[[nn.Module], None]) -> None:
        """Call ``check`` with each wrapped model once: before the first backward of any."""
        while self._unchecked:
            check(self._unchecked.pop().module)

    def discard(self, ddp: DistributedDataParallel) -> None:
        """Forget a managed module."""
        entry = self._entries.pop(ddp)
        if self.ddp_of(entry.module.group_name) is ddp:
            del self._named[entry.module.group_name]
        entry.remove()

    def reset(self) -> None:
        """Forget the managed modules, but not what DDP's own reducer trains as long as it is
        there, which must not be traced."""
        for ddp in list(self._entries):
            self.discard(ddp)
        self._unchecked.clear()

    def module_of(self, ddp: DistributedDataParallel) -> ManagedModule:
        return self._entries[ddp].module

    def move(self, ddp: DistributedDataParallel) -> bool:
        """Follow a module to the process group that it has now: its names resolve to that, so
        compiled graphs go on over it.

        Returns:
            Whether the new group has another size or backend, which graphs depend on.
        """
        entry, group = self._entries[ddp], ddp.process_group
        old = entry.module
        entry.module = old.moved_to(group, torch.device(ddp.device_type))
        self._modules[old.group_name] = entry.module
        self._note_change()
        self._moved.add(old.group_name)
        self._meet_under(ddp, old.group_name, str(self._number_on(group)))
        self.set_stand_in(ddp, entry.make_stand_in)
        return (old.backend, old.world_size) != (entry.module.backend, entry.module.world_size)

    def set_costs(
        self, ddp: DistributedDataParallel, profile: Profile, steps: MeasuredSteps | None
    ) -> None:
        """Note what collectives cost between a module's ranks, and what was measured in steps."""
        self._renew(ddp, replace(self.module_of(ddp), profile=profile, steps=steps))

    def set_hooked(self, ddp: DistributedDataParallel, make: MakeStandIn) -> None:
        """Let a group call a communication hook in the place of a module's collectives. The ranks
        agree anew."""
        self._renew(ddp, replace(self.module_of(ddp), calls_hook=True))
        participants[self.module_of(ddp).group_name].history.clear()
        self.set_stand_in(ddp, make)

    def set_stand_in(self, ddp: DistributedDataParallel, make: MakeStandIn | None) -> None:
        """Let a module's collectives be done by another group, or by its process group again."""
        entry = self._entries[ddp]
        entry.make_stand_in = make
        entry.stand_in = make(ddp.process_group) if make is not None else None
        self.rejoin(entry.module.group_name)

    def _renew(self, ddp: DistributedDataParallel, module: ManagedModule) -> None:
        self._entries[ddp].remove.detach()
        self._entries[ddp] = self._entry(ddp, module)
        self._modules[module.group_name] = module
        self._note_change()

    def _note_change(self) -> None:
        self._numbered = None
        self.version += 1

    def group_of(self, ddp: DistributedDataParallel) -> dist.ProcessGroup:
        """What the name stands for on which a module's buckets are reduced."""
        group: dist.ProcessGroup = self._entries[ddp].stand_in or ddp.process_group
        return group

    def _meet_under(self, ddp: DistributedDataParallel, name: str, key: str) -> None:
        # Once a module has moved to another group, ranks may have other names for it.
        participants[name] = Participant(
            name,
            key,
            usage_of(ddp, self._modules[name]),
            self._modules[name].process_group,
            settings=lambda: settings_of(self._modules[name], participants[name].usage is not None),
            stand_aside=lambda: self.stand_aside(name),
            refuse=functools.partial(self._refuse, name),
        )

    def _refuse(self, name: str, numbers: Iterable[int], is_repeated: bool) -> None:
        ddp = self.ddp_of(name)
        if ddp is not None:
            refuse = refuse_repeated if is_repeated else refuse_changed
            refuse(ddp, self._modules[name], numbers)

    def stand_aside(self, name: str) -> None:
        """Keep a module's collectives on this rank until :meth:`rejoin`."""
        let_stand_for(self._modules[name].names(), local_process_group())

    def rejoin(self, name: str) -> None:
        """Let a module's collectives reach the other ranks again."""
        ddp = self.ddp_of(name)
        if ddp is not None:
            module, others = self._modules[name], ddp.process_group
            let_stand_for([name], self.group_of(ddp))
            # A hook is given buckets: not what a graph reduces one by one that no pass has seen.
            single = local_process_group() if module.calls_hook else others
            let_stand_for(module.names()[1:], single)

    def ddp_of(self, name: str) -> DistributedDataParallel | None:
        """The managed module of a group name, if it is still there."""
        return self._named.get(name)

    def __len__(self) -> int:
        return len(self._modules)

    def manages(self, parameter: Tensor) -> bool:
        """Whether the parameter's gradient is reduced by a managed module."""
        return id(parameter) in self._parameter_ids

    def manages_once(self, parameter: Tensor) -> bool:
        """Whether a single managed module reduces the parameter's gradient."""
        return self._parameter_ids[id(parameter)] == 1

    def modules(self) -> list[DistributedDataParallel]:
        """The managed modules, in the order of their construction."""
        return list(self._entries)

    def numbered(self, parameter: Tensor) -> tuple[str, int] | None:
        """The name of the managed module that reduces a parameter's gradient, and the parameter's
        number there; ``None`` if there is not just one."""
        if self._numbered is None:
            self._numbered = {
                id(parameter): (entry.module.group_name, number)
                for ddp, entry in self._entries.items()
                for number, parameter in enumerate(parameters_of(ddp))
                if self.manages_once(parameter)
            }
        return self._numbered.get(id(parameter))

    def module(self, group_name: str) -> ManagedModule:
        return self._modules[group_name]

    def owner_of(self, group_name: str) -> Owner | None:
        """As :data:`fusion_passes.reductions.owners.OwnerOf`."""
        base, _, index = group_name.partition(PARAMETER_MARK)
        module = self._modules.get(base)
        if module is None:
            return None
        return module.owner(int(index) if index else None)

    def reached_by(self, parameters: Iterable[Tensor]) -> list[str]:
        """The names of the modules that reduce the gradients of some of ``parameters``."""
        ids, entries = set(map(id, parameters)), self._entries.items()
        reached = (e for ddp, e in entries if not ids.isdisjoint(map(id, parameters_of(ddp))))
        return [entry.module.group_name for entry in reached]

    def fingerprint(self) -> tuple[ManagedModule, ...]:
        """Everything about the modules that a compiled graph can depend on."""
        return tuple(m for _, m in sorted(self._modules.copy().items(), key=lambda item: item[0]))


registry: Final = process_state.keep(
    Registry(),
    "the managed modules: one registry, since group names belong to the process too",
    Lifetime.MODULE,
    reset=Registry.reset,
)
