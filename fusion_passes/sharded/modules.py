"""The modules whose optimizers are divided by the ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Final, NoReturn

from fusion_passes.layout.layout import Kinds
from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.reducer.warnings import named, warn_once
from fusion_passes.sharded.reduction import ReduceToOwners


def shard(
    label: str, parameters: Parameters, communication: AllReduce
) -> tuple[Parameters, AllReduce]:
    """Give the parameters of a new module owners, and have its gradients sent to these. A module on
    one rank stays as it is.

    Raises:
        ValueError: the module has what is not implemented beside owners.
    """
    sparse = [parameters.names[n] for n, kind in parameters.kinds.items() if kind.is_sparse]
    if sparse:
        raise ValueError(
            f"FusionConfig.shard_optimizer of {label} needs gradients that are not sparse, "
            f"but {', '.join(sparse)} is of an embedding with sparse=True. Construct it with "
            "sparse=False, or set shard_optimizer = False."
        )
    if communication.group.size() == 1:
        return parameters, communication
    kinds = with_owners(parameters.kinds, communication.group.size())
    parameters = replace(parameters, kinds=kinds)
    return parameters, ReduceToOwners(communication, parameters)


def with_owners(kinds: Kinds, ranks: int) -> Kinds:
    """The kinds of all parameters with their owners: the largest parameters first, each to the rank
    that has the fewest bytes so far, and of several such ranks to the first one."""
    loads, owners = [0] * ranks, {}
    for number in sorted(kinds, key=lambda number: (-kinds[number].nbytes, number)):
        owner = owners[number] = min(range(ranks), key=loads.__getitem__)
        loads[owner] += kinds[number].nbytes
    return {number: replace(kind, owner=owners[number]) for number, kind in kinds.items()}


def sharded() -> Sequence[tuple[Reducer, ReduceToOwners]]:
    """The reducers of such modules, in the order of their construction."""
    pairs = ((reducer, reducer.queue.communication) for reducer in reducers.alive())
    return [(reducer, sends) for reducer, sends in pairs if isinstance(sends, ReduceToOwners)]


class _Thread(threading.local):
    """The state of a thread.

    Attributes:
        runs_backwards: whether it has run a backward that accumulates gradients.
    """

    runs_backwards: bool = False


thread: Final = _Thread()


def note_thread(communication: ReduceToOwners) -> None:
    """Note that this thread steps a module, and so trains it, if it runs backwards too."""
    communication.thread = threading.current_thread() if thread.runs_backwards else None


def _is_of_another_thread(reducer: Reducer, communication: ReduceToOwners) -> bool:
    """Whether another thread trains a module. Before its first step, a thread other than the main
    one takes that for granted: there are no averages yet."""
    this, other = threading.current_thread(), communication.thread
    if other is None:
        return reducer.steps == 0 and this is not threading.main_thread()
    return other is not this and other.is_alive()


def before_backward() -> None:
    """Prepare for a backward, which may accumulate gradients of such modules.

    Raises:
        RuntimeError: gradients that exist cannot be averaged as DDP would.
    """
    thread.runs_backwards = True
    for reducer, communication in sharded():
        if _is_of_another_thread(reducer, communication):
            continue  # It may be in a backward at this moment. That thread looks at it itself.
        refuse_after_failed_step(reducer, communication)
        received = () if reducer.iteration is None else reducer.iteration.received
        why = communication.note_averages(received, reducer.hooks)
        why = why or _why_not_owners(reducer, communication)
        if why:
            refuse(reducer, why)
        _warn_of_unheld(reducer, communication)


def refuse(reducer: Reducer, why: str) -> NoReturn:
    """Raise an error, and leave a note about it to the other ranks."""
    text = f"FusionConfig.shard_optimizer of {reducer.module.label}: {why}"
    reducer.failures.leave(reducer.steps, text)
    raise RuntimeError(text)


def refuse_after_failed_step(reducer: Reducer, communication: ReduceToOwners) -> None:
    """Raise an error if a step has begun, runs no longer, and has sent no parameters."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not communication.step:
        frame = frame.f_back if communication.step else None
    if communication.step and frame is None:  # Else a closure is running that the step has called.
        why = "an optimizer step has failed on this rank, so its parameters were not sent to others"
        refuse(reducer, f"{why}. Load a checkpoint of model and optimizer on all ranks.")


def _why_not_owners(reducer: Reducer, communication: ReduceToOwners) -> str:
    """Why parameters cannot have one owner, looked up once; empty if they can."""
    if communication.is_checked:
        return ""
    communication.is_checked = True
    mine = {id(parameter) for parameter in reducer.parameters.trained}
    for other in reducers.alive():
        if other is not reducer and not mine.isdisjoint(map(id, other.parameters.trained)):
            return (
                f"{other.module.label} has the same parameters, and gradients of one module would "
                "be added to averages of the other. Use one DistributedDataParallel for both, or "
                "set shard_optimizer = False."
            )
    return ""


def _warn_of_unheld(reducer: Reducer, communication: ReduceToOwners) -> None:
    """Warn of parameters whose gradients were averaged and cleared, and which no optimizer steps:
    what changes them by hand changes them on their owners alone."""
    if reducer.steps < 2 or len(communication.held) == len(reducer.parameters.numbers):
        return
    parameters, names = reducer.parameters.all, reducer.parameters.names
    unheld = [n for n in reducer.parameters.numbers if n not in communication.held]
    if all(parameters[n].grad is None for n in unheld):
        left = [repr(names[n]) for n in unheld if parameters[n].requires_grad]
        communication.held.update(unheld)
        if left:
            warn_once(
                f"unheld {reducer.queue.name}",
                f"No optimizer of torch.optim steps parameters of {reducer.queue.name} "
                f"({named(left)}). With FusionConfig.shard_optimizer, only the rank that "
                "owns a parameter has its gradient: code of yours that changes parameters must "
                "send them to all ranks. Step them by an optimizer, freeze them before "
                "DistributedDataParallel is constructed, or set shard_optimizer = False.",
            )
