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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.aot_obstacles import (
    ALL_SPARSE,
    HOOKS,
    OTHERS_USED,
    others_have_hooks,
)
from fusion_passes.ddp.autograd_graph import Ends
from fusion_passes.ddp.averaged import (
    Averaged,
    AveragedForward,
    AveragedModule,
    has_parts_beside_others,
)
from fusion_passes.ddp.by_hand import Job
from fusion_passes.ddp.expecting import EXPECTED, LOCAL
from fusion_passes.ddp.found_ends import FoundBackwards, FoundEnds
from fusion_passes.ddp.in_flight import in_flight
from fusion_passes.ddp.kept import adding_kept, obstacle_in_kept
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.outside import reducing_outside
from fusion_passes.ddp.own_flags import writing_own_flags
from fusion_passes.ddp.prepared import NOT_COMPILED, PreparedForwards, borrowing
from fusion_passes.ddp.turns import is_training_thread
from fusion_passes.ddp.unused import has_used_others
from fusion_passes.flag import active_config
from fusion_passes.reporting.warnings import warn_once
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.autograd import compiled_forward

_PARTS_BESIDE_OTHERS: Final = (
    "a module that may lack gradients has several compiled forwards, and another one shares its "
    "process group"
)
"""What a rank leaves out it sends by hand. When, among the launches of the other module, it cannot
know: the others launch it where its graph would be."""

_ANOTHER_THREAD: Final = (
    "A backward of a DDP module under ddp_fusion runs in another thread than the one that "
    "constructed it, or modules were constructed in several: compiled autograd traces it, anew in "
    "each process, so a start takes longer. Construct all modules in the thread that trains them."
)

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
    _found: FoundBackwards = field(default_factory=FoundBackwards)

    def forget(self) -> None:
        """The flag has changed: what is compiled now is compiled anew."""
        self.left_to_compiled_autograd.clear()

    def reset(self) -> None:
        vars(self).update(vars(AotBackwards()))

    def find_averaged(self, ends: Ends) -> Averaged:
        """What a backward averages by itself; nothing if there is a module that it reaches and
        must not.

        Args:
            ends: of the backward. It accumulates all gradients that it reaches, and keeps no graph.
        """
        config = active_config()
        if config is not None and config.backward_graph == "compiled_autograd":
            return Averaged(why_not="backward_graph is 'compiled_autograd'")
        if config is None or not is_training_thread():
            warn_once("another thread", _ANOTHER_THREAD)
            return Averaged(why_not="its thread has not constructed all modules")
        if not self.prepared:
            modules = [registry.module_of(ddp).group_name for ddp in registry.modules()]
            is_dense_somewhere = any(registry.module(name).dense for name in modules)
            why_not = NOT_COMPILED if is_dense_somewhere else ALL_SPARSE
            return Averaged(why_not=self._known_obstacle(modules) or why_not)
        found = self._found.of(ends, config, self.prepared)
        why_not = found.why_not
        if why_not:
            return Averaged(why_not=self._known_obstacle(found.obstructed) or why_not)
        regions = [region for region in ends.by_region if region is not None]
        regions = [regions[place] for place in found.places]
        forwards = tuple(
            AveragedForward(region, compiled_forward(region), item.parameters, lent)
            for region, item, lent in zip(regions, found.described, found.lent, strict=True)
        )
        why_not = self._why_not(forwards, found)
        return Averaged(why_not=why_not) if why_not else Averaged(found.averaged(), forwards)

    def _why_not(self, forwards: Iterable[AveragedForward], found: FoundEnds) -> str:
        """Why the backward of compiled forwards must not average modules; empty if it may."""
        if any(item.forward in self._without for item in forwards):
            return "its gradients are not what the compiled backward returns"
        parameters = found.parameters()
        if others_have_hooks(parameters):
            return HOOKS
        if has_parts_beside_others(found.described, found.modules):
            return _PARTS_BESIDE_OTHERS
        why_not = obstacle_in_kept(parameters)
        return why_not or next(filter(None, map(self._why_not_now, found.modules)), "")

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
        try:
            with contextlib.ExitStack() as stack:
                groups = {
                    item.participant.module: self._enter(stack, item, averaged)
                    for item in averaged.modules
                }
                lent = [(item.node, item.lent) for item in averaged.forwards]
                stack.enter_context(borrowing(lent, groups))
                yield
            self._learn(averaged)
        finally:
            for participant in averaged.participants:
                participant.is_averaged = False
                participant.announced.clear()

    def _enter(
        self, stack: contextlib.ExitStack, item: AveragedModule, averaged: Averaged
    ) -> dist.ProcessGroup:
        """Prepare for the backward of a module; the group that its name stands for meanwhile."""
        participant = item.participant
        ddp = registry.ddp_of(participant.module)
        assert ddp is not None, "its backward runs"
        module, is_in_flight = registry.module_of(ddp), averaged.is_in_flight
        adding = adding_kept(ddp, participant, item.kept, is_in_flight=is_in_flight)
        group = stack.enter_context(adding)
        if participant.usage is not None and averaged.borrows_names_for(participant.module):
            group = stack.enter_context(writing_own_flags(ddp, participant, group))
        if not is_in_flight or module.world_size == 1:  # Or autograd adds to what there is.
            return group
        group = stack.enter_context(in_flight(ddp, participant, group))
        job = Job(ddp, module, participant)
        stack.enter_context(reducing_outside(job, item.outside))
        return group

    def _learn(self, averaged: Averaged) -> None:
        """Note which forwards are left to compiled autograd from now on."""
        for participant in averaged.participants:
            ddp = registry.ddp_of(participant.module)
            if participant.needs_replanning and ddp is not None:
                self.left_to_compiled_autograd.add(ddp)
        for item in averaged.forwards:
            announced = (number in participants[name].announced for name, number in item.parameters)
            if not any(announced):
                self._without.add(item.forward)  # Its backward was compiled without reductions.


aot_backwards: Final = process_state.keep(
    AotBackwards(),
    "which compiled forwards have a backward that reduces gradients",
    Lifetime.PROCESS,
    reset=AotBackwards.reset,
)
