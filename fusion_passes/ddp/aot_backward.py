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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_obstacles import HOOKS, OTHERS_USED, has_hooks
from fusion_passes.ddp.engine_calls import edges_by_region
from fusion_passes.ddp.expecting import EXPECTED, LOCAL
from fusion_passes.ddp.kept import adding_kept, obstacle_in_kept
from fusion_passes.ddp.managed_module import PARAMETER_MARK
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.turns import is_main_thread
from fusion_passes.ddp.unused import has_used_others
from fusion_passes.flag import active_config
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import compiled_forward


def _key(inputs: Sequence[tuple[int, str]], config: FusionConfig) -> object:
    """What must be now as it was when a forward was compiled, for its backward to be used: the
    parameters among its inputs, the options, and the groups, whose size can be in the graph."""
    modules = dict.fromkeys(_module_name(name) for _, name in inputs)
    groups = [(registry.module(m).backend, registry.module(m).world_size) for m in modules]
    return config, tuple(inputs), tuple(groups)


def _module_name(group_name: str) -> str:
    return group_name.partition(PARAMETER_MARK)[0]


def _kept_of(module: str, edges: Iterable[tuple[int, nn.Parameter]]) -> dict[int, Tensor]:
    """The gradients of a module that there are already, by their parameters' numbers: nothing where
    this rank alone is the average, so that autograd adds what comes."""
    if registry.module(module).world_size == 1:
        return {}
    kept: dict[int, Tensor] = {}
    for _, parameter in edges:
        name, _, number = (registry.name_of(parameter) or "").partition(PARAMETER_MARK)
        if name == module and parameter.grad is not None:
            kept[int(number)] = parameter.grad
    return kept


@dataclass(frozen=True)
class Averaged:
    """What a backward averages by itself.

    Attributes:
        participants: the modules.
        forwards: the compiled forwards that it is the backward of.
        kept: for each module, by its parameters' numbers, the gradients that there are already.
        why_not: why there are none, for people; what follows "because".
    """

    participants: tuple[Participant, ...] = ()
    forwards: tuple[Any, ...] = ()
    kept: tuple[Mapping[int, Tensor], ...] = ()
    why_not: str = ""


NONE_AVERAGED: Final = Averaged()

_REPLANNED: Final = "the graph of its forward does not launch what the ranks have agreed on"
_NOT_COMPILED: Final = (
    "no forward was compiled for just its parameters, with these options and groups: a part of it "
    "is not compiled, or another module shares the compiled forward"
)


@dataclass
class AotBackwards:
    """Decides which backwards are averaged by the graph that was compiled with their forward.

    Attributes:
        prepared: for each forward that was compiled so, what its backward depends on.
        left_to_compiled_autograd: the modules whose graphs do not launch what the ranks have
            agreed on.
        obstacles: why the forward of a module was compiled without reductions the last time; empty
            where it was compiled with them.
    """

    prepared: set[object] = field(default_factory=set)
    left_to_compiled_autograd: weakref.WeakSet[DistributedDataParallel] = field(
        default_factory=weakref.WeakSet
    )
    obstacles: weakref.WeakKeyDictionary[DistributedDataParallel, str] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _without: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def prepare(self, inputs: Sequence[tuple[int, str]], config: FusionConfig) -> None:
        """Note that a forward is compiled whose backward reduces gradients.

        Args:
            inputs: which of its inputs are parameters, and the group names of their gradients.
            config: the options.
        """
        self.prepared.add(_key(inputs, config))

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
            return Averaged(why_not=self._known_obstacle(registry.modules()))
        regions = edges_by_region(outputs)
        if not regions or None in regions:
            return Averaged(why_not="gradients come from what is not compiled")
        modules: list[str] = []
        kept: list[Mapping[int, Tensor]] = []
        for region, edges in regions.items():
            found, why_not = self._modules_of(region, edges, config)
            if not why_not and not set(found).isdisjoint(modules):
                why_not = "its gradients come from several forwards"
            if why_not:
                return Averaged(why_not=why_not)
            modules += found
            kept += [_kept_of(module, edges) for module in found]
        return Averaged(
            tuple(participants[module] for module in modules),
            tuple(compiled_forward(region) for region in regions),
            tuple(kept),
        )

    def _modules_of(
        self, region: Any, edges: Sequence[tuple[int, nn.Parameter]], config: FusionConfig
    ) -> tuple[list[str], str]:
        """The modules that the backward of a compiled region averages, and why it must not do so;
        empty if it may."""
        names = [(index, registry.name_of(parameter) or "") for index, parameter in edges]
        modules = list(dict.fromkeys(_module_name(name) for _, name in names))
        if "" in modules:
            return modules, "two DDP modules share a parameter"
        if _key(names, config) not in self.prepared:
            return modules, self._known_obstacle(map(registry.ddp_of, modules))
        if compiled_forward(region) in self._without:
            return modules, "its gradients are not what the compiled backward returns"
        if any(has_hooks(parameter) for _, parameter in edges):
            return modules, HOOKS
        why_not = obstacle_in_kept([parameter for _, parameter in edges], modules)
        return modules, why_not or next(filter(None, map(self._why_not_now, modules)), "")

    def refusal(self, ddp: DistributedDataParallel) -> str:
        """Why a module is left to compiled autograd for good; empty if it is not."""
        return _REPLANNED if ddp in self.left_to_compiled_autograd else ""

    def _known_obstacle(self, modules: Iterable[DistributedDataParallel | None]) -> str:
        known = (self.obstacles.get(ddp, "") for ddp in modules if ddp is not None)
        return next(filter(None, known), _NOT_COMPILED)

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
        try:
            with contextlib.ExitStack() as stack:
                for participant, kept in zip(averaged.participants, averaged.kept, strict=True):
                    ddp = registry.ddp_of(participant.module)
                    if kept and ddp is not None:
                        stack.enter_context(adding_kept(ddp, participant, kept))
                yield
            self._learn(averaged)
        finally:
            for participant in averaged.participants:
                participant.is_averaged = False
                participant.announced.clear()

    def _learn(self, averaged: Averaged) -> None:
        """Note which forwards are left to compiled autograd from now on."""
        for participant in averaged.participants:
            if not participant.announced:
                # Its backward was compiled without reductions.
                self._without.update(averaged.forwards)
            ddp = registry.ddp_of(participant.module)
            if participant.needs_replanning and ddp is not None:
                self.left_to_compiled_autograd.add(ddp)


aot_backwards: Final = process_state.keep(
    AotBackwards(),
    "which compiled forwards have a backward that reduces gradients",
    Lifetime.PROCESS,
    reset=AotBackwards.reset,
)
