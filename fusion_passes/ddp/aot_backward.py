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
from fusion_passes.ddp.comm_hooks import sent_as
from fusion_passes.ddp.engine_calls import edges_by_region
from fusion_passes.ddp.managed_module import PARAMETER_MARK
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.rounds import EXPECTED, LOCAL
from fusion_passes.ddp.turns import is_main_thread
from fusion_passes.flag import active_config
from fusion_passes.plan.scaling import can_average
from fusion_passes.reductions.insert import ReducedInput
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import (
    compiled_forward,
    hooks_after_accumulation,
    hooks_on_gradient,
    is_tensor_subclass,
)
from fusion_passes.torch_private.ddp import dtensor_spec, parameters_of


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
        trained = {
            number: parameter
            for number, parameter in enumerate(parameters_of(ddp))
            if parameter.requires_grad
        }
        present = [number for number in trained if id(trained[number]) in index_of]
        if not present:
            continue
        if len(present) < len(trained) or not _can_reduce(ddp, trained.values(), config):
            return None
        module = registry.module_of(ddp)
        found += [
            ReducedInput(
                index_of[id(parameter)],
                module.name_for(number),
                module.world_size,
                tuple(parameter.shape),
                module.strides[number],
            )
            for number, parameter in trained.items()
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


def _can_reduce(ddp: DistributedDataParallel, parameters: Any, config: FusionConfig) -> bool:
    """Whether the gradients of a module can be averaged by the collective alone: only then are they
    right on this rank where they stay on it."""
    module = registry.module_of(ddp)
    return (
        config.scaling in ("auto", "collective")
        and config.reduce_dtype is None
        and sent_as(ddp) is None
        and not ddp.static_graph
        and module.group_name not in aot_backwards.left_to_compiled_autograd
        and all(
            can_average(module.backend, parameter.dtype)
            and dtensor_spec(parameter) is None
            and registry.manages_once(parameter)
            and not has_hooks(parameter)
            for parameter in parameters
        )
    )


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether others than DDP see the parameter's gradient in the backward. They must see that of
    this rank alone, as with eager DDP."""
    return bool(hooks_on_gradient(parameter)) or len(hooks_after_accumulation(parameter)) > 1


@dataclass(frozen=True)
class Averaged:
    """What a backward averages by itself.

    Attributes:
        participants: the modules.
        forwards: the compiled forwards that it is the backward of.
    """

    participants: tuple[Participant, ...] = ()
    forwards: tuple[Any, ...] = ()


NONE_AVERAGED: Final = Averaged()


@dataclass
class AotBackwards:
    """Decides which backwards are averaged by the graph that was compiled with their forward.

    Attributes:
        prepared: for each forward that was compiled so, what its backward depends on.
        left_to_compiled_autograd: names of the modules whose graphs do not launch what the ranks
            have agreed on.
    """

    prepared: set[object] = field(default_factory=set)
    left_to_compiled_autograd: set[str] = field(default_factory=set)
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
        if not self.prepared or config is None or not is_main_thread():
            return NONE_AVERAGED
        regions = edges_by_region(outputs)
        if not regions or None in regions:
            return NONE_AVERAGED
        modules: list[str] = []
        for region, edges in regions.items():
            averaged = self._modules_of(region, edges, config)
            if not averaged or not set(averaged).isdisjoint(modules):
                return NONE_AVERAGED
            modules += averaged
        return Averaged(
            tuple(participants[module] for module in modules),
            tuple(compiled_forward(region) for region in regions),
        )

    def _modules_of(
        self, region: Any, edges: Sequence[tuple[int, nn.Parameter]], config: FusionConfig
    ) -> list[str]:
        """The modules that the backward of a compiled region averages; none if there is one that it
        must not."""
        names = [(index, registry.name_of(parameter) or "") for index, parameter in edges]
        modules = list(dict.fromkeys(_module_name(name) for _, name in names))
        is_averaged = (
            "" not in modules
            and _key(names, config) in self.prepared
            and compiled_forward(region) not in self._without
            and not any(p.grad is not None or has_hooks(p) for _, p in edges)
            and all(map(self._expects_all, modules))
        )
        return modules if is_averaged else []

    def _expects_all(self, name: str) -> bool:
        ddp, participant = registry.ddp_of(name), participants[name]
        return (
            ddp is not None
            and getattr(ddp, EXPECTED)
            and not participant.kind
            and not participant.received
            and not participant.is_local
            and name not in self.left_to_compiled_autograd
        )

    def stays_local(self, modules: Iterable[str]) -> bool:
        """Whether a backward under ``no_sync`` needs no graph of its own: the one that was compiled
        with its forward gives this rank's gradients then.

        Args:
            modules: names of those that the backward reaches.
        """
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
                if participant.needs_replanning:
                    self.left_to_compiled_autograd.add(participant.module)
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
