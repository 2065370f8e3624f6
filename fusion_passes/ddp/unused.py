"""Modules with ``find_unused_parameters=True``: what their graphs send beside the gradients that
they have, and what becomes of the parameters that a backward has not reached.

As with eager DDP, ``.grad`` of a parameter that some rank has used is the average on all of them, a
rank that has not used it counting as zero, or as the gradient that it has kept. One that no rank
has used keeps what it has, also ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.comm_hooks import sent_as
from fusion_passes.ddp.managed_module import ManagedModule
from fusion_passes.ddp.modules import registry
from fusion_passes.reductions.unused import Sent, SentBeside
from fusion_passes.torch_private.ddp import parameters_of

IN_PARTS: Final = (
    "it broke into several graphs, and with find_unused_parameters=True ranks have used a part of "
    "what one of them sends, or a communication hook takes all at once"
)

BESIDE_FOREIGN: Final = (
    "with find_unused_parameters=True, nothing is launched between collectives that are not DDP's, "
    "and its backward has some on the same process group"
)


def any_may_lack() -> bool:
    """Whether there is a module some of whose parameters may go without a gradient."""
    return any(participant.usage is not None for participant in list(participants.values()))


def beside(group_name: str, *, in_aot: bool) -> SentBeside | None:
    """What the graph of a module sends beside its gradients.

    Args:
        group_name: the module's.
        in_aot: whether the graph was made with the forward, when nobody knew which of the module's
            parameters a backward would reach.
    """
    ddp, participant = registry.ddp_of(group_name), participants.get(group_name)
    if ddp is None or participant is None or participant.usage is None:
        return None
    usage, module = participant.usage, registry.module_of(ddp)
    numbers = usage.sent_in(participant.kind) - {usage.flags}
    parameters = parameters_of(ddp)
    return SentBeside(
        usage.trained,
        _sent(ddp, module, usage.flags, flags_like(ddp, module)),
        None if in_aot else usage.reached,
        {number: _sent(ddp, module, number, parameters[number]) for number in sorted(numbers)},
    )


def flags_like(ddp: DistributedDataParallel, module: ManagedModule) -> Tensor:
    """A tensor as the flags of a module are sent."""
    device = parameters_of(ddp)[module.trained[0]].device
    return torch.empty(module.flag_count, dtype=module.flag_dtype, device=device)


def _sent(ddp: DistributedDataParallel, module: ManagedModule, number: int, value: Tensor) -> Sent:
    smaller = sent_as(ddp)
    is_cast = smaller is not None and value.dtype.itemsize > smaller.itemsize
    reduce_dtype = smaller if is_cast and value.is_floating_point() else None
    divisor = 1 if module.owner(number).calls_hook else module.world_size
    name, shape = module.name_for(number), tuple(value.shape)
    return Sent(name, shape, value.dtype, reduce_dtype or value.dtype, divisor)


def note_reach(leaves: Iterable[Tensor]) -> list[Participant]:
    """Note which parameters a backward reaches, for modules some of whose may go without.

    Args:
        leaves: the tensors in which it ends; none, where it accumulates no gradients.

    Returns:
        These modules, if it reaches any of their parameters.
    """
    lacking = [item for item in list(participants.values()) if item.usage is not None]
    if not lacking:
        return []
    ids = set(map(id, leaves))
    for participant in lacking:
        ddp = registry.ddp_of(participant.module)
        parameters = parameters_of(ddp) if ddp is not None else ()
        sparse = registry.module_of(ddp).sparse if ddp is not None else ()
        assert participant.usage is not None
        reached = frozenset(
            number
            for number, parameter in enumerate(parameters)
            if id(parameter) in ids and number not in sparse
        )
        participant.usage.begin_backward(reached)
    return [item for item in lacking if item.usage is not None and item.usage.reached]


def note_local_use(reached: Iterable[Participant]) -> None:
    """After a backward whose gradients have stayed on this rank, for some of these modules: the
    next one that is averaged sends what it has used, too, as in eager DDP."""
    for participant in reached:
        usage = participant.usage
        if usage is not None and not participant.received:
            usage.pending |= usage.reached.intersection(usage.trained)


def why_by_hand(reached: Sequence[Participant]) -> str:
    """Why some of those modules have gradients that no graph has reduced, though graphs give them;
    empty if they have none."""
    if beside_foreign(reached):
        return BESIDE_FOREIGN
    is_cut = any(item.usage is not None and item.usage.is_in_parts for item in reached)
    return IN_PARTS if is_cut else ""


def beside_foreign(reached: Iterable[Participant]) -> list[str]:
    """The names of those modules whose backward has collectives that are not DDP's."""
    return [item.module for item in reached if item.usage is not None and item.usage.has_foreign]


def often_in_parts(reached: Iterable[Participant]) -> list[str]:
    """The names of those modules for which that is so, and often."""
    return [
        item.module
        for item in reached
        if item.usage is not None and item.usage.is_often_in_parts(item.rounds)
    ]


def has_used_others(module: str) -> bool:
    """Whether backwards that have stayed on this rank have used parameters of a module which the
    one that runs does not reach, and the ranks must hear of it."""
    usage = participants[module].usage
    return usage is not None and not usage.pending <= usage.reached


def write_averages(participant: Participant, averages: Mapping[int, Tensor]) -> None:
    """Give parameters that this rank has not used the average of those that have.

    Args:
        participant: the module.
        averages: by the parameters' numbers, in the strides in which they were sent.
    """
    ddp, usage = registry.ddp_of(participant.module), participant.usage
    if ddp is None or usage is None or usage.used is None:
        return
    for number, average in averages.items():
        parameter = parameters_of(ddp)[number]
        if number not in usage.used:
            continue
        if parameter.grad is None:
            parameter.grad = average
        else:
            parameter.grad.detach().copy_(average)
