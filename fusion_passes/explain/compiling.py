"""Says what a training waits for while torch compiles."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from fusion_passes.torch_private.profiling import on_compile


@contextlib.contextmanager
def saying_what_compiles(say: Callable[[str], None], every_s: float = 5.0) -> Iterator[None]:
    """A context in which a thread says every few seconds what is being compiled, if anything is.

    Args:
        say: called in that thread: ``"compiling graph 0/0 for 12 s"``.
        every_s: seconds between two calls.
    """
    state: list[tuple[str, float]] = []
    is_over = threading.Event()

    def begun(what: str) -> None:
        state[:] = [(what, time.monotonic())]

    def watch() -> None:
        while not is_over.wait(every_s):
            for what, since in state:
                say(f"compiling {what} for {time.monotonic() - since:.0f} s")

    undo = on_compile(begun, state.clear)
    thread = threading.Thread(target=watch, name="fusion_passes compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        undo()
        is_over.set()
        thread.join()
