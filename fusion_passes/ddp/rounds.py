"""Which backwards are averaged: those that eager DDP averages.

There, a forward decides. One outside of ``no_sync`` makes DDP expect a gradient of each parameter,
and the next backwards that give them are averaged, wherever they run. What comes after that, such
as a second backward through the same forward, stays on its rank. What lies between such a forward
and the last gradient that it expects is a *round*. DDP's Python reducer asks instead where the
backward runs.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.participant import Participant
from fusion_passes.agreement.protocol import participants
from fusion_passes.agreement.sharing import end_sharing
from fusion_passes.ddp.disagreement import shared_errors
from fusion_passes.ddp.expecting import EXPECTED, LOCAL, ReducerOfManaged
from fusion_passes.ddp.failed_rounds import note_failed
from fusion_passes.ddp.late import reduce_late, reduce_without_inputs
from fusion_passes.ddp.launch_clock import launch_clock
from fusion_passes.ddp.modules import registry
from fusion_passes.ddp.unfinished import FORGOTTEN, NOT_ENDED, UNFINISHED, leave_error, unfinished
from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import clear_backward_cache
from fusion_passes.torch_private.autograd import after_backward
from fusion_passes.torch_private.calling_thread import marked_thread
from fusion_passes.torch_private.ddp import parameters_of

_Expected: TypeAlias = weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]]


def _forget(expected: _Expected) -> None:
    """Let modules that are still there train no further: no hook would average their gradients."""
    for ddp in expected:
        setattr(ddp, UNFINISHED, FORGOTTEN)
    expected.clear()


_parameters: Final = process_state.keep(
    _Expected(),
    "numbers of the parameters whose gradients a module expects: as in DDP, those that required "
    "one when it was constructed",
    Lifetime.MODULE,
    reset=_forget,
)


def watch(ddp: DistributedDataParallel) -> None:
    """From now on, decides for a module which of its backwards are averaged."""
    _parameters[ddp] = frozenset(
        n for n, parameter in enumerate(parameters_of(ddp)) if parameter.requires_grad
    )
    ddp.__dict__ |= {
        EXPECTED: False,
        LOCAL: False,
        UNFINISHED: None,
        "reducer": ReducerOfManaged(ddp),
    }


def is_announced(module: str, number: int) -> bool:
    """Whether a graph that averages the backward that runs has said that it reduces a gradient.

    Args:
        module: the DDP module's name for its group.
        number: the parameter's.
    """
    participant = participants.get(module)
    return participant is not None and number in participant.announced


def note_eager(module: str, number: int) -> None:
    """A hook has run eagerly: its gradient is reduced when the backward has ended.

    Args:
        module: the DDP module's name for its group.
        number: the parameter's.

    Raises:
        RuntimeError: the package was reset since the module was constructed.
    """
    participant = participants.get(module)
    if participant is None:
        raise RuntimeError(FORGOTTEN)
    if not participant.received and not participant.late:
        after_backward(_end_unless_running)
        if not _running:
            leave_error(registry.ddp_of(module), NOT_ENDED)
    participant.receive([number])
    participant.late[number] = False


def note_unannounced(names: Iterable[str]) -> set[str]:
    """Gradients may have been reduced in graphs that no pass has seen, and that say nothing when
    they run.

    Args:
        names: the group names of the reductions that were traced.

    Returns:
        The names of the DDP modules for which that is so.
    """
    found = set()
    for name in names:
        owner = registry.owner_of(name)
        if owner is None:
            continue
        participant = participants[owner.group_name]
        if owner.number not in participant.came:
            participant.receive([owner.number])
            found.add(owner.group_name)
            if owner.calls_hook:  # Nobody has called it.
                participant.late[owner.number] = False
    return found


_running: Final = process_state.keep(
    set[int](), "the threads that run a backward", Lifetime.CALL, reset=set.clear
)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Around a backward, until :func:`end_backward` or :func:`fail_backward`."""
    thread = threading.get_ident()
    _running.add(thread)
    try:
        with marked_thread():
            yield
    finally:
        _running.discard(thread)


def is_running() -> bool:
    """Whether a thread runs a backward. One that was left behind by a fork does not."""
    return not _running.isdisjoint(sys._current_frames())


def _end_unless_running() -> None:
    """At the end of a backward, still inside of it: the flag may have been unset since, with nobody
    else to end the round. Otherwise that is left to who runs it, since others wait for a backward
    to end, and this one must not wait for other ranks' collectives meanwhile."""
    if not _running:
        names = [participant.module for participant in _mine() if participant.received]
        for name in names:
            leave_error(registry.ddp_of(name), None)
        with shared_errors(lambda: names, owing, fail_backward):
            end_backward()


