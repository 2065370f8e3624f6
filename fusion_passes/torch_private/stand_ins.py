"""Process groups that stand for another one under a name, and do its all-reduces otherwise: how a
communication hook takes the place of a collective in a compiled graph. Checked on torch 2.11.0,
2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

# What a process group gives back for a collective; it has no public name.
from torch._C._distributed_c10d import Work

# What a name stands for now.
from torch.distributed.distributed_c10d import _resolve_process_group

from fusion_passes.torch_private import (
    ProcessGroup,
    register_process_group,
    resolve_process_group,
    unregister_process_group,
)

Launch: TypeAlias = Callable[[Sequence[Tensor]], Callable[[], None] | None]
"""Starts what becomes of some tensors, and returns what waits for it: when that has returned, the
tensors hold the results. ``None`` if they are to be reduced as they are."""


class StandInGroup(dist.ProcessGroup):
    """A process group in the place of another one. Operators find a group by its name: where one of
    the group's names stands for this object, what is launched under that name comes here.

    What is no all-reduce (a forward broadcasts buffers under the same name) is done by the group.

    Args:
        group: for which it stands; ``named_group`` afterwards.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.named_group: ProcessGroup = (
            group.named_group if isinstance(group, StandInGroup) else group
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        return self.named_group.broadcast(tensors, opts)


MakeStandIn: TypeAlias = Callable[[ProcessGroup], StandInGroup]
"""Makes a group that stands for another one."""


class HookedGroup(StandInGroup):
    """A process group whose all-reduces are calls of a function.

    Args:
        group: for which it stands.
        launch: is given the tensors of each all-reduce, whatever its operation; the group does
            those that it leaves alone.
    """

    def __init__(self, group: ProcessGroup, launch: Launch) -> None:
        super().__init__(group)
        self._launch = launch

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        wait = self._launch(tensors)
        return _Launched(wait) if wait else self.named_group.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        wait = self._launch(tensors)
        return _Launched(wait) if wait else self.named_group.allreduce_coalesced(tensors, opts)


class PreparingGroup(StandInGroup):
    """A process group whose all-reduces begin with a call of a function, which may change the
    tensors.

    Args:
        group: does what follows; may be a stand-in itself.
        prepare: is given the tensors of each all-reduce.
    """

    def __init__(self, group: ProcessGroup, prepare: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__(group)
        self._group, self._prepare = group, prepare

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        self._prepare(tensors)
        return self._group.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        self._prepare(tensors)
        return self._group.allreduce_coalesced(tensors, opts)


class PostponingGroup(StandInGroup):
    """A process group whose all-reduces are waited for by somebody else than who launches them: for
    that one, a wait returns at once.

    Args:
        group: does them; may be a stand-in itself.
        note: is given the tensors of each all-reduce, and what waits for it.
    """

    def __init__(
        self, group: ProcessGroup, note: Callable[[Sequence[Tensor], Callable[[], None]], None]
    ) -> None:
        super().__init__(group)
        self._group, self._note = group, note

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        aliases = _aliases(tensors)
        return self._noted(aliases, self._group.allreduce(aliases, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        aliases = _aliases(tensors)
        return self._noted(aliases, self._group.allreduce_coalesced(aliases, opts))

    def _noted(self, tensors: Sequence[Tensor], work: Work) -> Work:
        self._note(tensors, lambda: _wait_for(work))
        return _Launched(lambda: None)


def _aliases(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Other tensors of the same memory. Autograd copies a gradient that somebody else has, too,
    such as a work that goes on; it does not look at the memory."""
    return [tensor.detach() for tensor in tensors]


def _wait_for(work: Work) -> None:
    work.wait()


class AverageOfSome(StandInGroup):
    """A process group that makes averages over all ranks those over some of them: the others have
    given zeros.

    Args:
        group: for which it stands.
        count: says how many ranks count, ``None`` where all do; is asked for each all-reduce when
            that is waited for.
    """

    def __init__(self, group: ProcessGroup, count: Callable[[], float | None]) -> None:
        super().__init__(group)
        self._count = count

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:  # type: ignore[override]
        return self._scaled(self.named_group.allreduce(tensors, opts), tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self._scaled(self.named_group.allreduce_coalesced(tensors, opts), tensors)

    def divisor(self) -> float:
        """How many ranks count."""
        count = self._count()
        return self.size() if count is None else count

    def _scaled(self, work: Work, tensors: list[Tensor]) -> Work:
        def wait() -> None:
            work.wait()
            divisor = self.divisor()
            if divisor != self.size():
                torch._foreach_mul_(tensors, self.size() / divisor)

        return _Launched(wait)


class _Launched(Work):
    """What was launched, and can be waited for: the first time does it."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait: Callable[[], None] | None = wait

    def wait(self, *_: Any) -> bool:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return True


def called_by(name: str) -> ProcessGroup:
    """What graphs call by a name: the group that it stands for, or what does that one's work."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def redirect(name: str, group: ProcessGroup | None) -> None:
    """Let a name stand for a group, whatever it stood for; for none, if there is no group."""
    try:
        resolve_process_group(name)
    except RuntimeError:
        pass
    else:
        unregister_process_group(name)
    if group is not None:
        register_process_group(name, group)
