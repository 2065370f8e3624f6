"""Backwards of several threads take turns with compiled autograd, which is one for the process.

While it is on, every backward of the process would be traced, and torch refuses a second trace; it
cannot be switched on or off while another thread is in an untraced backward. No thread may wait
for another's collectives either: two ranks that begin with different threads would wait for each
other. So one thread at a time is traced, and others run untraced meanwhile, in the phases in which
compiled autograd is off. Managed modules reduce their gradients when such a backward has ended, so
they wait in none for another rank. Compilers switch it off, and back to what it was, so nothing is
compiled by others while it is on.

A backward that is averaged by the graph of its forward waits for other ranks, too. Only those of
one thread are, so that it waits for none but the same thread of other ranks: that which alone has
constructed managed modules, else the main thread. While it runs, no other thread is traced or runs
a backward: instances of a class share a compiled forward, and the graph of its backward has the
group names of one of them. If another thread's backward runs already, it is not averaged so.

A module with DDP's own reducer does wait in its backward for other ranks, as in eager DDP. That
ends while each rank's other threads run or compile. If a rank has failed there, the others wait for
it as they would with eager DDP.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from fusion_passes.state import Lifetime, process_state
from fusion_passes.torch_private import compile_lock

_constructing: Final = process_state.keep(
    weakref.WeakSet[threading.Thread](),
    "the threads that have begun to construct managed modules",
    Lifetime.PROCESS,
    reset=weakref.WeakSet.clear,
)


def note_construction() -> None:
    """Note that this thread constructs a managed module, before that waits for the other ranks: a
    module that there is on one rank has its thread noted on all."""
    _constructing.add(threading.current_thread())


def is_training_thread() -> bool:
    """Whether this is the thread whose backwards may wait for other ranks in their graphs."""
    there = [thread for thread in list(_constructing) if thread.is_alive()]
    only = there[0] if len(there) == 1 else threading.main_thread()
    return threading.current_thread() is only


@dataclass
class Turns:
    """Whose turn it is.

    Attributes:
        is_tracing: whether a thread runs a traced backward.
    """

    is_tracing: bool = False
    _thread: int = 0
    _is_on: bool = False
    _holds_lock: bool = False
    _untraced: int = 0
    _averaging: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def is_mine(self) -> bool:
        """Whether it is this thread that runs a traced backward."""
        return self.is_tracing and self._thread == threading.get_ident()

    @contextlib.contextmanager
    def traced(self) -> Iterator[bool]:
        """Around a backward that is to be traced; gives whether it may be."""
        with self._changed:
            may = not self.is_tracing and not self._averaging
            if may:
                self.is_tracing, self._thread = True, threading.get_ident()
        try:
            if may:
                self._switch_on()
            yield may
        finally:
            if may:
                with self._changed:
                    self.is_tracing = False
                    self._switch_off()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[bool]:
        """Around a backward that is to be averaged by the graph that was compiled with its forward;
        gives whether it may be."""
        with self._changed:
            may = not self.is_tracing and not self._untraced
            if may:
                self._averaging = threading.get_ident()
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._averaging = 0
                    self._changed.notify_all()

    @contextlib.contextmanager
    def executing(self) -> Iterator[None]:
        """Around the run of a compiled graph in a traced backward: compiled autograd is off."""
        if not self.is_mine:
            yield
            return
        with self._changed:
            self._switch_off()
        try:
            yield
        finally:
            self._switch_on()

    @contextlib.contextmanager
    def untraced(self) -> Iterator[None]:
        """Around a backward that is not traced."""
        with self._changed:
            mine = (0, threading.get_ident())
            self._changed.wait_for(lambda: not self._is_on and self._averaging in mine)
            self._untraced += 1
        try:
            yield
        finally:
            with self._changed:
                self._untraced -= 1
                self._changed.notify_all()

    def _switch_on(self) -> None:
        """Wait for untraced backwards to end. An interrupt meanwhile leaves it half on, for
        :meth:`_switch_off`."""
        with self._changed:
            self._is_on = True  # Nobody new begins, and those that have begun end by themselves.
            self._changed.wait_for(lambda: not self._untraced)
        self._holds_lock = compile_lock().acquire()

    def _switch_off(self) -> None:
        self._is_on = False
        if self._holds_lock:
            self._holds_lock = False
            compile_lock().release()
        self._changed.notify_all()