def _mine() -> list[Participant]:
    """The modules, but for those of other threads that are running."""
    others = _running - {threading.get_ident()}
    return [item for item in list(participants.values()) if item.thread not in others]


def end_backward() -> None:
    """After a backward: reduces what no graph has reduced, and ends rounds that are complete."""
    active = [participant for participant in _mine() if participant.received]
    if not active:
        return
    for participant in active:
        participant.is_sharing = _shares_use(participant)
    own_use = {participant.module: frozenset(participant.received) for participant in active}
    reduce_late(active)
    _end_sharing(active)
    for participant in active:
        participant.end_backward()
        _end_if_complete(participant, own_use[participant.module])
    _plan_anew(active)


def _end_sharing(modules: Iterable[Participant]) -> None:
    for name in {participant.process_group for participant in modules}:
        end_sharing(name)


def end_without_inputs(name: str) -> None:
    """In the place of a backward that this rank has no inputs for: takes part, with zeros, in what
    the others reduce for a module.

    Args:
        name: the module's for its group.

    Raises:
        RanksDisagreeError: as :func:`fusion_passes.ddp.late.reduce_without_inputs`.
    """
    participant = participants[name]
    reduce_without_inputs(participant)
    _end_sharing([participant])
    _end_round(participant)
    _plan_anew([participant])


def _plan_anew(participants: Sequence[Participant]) -> None:
    if any(participant.needs_replanning for participant in participants):
        for participant in participants:
            participant.needs_replanning = False
        clear_backward_cache()


@contextlib.contextmanager
def rejoining() -> Iterator[None]:
    """Around a backward: where it has given DDP no gradient, collectives that have stayed on this
    rank reach the others again."""
    try:
        yield
    finally:
        for participant in _mine():
            end_sharing(participant.process_group)
            if participant.is_local and not participant.received:
                registry.rejoin(participant.module)
                participant.is_local = False


def _shares_use(participant: Participant) -> bool:
    """Whether the ranks are to tell each other what they have used of a static graph. It may be
    something else on each, as in DDP: what some have used counts as zero on the others. A rank that
    has launched all gradients knows that from each launch."""
    ddp = registry.ddp_of(participant.module)
    if ddp is None or not ddp.static_graph or participant.kind or participant.used is not None:
        return False
    return bool(participant.late) or not _parameters[ddp] <= participant.received


def _end_if_complete(participant: Participant, own_use: frozenset[int]) -> None:
    """End a module's round that has all gradients; leave the next forward an error otherwise.

    Args:
        participant: the module.
        own_use: the parameters that this rank itself has given gradients, in this round.
    """
    ddp = registry.ddp_of(participant.module)
    if ddp is None:
        participant.fail_round()
        return
    missing = _parameters[ddp] - participant.received
    if ddp.static_graph and not participant.kind:
        # The promise of static_graph: the first iteration uses what all iterations do.
        participant.used = frozenset(participant.received)
        participant.own_use = participant.own_use or own_use
        missing = participant.own_use - own_use
    if participant.usage is not None or participant.kind:
        missing = frozenset()
    if not missing:
        _end_round(participant)
        setattr(ddp, EXPECTED, False)
    leave_error(ddp, unfinished(ddp, registry.module_of(ddp), missing) if missing else None)


def _end_round(participant: Participant) -> None:
    participant.end_round()
    if participant.rounds == participant.meets_at:
        launch_clock.meet_soon(participant)


def owing(reached: Iterable[str]) -> list[str]:
    """The modules among these whose gradients other ranks wait for."""
    modules = {name: registry.ddp_of(name) for name in reached}
    return [n for n, ddp in modules.items() if ddp is not None and getattr(ddp, EXPECTED)]


def fail_backward(failed: Iterable[str], is_broken: bool) -> None:
    """After a backward that has failed: rounds are forgotten, as if they had not begun.

    Args:
        failed: names of the modules whose rounds have failed with it.
        is_broken: whether a collective has failed.
    """
    for name in failed:
        participants[name].fail_round(is_broken=is_broken)
        note_failed(name)


def expect_again(reached: Iterable[str]) -> None:
    """Let the next backward be averaged though its forward has had one: it starts from another
    output. Averages may be averaged once more with what has come since: that is linear.

    Args:
        reached: names of the modules that the backward reaches.
    """
    for name in reached:
        ddp = registry.ddp_of(name)
        if ddp is not None and not getattr(ddp, EXPECTED) and not getattr(ddp, LOCAL):
            participants[name].kind = "extra"
            setattr(ddp, EXPECTED, True)


def is_waiting_for_none(names: Iterable[str]) -> bool:
    """Whether some of the modules have all gradients of their last forward."""
    modules = [ddp for name in names if (ddp := registry.ddp_of(name)) is not None]
    return any(not getattr(ddp, EXPECTED) and not getattr(ddp, LOCAL) for ddp in modules)
