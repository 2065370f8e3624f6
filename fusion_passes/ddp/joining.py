"""Training with uneven inputs (``join``): a rank that has run out of them takes part in what the
others reduce and broadcast, as in eager DDP, until all have.

DDP's own join hook does the rest: which ranks have inputs left, whether a step is averaged, and the
model of the last rank for all of them in the end.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.ddp.buffers import broadcast_buffers, sends_buffers
from fusion_passes.ddp.disagreement import shared_errors
from fusion_passes.ddp.failed_rounds import refuse_unfinished
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.rounds import end_without_inputs, fail_backward
from fusion_passes.ddp.unfinished import UNFINISHED
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private.ddp import common_rank, divides_by_initial_size, tell_joined
from fusion_passes.torch_private.stand_ins import AverageOfSome


@dataclass
class _Active:
    """How many ranks have inputs for this step.

    Attributes:
        work: the collective that counts them.
    """

    work: Any = None

    def count(self) -> float | None:
        """What gradients are divided by; ``None`` where nobody has counted."""
        if self.work is None:
            return None
        (number,) = self.work.get_future().wait()
        return float(number.item())


_active: Final = process_state.keep(
    weakref.WeakKeyDictionary[DistributedDataParallel, _Active](),
    "of modules whose gradients are divided by the number of ranks with inputs: how many these are",
    Lifetime.MODULE,
    reset=weakref.WeakKeyDictionary.clear,
)


def _divide_as_asked(ddp: DistributedDataParallel) -> None:
    """Divide a module's gradients as ``join`` was asked to: by the number of all ranks, or of those
    that have inputs for the step. A communication hook divides as it likes."""
    if registry.module_of(ddp).calls_hook:
        return
    if divides_by_initial_size(ddp):
        if _active.pop(ddp, None) is not None:
            registry.set_stand_in(ddp, None)
    elif ddp not in _active:
        active = _active[ddp] = _Active()
        registry.set_stand_in(ddp, functools.partial(AverageOfSome, count=active.count))


def begin_step(ddp: DistributedDataParallel) -> None:
    """Before a forward, tell ranks without inputs that this one has some, and what comes.

    Raises:
        RuntimeError: a rank has run out of inputs, and that was to be an error.
    """
    _divide_as_asked(ddp)
    work: dist.Work | None = Join.notify_join_context(ddp)
    active = _active.get(ddp)
    if active is not None:
        active.work = work
    if sends_buffers(ddp):
        broadcast_buffers(ddp, common_rank(ddp, is_candidate=True))
    tell_joined(ddp)


def get_buffers(ddp: DistributedDataParallel) -> None:
    """On a rank without inputs: what the others do for the buffers before their forward."""
    if getattr(ddp, UNFINISHED) is not None:
        refuse_unfinished(ddp)
    if sends_buffers(ddp):
        broadcast_buffers(ddp, common_rank(ddp, is_candidate=False))


def reduce_zeros(ddp: DistributedDataParallel) -> None:
    """On a rank without inputs: what the others do in their backward.

    Raises:
        RanksDisagreeError: the ranks run different collectives, or another rank has failed.
    """
    name = registry.module_of(ddp).group_name
    with shared_errors(lambda: [name], list, fail_backward):
        end_without_inputs(name)
