"""Reduces gradients in the backward that AOTAutograd compiles with a forward.

AOTAutograd's cache keeps that backward, so a second process starts as without DDP, and no step pays
for compiled autograd. The graph is the same in every backward, so its collectives average only
where :class:`AotBackwards` has found that this gives what eager DDP gives. In any other backward
they stay on their rank (see :meth:`fusion_passes.agreement.participant.Participant.announce`), and
the gradients are those of this rank: what DDP's hooks do with them then is what they always do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_obstacles import HOOKS, IN_PARTS, OTHERS_USED, has_hooks
from fusion_passes.ddp.engine_calls import edges_by_region
from fusion_passes.ddp.expecting import EXPECTED, LOCAL
from fusion_passes.ddp.in_flight import in_flight
from fusion_passes.ddp.kept import adding_kept, obstacle_in_kept
from fusion_passes.ddp.managed_module import PARAMETER_MARK
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.prepared import NOT_COMPILED, SHARED, Described, PreparedForwards, borrowing
from fusion_passes.ddp.turns import is_main_thread
from fusion_passes.ddp.unused import has_used_others
from fusion_passes.flag import active_config
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import compiled_forward
from fusion_passes.torch_private.ddp import parameters_of


def _named(edge: tuple[int, nn.Parameter]) -> tuple[int, str]:
    """The place of a parameter among a forward's inputs, and the group name of its gradient."""
    return edge[0], registry.name_of(edge[1]) or ""


def _in_parts(described: Sequence[Described], names: Sequence[str]) -> str:
    """Why the backwards of several forwards do not give each module all of its gradients once, or
    not under names of their own; empty if they do.

    Args:
        described: the forwards.
        names: the group names of all gradients that they give.
    """
    if len(set(names)) < len(names):
        return "its gradients come from several forwards"
    if len({item.key for item in described}) < len(described):
        return SHARED
    forwards_of = Counter(name for item in described for name in item.modules)
    for name, forwards in forwards_of.items():
        ddp, module = registry.ddp_of(name), registry.module(name)
        assert ddp is not None, "it has a backward"
        if module.flag_dtype is None:
            trained = [n for n, p in enumerate(parameters_of(ddp)) if p.requires_grad]
            if not {module.name_for(number) for number in trained}.issubset(names):
                return "it does not reach all of its parameters"
        elif forwards > 1:
            return IN_PARTS
    return ""


def _kept_of(module: str, parameters: Iterable[nn.Parameter]) -> dict[int, Tensor]:
    """The gradients of a module that there are already, by their parameters' numbers: nothing where
    this rank alone is the average, so that autograd adds what comes."""
    if registry.module(module).world_size == 1:
        return {}
    kept: dict[int, Tensor] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            name, _, number = (registry.name_of(parameter) or "").partition(PARAMETER_MARK)
            if name == module:
                kept[int(number)] = parameter.grad
    return kept


@dataclass(frozen=True)
class Averaged:
    """What a backward averages by itself.

    Attributes:
        participants: the modules.
        forwards: the compiled forwards that it is the backward of, and the group names of the
            gradients that it gives of each.
        kept: for each module, by its parameters' numbers, the gradients that there are already.
        borrowed: names of other modules that its graphs may have, and whose they stand for.
        why_not: why there are none, for people; what follows "because".
    """

    participants: tuple[Participant, ...] = ()
    forwards: tuple[tuple[Any, frozenset[str]], ...] = ()
    kept: tuple[Mapping[int, Tensor], ...] = ()
    borrowed: tuple[tuple[str, str], ...] = ()
    why_not: str = ""


NONE_AVERAGED: Final = Averaged()

_REPLANNED: Final = "the graph of its forward does not launch what the ranks have agreed on"


