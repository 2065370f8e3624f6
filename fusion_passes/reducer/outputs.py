"""Which outputs of a module's forwards were differentiated. With several backwards, this tells
whether another one is averaged, and whether eager DDP would refuse it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion_passes.torch_private.autograd import sequence_number


@dataclass
class _Forward:
    """The outputs of one forward.

    Attributes:
        numbers: the sequence numbers of their autograd nodes, which are unique in a thread.
        thread: the thread of the forward.
        is_spent: whether a backward without ``retain_graph`` reached one of them.
    """

    numbers: frozenset[int]
    thread: int
    is_spent: bool = False


class ForwardOutputs:
    """The outputs of one module's last forwards.

    Attributes:
        entered: the output indices by which compiled forwards were differentiated with
            ``retain_graph=True`` since the last forward, by autograd node.
    """

    def __init__(self) -> None:
        self.entered: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self._forwards: list[_Forward] = []

    def enter(self, entries: Mapping[Any, Collection[int]]) -> None:
        """Record the output indices by which a backward with ``retain_graph=True`` differentiates
        compiled forwards, by autograd node."""
        for node, numbers in entries.items():
            self.entered.setdefault(node, set()).update(numbers)

    def are_others(self, entries: Mapping[Any, Collection[int]]) -> bool:
        """Whether a backward (``entries`` as for :meth:`enter`) differentiates the same compiled
        forwards as an earlier one, but only by other outputs.

        Eager DDP has not received the gradients of these outputs yet. The earlier backward of the
        compiled forward gave zeros for them, so averaging ``.grad`` once more gives the right
        result."""
        for node, outputs in entries.items():
            known = self.entered.get(node)
            if known is None or not known.isdisjoint(outputs):
                return False
        return bool(entries)

    def note(self, nodes: Iterable[Any]) -> None:
        """Record the autograd nodes of the outputs of a forward; only with
        ``find_unused_parameters=True``."""
        if self.has_spent:
            self._forwards.clear()
        numbers = frozenset(map(sequence_number, nodes))
        self._forwards.append(_Forward(numbers, threading.get_ident()))

    @property
    def has_spent(self) -> bool:
        """Whether a backward without ``retain_graph`` reached outputs of the last forward."""
        return any(outputs.is_spent for outputs in self._forwards)

    def spend(self, nodes: Iterable[Any], *, keeps_graph: bool) -> bool:
        """Record that a backward reaches these nodes. Return whether it reaches outputs that an
        earlier backward without ``retain_graph`` reached, which eager DDP refuses: there, all
        outputs of a forward share one autograd node, so that the first backward reaches, and frees,
        the graph of all outputs."""
        if not self._forwards:
            return False
        thread, numbers = threading.get_ident(), set(map(sequence_number, nodes))
        for outputs in self._forwards:
            if outputs.thread != thread or outputs.numbers.isdisjoint(numbers):
                continue
            if outputs.is_spent:
                return True
            outputs.is_spent = not keeps_graph
        return False
