"""Gradients that there are already when a backward is averaged by the graph that was compiled with
its forward: what was accumulated before, or zeros.

Eager DDP averages the sum of what there is and what comes. The graph only knows what comes. So
while it runs, its module's name stands for a group whose all-reduce first adds what there is to the
bucket. ``.grad`` is taken away for as long, or the average would be added to it once more, and is
given the average when all gradients have come: the same tensor as before, as with eager DDP.

A rank does this on its own: the others only see the collectives that they expect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.pieces import LaunchedPieces
from fusion_passes.ddp.standing_in import standing_in
from fusion_passes.plan.layout import as_it_lies
from fusion_passes.reductions.hook_pattern import is_dense
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import disable_dynamo
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.stand_ins import PreparingGroup, called_by


def obstacle_in_kept(parameters: Iterable[nn.Parameter]) -> str:
    """Why the gradients that these parameters have already cannot be added to what a graph sends;
    empty if they can, or there are none."""
    kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    can_be_added = all(_can_be_added(*pair) for pair in kept)
    # Two of them may be one tensor. What is no strided tensor may have no address.
    places = [gradient.data_ptr() for _, gradient in kept if can_be_added and gradient.numel()]
    if can_be_added and len(set(places)) == len(places):
        return ""
    return "there are gradients already that differ in kind from what comes"


def _can_be_added(parameter: nn.Parameter, gradient: Tensor) -> bool:
    """Whether a gradient can be added to another one where it lies, and then be overwritten."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and (gradient.dtype, gradient.device) == (parameter.dtype, parameter.device)
        and not (gradient.requires_grad or gradient.is_inference() or gradient.is_neg())
        and is_dense(gradient)
    )


@dataclass
class KeptGradients:
    """The gradients of a module that there are already in a backward.

    Attributes:
        pieces: reads what the module launches.
        kept: what ``.grad`` of some of them is, by their numbers.
        added: the numbers of those that have been added to what is sent.
        away: those of them that ``.grad`` is not at present.
        coming: those of these whose average has yet to come.
        is_in_flight: whether what comes is no average before the backward has ended
            (:mod:`fusion_passes.ddp.in_flight`).
    """

    pieces: LaunchedPieces
    kept: Mapping[int, Tensor]
    is_in_flight: bool = False
    added: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)

    @disable_dynamo
    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add what there is to what is about to be reduced, and take ``.grad`` away.

        Args:
            tensors: the next bucket, or its gradients one by one.
        """
        found = [
            (number, piece, as_it_lies(self.kept[number], self.module.strides_of(number)))
            for number, piece in self.pieces.of(tensors)
            if number in self.kept
        ]
        if not found:
            return
        with torch.no_grad():
            pieces = [piece for _, piece, _ in found]
            torch._foreach_add_(pieces, [kept.reshape(-1) for _, _, kept in found])
        for number, _, _ in found:
            self.added.add(number)
            self.away.add(number)
            self.parameters[number].grad = None
        self.coming = set(self.away)

    @property
    def module(self) -> ManagedModule:
        return self.pieces.module

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self.pieces.parameters

    def arrived(self, number: int) -> None:
        """Note that a parameter has got its average; when all have, ``.grad`` is as it was, with
        the averages in it."""
        if number in self.coming:
            self.coming.discard(number)
            if not self.coming and not self.is_in_flight:
                self.give_back()

    def give_back(self, *, has_averages: bool = True) -> None:
        """Let ``.grad`` be the tensors again that it was, with the averages of what has come.

        Args:
            has_averages: whether what has come is averages; it is dropped otherwise.
        """
        back, averages = [], []
        for number in sorted(self.away):
            kept, average = self.kept[number], self.parameters[number].grad
            if has_averages and average is not None:
                back.append(kept)
                averages.append(average)
            self.parameters[number].grad = kept
        if back:
            with torch.no_grad():
                torch._foreach_copy_(back, averages)
        self.away.clear()
        self.coming.clear()

    def check(self) -> None:
        """Raise if an average has been added to what there was.

        Raises:
            RuntimeError: the graph has reduced gradients under another name.
        """
        participant = self.pieces.participant
        reduced = participant.announced.intersection(self.kept)
        missing = {n for n in reduced - self.added if self.parameters[n].numel()}
        if missing and not participant.is_local:
            names = ", ".join(self.module.parameters[number] for number in sorted(missing))
            raise RuntimeError(
                f"A backward of {self.module.label} has reduced the gradients of {names} without "
                "those that there were already. This is a bug of fusion_passes, please report it. "
                "FusionConfig(backward_graph='compiled_autograd') is another way to reduce them."
            )


kept_gradients: Final = process_state.keep(
    dict[str, KeptGradients](),
    "the gradients that there are already in the backward that runs, by module",
    Lifetime.CALL,
    reset=dict.clear,
)


def note_arrived(module: str, number: int) -> None:
    """Note that a parameter has got a gradient in the backward that runs.

    Args:
        module: the DDP module's name for its group.
        number: the parameter's.
    """
    found = kept_gradients.get(module)
    if found is not None:
        found.arrived(number)


def give_back_kept(module: str, *, has_averages: bool) -> None:
    """As :meth:`KeptGradients.give_back`, of a module, by its name for its group, if there are
    some."""
    found = kept_gradients.get(module)
    if found is not None:
        found.give_back(has_averages=has_averages)


@contextlib.contextmanager
def adding_kept(
    ddp: DistributedDataParallel,
    participant: Participant,
    kept: Mapping[int, Tensor],
    *,
    is_in_flight: bool = False,
) -> Iterator[dist.ProcessGroup]:
    """Around a backward that a graph averages: what it reduces for the module is added to the
    gradients that there are already. Gives the group that the module's name stands for meanwhile.

    Args:
        ddp: the module.
        participant: the same.
        kept: by the parameters' numbers.
        is_in_flight: whether what is sent is no average before the backward has ended.
    """
    module, group = registry.module_of(ddp), called_by(participant.module)
    if not kept:
        yield group
        return
    pieces = LaunchedPieces(participant, module, parameters_of(ddp))
    mine = KeptGradients(pieces, kept, is_in_flight)
    kept_gradients[module.group_name] = mine
    try:
        with standing_in(participant, PreparingGroup(group, mine.add), group) as adding:
            yield adding
            mine.check()
    finally:
        del kept_gradients[module.group_name]
        mine.give_back()