@dataclass
class AotBackwards:
    """Decides which backwards are averaged by the graph that was compiled with their forward.

    Attributes:
        prepared: the forwards that were compiled so.
        left_to_compiled_autograd: the modules whose graphs do not launch what the ranks have
            agreed on.
        obstacles: why the forward of a module was compiled without reductions the last time; empty
            where it was compiled with them.
    """

    prepared: PreparedForwards = field(default_factory=PreparedForwards)
    left_to_compiled_autograd: weakref.WeakSet[DistributedDataParallel] = field(
        default_factory=weakref.WeakSet
    )
    obstacles: weakref.WeakKeyDictionary[DistributedDataParallel, str] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _without: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def forget(self) -> None:
        """The flag has changed: what is compiled now is compiled anew."""
        self.left_to_compiled_autograd.clear()

    def reset(self) -> None:
        vars(self).update(vars(AotBackwards()))

    def find_averaged(self, outputs: Sequence[Any]) -> Averaged:
        """What a backward averages by itself; nothing if there is a module that it reaches and
        must not.

        Args:
            outputs: tensors or gradient edges that the backward starts from. It accumulates all
                gradients that it reaches, and keeps no graph.
        """
        config = active_config()
        if config is None or not is_main_thread():
            return Averaged(why_not="it is not the main thread's")
        if config.backward_graph == "compiled_autograd":
            return Averaged(why_not="backward_graph is 'compiled_autograd'")
        if not self.prepared:
            modules = [registry.module_of(ddp).group_name for ddp in registry.modules()]
            return Averaged(why_not=self._known_obstacle(modules) or NOT_COMPILED)
        regions = edges_by_region(outputs)
        if not regions or None in regions:
            return Averaged(why_not="gradients come from what is not compiled")
        every = [parameter for edges in regions.values() for _, parameter in edges]
        if any(registry.name_of(parameter) is None for parameter in every):
            return Averaged(why_not="two DDP modules share a parameter")
        return self._averaged_of(regions, config)

    def _averaged_of(
        self, regions: Mapping[Any, Sequence[tuple[int, nn.Parameter]]], config: FusionConfig
    ) -> Averaged:
        named = [list(map(_named, edges)) for edges in regions.values()]
        described = [Described.of(inputs, config) for inputs in named]
        modules = tuple(dict.fromkeys(name for item in described for name in item.modules))
        why_not = _in_parts(described, [name for inputs in named for _, name in inputs])
        borrowed: dict[str, str] = {}
        for item in described:
            names = self.prepared.names_for(item, modules)
            if isinstance(names, str):
                why_not = why_not or self._known_obstacle(item.modules) or names
                break
            borrowed |= names
        parameters = [parameter for edges in regions.values() for _, parameter in edges]
        forwards = [compiled_forward(region) for region in regions]
        why_not = why_not or self._why_not(forwards, parameters, modules)
        if why_not:
            return Averaged(why_not=why_not)
        return Averaged(
            tuple(participants[name] for name in modules),
            tuple(zip(forwards, (frozenset(n for _, n in i) for i in named), strict=True)),
            tuple(_kept_of(name, parameters) for name in modules),
            tuple(borrowed.items()),
        )

    def _why_not(
        self, forwards: Iterable[Any], parameters: Sequence[nn.Parameter], modules: Sequence[str]
    ) -> str:
        """Why the backward of compiled forwards must not average modules; empty if it may."""
        if not self._without.isdisjoint(forwards):
            return "its gradients are not what the compiled backward returns"
        if any(map(has_hooks, parameters)):
            return HOOKS
        why_not = obstacle_in_kept(parameters)
        return why_not or next(filter(None, map(self._why_not_now, modules)), "")

    def refusal(self, ddp: DistributedDataParallel) -> str:
        """Why a module is left to compiled autograd for good; empty if it is not."""
        return _REPLANNED if ddp in self.left_to_compiled_autograd else ""

    def _known_obstacle(self, modules: Iterable[str]) -> str:
        """Why the forward of one of these modules was compiled without reductions, if it was."""
        known = [ddp for name in modules if (ddp := registry.ddp_of(name)) is not None]
        return next(filter(None, (self.obstacles.get(ddp, "") for ddp in known)), "")

    def _why_not_now(self, name: str) -> str:
        """Why a module's next gradients cannot all come from one graph; empty if they can."""
        ddp, participant = registry.ddp_of(name), participants[name]
        if ddp in self.left_to_compiled_autograd:
            return _REPLANNED
        if ddp is None or not getattr(ddp, EXPECTED) or participant.kind:
            return "its forward has had a backward before"
        if participant.received or participant.is_local:
            return "another backward has given some of its gradients"
        return OTHERS_USED if has_used_others(name) else ""

    def stays_local(self, modules: Iterable[str]) -> bool:
        """Whether a backward under ``no_sync`` that reaches these modules needs no graph of its
        own: the one that was compiled with its forward gives this rank's gradients then."""
        if not self.prepared:
            return False
        reached = [registry.ddp_of(name) for name in modules]
        return bool(reached) and all(
            ddp is not None and getattr(ddp, LOCAL) and not getattr(ddp, EXPECTED)
            for ddp in reached
        )

    @contextlib.contextmanager
    def averaging(self, averaged: Averaged) -> Iterator[None]:
        """Around a backward that averages these modules by itself."""
        for participant in averaged.participants:
            participant.is_averaged = True
        is_in_flight = len(averaged.forwards) > 1
        try:
            with contextlib.ExitStack() as stack:
                groups: dict[str, dist.ProcessGroup] = {}
                for participant, kept in zip(averaged.participants, averaged.kept, strict=True):
                    ddp = registry.ddp_of(participant.module)
                    assert ddp is not None, "its backward runs"
                    adding = adding_kept(ddp, participant, kept, is_in_flight=is_in_flight)
                    group = stack.enter_context(adding)
                    if is_in_flight:
                        group = stack.enter_context(in_flight(ddp, participant, group))
                    groups[participant.module] = group
                stack.enter_context(borrowing(dict(averaged.borrowed), groups))
                yield
            self._learn(averaged)
        finally:
            for participant in averaged.participants:
                participant.is_averaged = False
                participant.announced.clear()

    def _learn(self, averaged: Averaged) -> None:
        """Note which forwards are left to compiled autograd from now on."""
        announced = set()
        for participant in averaged.participants:
            module = registry.module(participant.module)
            announced |= {module.name_for(number) for number in participant.announced}
            ddp = registry.ddp_of(participant.module)
            if participant.needs_replanning and ddp is not None:
                self.left_to_compiled_autograd.add(ddp)
        for forward, names in averaged.forwards:
            if names.isdisjoint(announced):
                self._without.add(forward)  # Its backward was compiled without reductions.


aot_backwards: Final = process_state.keep(
    AotBackwards(),
    "which compiled forwards have a backward that reduces gradients",
    Lifetime.PROCESS,
    reset=AotBackwards.reset,
)
