"""Sends parameters from their owners to all ranks, and waits for them."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fusion_passes.layout.layout import ParameterNumber
from fusion_passes.reducer.backward import note_of_other_rank
from fusion_passes.reducer.communication import Wait, nothing
from fusion_passes.reducer.reducer import ParameterSends, Reducer
from fusion_passes.sharded.reduction import ReduceToOwners
from fusion_passes.torch_private.process_groups import (
    PARAMETERS,
    begin_exchange,
    begin_grouped_broadcasts,
)

_ALONE_BYTES: Final = 2**16
"""Least size of a parameter that is sent as it lies. Smaller ones of one owner are sent together,
which copies them, and needs fewer collectives."""

_GROUP_BYTES: Final = 25 * 2**20
"""Size from which a group of broadcasts over NCCL is launched, as DDP's buckets are: a forward can
begin before the last group has arrived."""


def begin_broadcasts(group: Any, tensors: Sequence[tuple[int, Tensor]], backend: str) -> list[Wait]:
    """Launch the broadcast of each tensor in place, from a rank. Return a function for each that
    waits for it."""
    if backend != "nccl":
        return [_begin_messages(group, owner, tensor) for owner, tensor in tensors]
    waits, together, nbytes = list[Wait](), list[tuple[int, Tensor]](), 0
    for index, (owner, tensor) in enumerate(tensors):
        together.append((owner, tensor))
        nbytes += tensor.nbytes
        if nbytes >= _GROUP_BYTES or index == len(tensors) - 1:
            wait = begin_grouped_broadcasts(group, together, tensor.device)
            waits += [wait] * len(together)
            together, nbytes = [], 0
    return waits


def _begin_messages(group: Any, owner: int, tensor: Tensor) -> Wait:
    rank = group.rank()
    if owner != rank:
        return begin_exchange(group, [], [(owner, tensor)], PARAMETERS)
    sent = [(other, tensor) for other in range(group.size()) if other != rank]
    return begin_exchange(group, sent, [], PARAMETERS)


def broadcast(group: Any, tensors: Sequence[tuple[int, Tensor]], backend: str) -> None:
    """Broadcast tensors in place, each from a rank, and wait for that."""
    for wait in begin_broadcasts(group, tensors, backend):
        wait()


# --- Parameters of a module ----------------------------------------------------------------------


@dataclass(eq=False)
class Message:
    """Parameters that their owner sends to all ranks together.

    Attributes:
        numbers: the parameters.
        owner: the rank that sends them.
        sent: what is sent, ``[number of elements]`` or of the shape of the only parameter.
        places: where the parameters lie on a rank that receives a copy, ``sent``.
        addresses: the address of each parameter.
        wait: waits until the message has been sent or received.
        times: when it and others were sent.
    """

    numbers: list[ParameterNumber]
    owner: int
    sent: Tensor
    places: list[Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    wait: Wait = nothing
    times: ParameterSends | None = None

    def finish(self) -> None:
        """Wait for the message, and copy what was received to the parameters."""
        self.wait()
        if self.places:
            parts = self.sent.split([place.numel() for place in self.places])
            pairs = zip(self.places, parts, strict=True)
            torch._foreach_copy_(self.places, [part.view(place.shape) for place, part in pairs])


def _messages(reducer: Reducer, numbers: Sequence[ParameterNumber]) -> list[Message]:
    """The messages that send these parameters, in the order of the parameters, on all ranks."""
    rank, kinds = reducer.module.group.rank(), reducer.parameters.kinds
    packs: dict[tuple[int, int, torch.dtype, torch.device], list[ParameterNumber]] = {}
    reals = dict[ParameterNumber, Tensor]()
    for number in numbers:
        parameter, owner = reducer.parameters.all[number].detach(), kinds[number].owner
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        reals[number] = real
        # Strides may differ between ranks, sizes cannot.
        alone = number if real.nbytes >= _ALONE_BYTES else -1
        packs.setdefault((alone, owner, real.dtype, real.device), []).append(number)
    messages = []
    for (alone, owner, dtype, device), together in packs.items():
        tensors = [reals[number] for number in together]
        numel = sum(tensor.numel() for tensor in tensors)
        if alone >= 0 and tensors[0].is_contiguous():
            messages.append(Message(together, owner, tensors[0]))
        elif numel and owner == rank:
            pack = torch.cat([tensor.reshape(-1) for tensor in tensors])
            messages.append(Message(together, owner, pack))
        elif numel:
            pack = torch.empty(numel, dtype=dtype, device=device)
            messages.append(Message(together, owner, pack, tensors))
    return messages


@dataclass
class _Pending:
    """The messages of a module that were not waited for, by the address of each parameter. A thread
    that trains another module may wait for them too, and a message is unpacked once."""

    by_address: dict[int, Message] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)


class OnTheWay:
    """The parameters that are on their way from their owners to all ranks, in this process."""

    def __init__(self) -> None:
        self._modules = weakref.WeakKeyDictionary[Reducer, _Pending]()

    def begin(
        self, reducer: Reducer, communication: ReduceToOwners, numbers: Sequence[ParameterNumber]
    ) -> None:
        """Begin to send parameters to all ranks. Ranks cannot know which parameters a step has
        changed, so all are sent."""
        parameters, messages = reducer.parameters.all, _messages(reducer, numbers)
        num_bytes = sum(message.sent.nbytes for message in messages)
        times = ParameterSends(num_bytes, time.perf_counter())
        with _quoting_others(reducer):
            sent = [(message.owner, message.sent) for message in messages]
            waits = begin_broadcasts(reducer.module.group, sent, communication.backend)
        others = [parameters[number] for number in communication.elsewhere.intersection(numbers)]
        if others:  # As the step of an optimizer, which autograd sees.
            torch.autograd.graph.increment_version(others)
        if reducer not in self._modules:
            self._modules[reducer] = _Pending()
            weakref.finalize(reducer, _finish_quietly, self._modules[reducer])
        pending = self._modules[reducer]
        with pending.lock:
            for message, wait in zip(messages, waits, strict=True):
                message.wait, message.times = wait, times
                message.addresses = [parameters[n].data_ptr() for n in message.numbers]
                pending.by_address.update(dict.fromkeys(message.addresses, message))

    def wait(
        self,
        parameters: Iterable[Tensor] | None = None,
        *,
        of: str | None = None,
        to_write: bool = True,
    ) -> None:
        """Wait for messages.

        Args:
            parameters: the parameters whose messages are waited for. ``None``: all.
            of: the module whose messages are waited for, by its
                :attr:`AveragedModule.name_in_graphs`. ``None``: any. Threads that train modules on
                groups of their own must not wait for each other: the other rank's threads may do so
                in another order.
            to_write: also wait for messages that this rank sends, whose parameters may be read
                meanwhile.

        Raises:
            RuntimeError: a message was not received; says why another rank failed, if it left a
                note.
        """
        modules = list(self._modules.items())  # Another thread may add one.
        modules = [each for each in modules if each[1].by_address]
        if not modules:
            return
        addresses = None if parameters is None else [each.data_ptr() for each in parameters]
        for reducer, pending in modules:
            known = pending.by_address
            wanted = list(known) if addresses is None else [a for a in addresses if a in known]
            if not wanted or of not in (None, reducer.module.name_in_graphs):
                continue
            with pending.lock:
                for message in dict.fromkeys(known[each] for each in wanted if each in known):
                    is_received = message.owner != reducer.module.group.rank()
                    if to_write or is_received:
                        _finish(reducer, pending, message, is_received=is_received)


def _finish(reducer: Reducer, pending: _Pending, message: Message, *, is_received: bool) -> None:
    begun = time.perf_counter()
    with _quoting_others(reducer):
        message.finish()
    for address in message.addresses:
        pending.by_address.pop(address, None)
    if message.times is not None and is_received:
        ended = time.perf_counter()
        message.times.waited_s += ended - begun
        message.times.took_s = ended - message.times.begun_s
        reducer.record.sends = message.times


def _finish_quietly(pending: _Pending) -> None:
    """Wait for what a module that is freed sends: other ranks may be waiting for it."""
    for message in dict.fromkeys(pending.by_address.values()):
        with contextlib.suppress(Exception):
            message.finish()


@contextlib.contextmanager
def _quoting_others(reducer: Reducer) -> Iterator[None]:
    """Leave a note to other ranks about an error, and raise what another rank has left a note
    about instead."""
    try:
        yield
    except Exception as error:
        said = note_of_other_rank([reducer], error)
        reducer.failures.leave(reducer.steps, f"{type(error).__name__}: {error}")
        if said is None:
            raise
        raise said from error


on_the_way: Final = OnTheWay()
"""The parameters that are on their way."""
