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
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.config import FusionConfig
from fusion_passes.ddp.aot_obstacles import HOOKS, OTHERS_USED, has_hooks, obstacle_in_module
from fusion_passes.ddp.engine_calls import edges_by_region
from fusion_passes.ddp.expecting import EXPECTED, LOCAL
from fusion_passes.ddp.managed_module import PARAMETER_MARK
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.turns import is_main_thread
from fusion_passes.ddp.unused import has_used_others
from fusion_passes.flag import active_config
from fusion_passes.reductions.insert import ReducedInput
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import compiled_forward, is_tensor_subclass
from fusion_passes.torch_private.ddp import parameters_of


@dataclass(frozen=True)
class ReducedInputs:
    """The parameters of DDP modules among the inputs of a forward that is being compiled.

    Attributes:
        inputs: those whose gradients are reduced in its backward.
        num_inputs: of the forward.
    """

    inputs: tuple[ReducedInput, ...]
    num_inputs: int


def _forget(compiled: ContextVar[ReducedInputs | None]) -> None:
    compiled.set(None)


_compiling: Final = process_state.keep(
    ContextVar[ReducedInputs | None]("reduced inputs", default=None),
    "the parameters whose gradients the backward reduces that is being compiled",
    Lifetime.CALL,
    reset=_forget,
)


def reduced_inputs() -> ReducedInputs | None:
    """Those of the forward that is being compiled; ``None`` where its backward reduces nothing."""
    return _compiling.get()


@contextlib.contextmanager
def compiling(inputs: ReducedInputs) -> Iterator[None]:
    """Around the compile of a forward whose backward is to reduce gradients."""
    token = _compiling.set(inputs)
    try:
        yield
    finally:
        _compiling.reset(token)


def find_reduced_inputs(
    graph: fx.Graph, inputs: Sequence[Any], config: FusionConfig
) -> ReducedInputs | None:
    """Find the parameters whose gradients the backward of a forward can reduce.

    Args:
        graph: of the forward, as Dynamo has traced it.
        inputs: what it was traced with.
        config: the options.

    Returns:
        ``None`` if there are none. All trainable parameters of a module must be inputs: a module
        whose forward is cut into several graphs is left to compiled autograd, which makes one
        backward of them.
    """
    if len(graph.find_nodes(op="placeholder")) != len(inputs) or any(
        map(is_tensor_subclass, inputs)
    ):
        return None
    index_of = {id(value): index for index, value in enumerate(inputs) if isinstance(value, Tensor)}
    found: list[ReducedInput] = []
    for ddp in registry.modules():
        trained = {n: p for n, p in enumerate(parameters_of(ddp)) if p.requires_grad}
        present = [number for number in trained if id(trained[number]) in index_of]
        if not present:
            continue
        module = registry.module_of(ddp)
        in_parts = len(present) < len(trained) and module.flag_dtype is None
        obstacle = _IN_PARTS if in_parts else obstacle_in_module(ddp, trained.values(), config)
        obstacle = obstacle or aot_backwards.refusal(ddp)
        aot_backwards.obstacles[ddp] = obstacle
        if obstacle:
            return None
        found += [
            ReducedInput(
                index_of[id(parameter)],
                module.name_for(number),
                module.world_size,
                tuple(parameter.shape),
                module.strides[number],
            )
            for number, parameter in trained.items()
            if number in present
        ]
    if not found or len({item.index for item in found}) < len(found):
        return None
    known = ReducedInputs(tuple(sorted(found, key=lambda item: item.index)), len(inputs))
    aot_backwards.prepared.add(_key([(item.index, item.name) for item in known.inputs], config))
    return known


def _key(inputs: Sequence[tuple[int, str]], config: FusionConfig) -> object:
    """What must be now as it was when a forward was compiled, for its backward to be used: the
    parameters among its inputs, the options, and the groups, whose size can be in the graph."""
    modules = dict.fromkeys(_module_name(name) for _, name in inputs)
    groups = [(registry.module(m).backend, registry.module(m).world_size) for m in modules]
    return config, tuple(inputs), tuple(groups)


def _module_name(group_name: str) -> str:
    return group_name.partition(PARAMETER_MARK)[0]


@dataclass(frozen=True)
class Averaged:
    """What a backward averages by itself.

    Attributes:
        participants: the modules.
        forwards: the compiled forwards that it is the backward of.
        why_not: why there are none, for people; what follows "because".
    """

    participants: tuple[Participant, ...] = ()
    forwards: tuple[Any, ...] = ()
    why_not: str = ""


NONE_AVERAGED: Final = Averaged()

_IN_PARTS: Final = "its forward is compiled in several parts, none of which has all its parameters"
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
        for region, edges in regions.items():
            found, why_not = self._modules_of(region, edges, config)
            if not why_not and not set(found).isdisjoint(modules):
                why_not = "its gradients come from several forwards"
            if why_not:
                return Averaged(why_not=why_not)
            modules += found
        return Averaged(
            tuple(participants[module] for module in modules),
            tuple(compiled_forward(region) for region in regions),
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
        if any(parameter.grad is not None for _, parameter in edges):
            return modules, "there are gradients already, which are averaged with the new ones"
        if any(has_hooks(parameter) for _, parameter in edges):
            return modules, HOOKS
        return modules, next(filter(None, map(self._why_not_now, modules)), "")

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
            yield
            for participant in averaged.participants:
                if not participant.announced:
                    # Its backward was compiled without reductions.
                    self._without.update(averaged.forwards)
                ddp = registry.ddp_of(participant.module)
                if participant.needs_replanning and ddp is not None:
                    self.left_to_compiled_autograd.add(ddp)
        finally:
            for participant in averaged.participants:
                participant.is_averaged = False
                participant.announced.clear()


aot_backwards: Final = process_state.keep(
    AotBackwards(),
    "which compiled forwards have a backward that reduces gradients",
    Lifetime.PROCESS,
    reset=AotBackwards.reset,
)
