"""Runs functions at the same time, each in its own thread."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def run_at_once(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions in threads with the caller's context variables, which include torch's options.

    Raises:
        Exception: the exception of one of the functions, after all threads have ended.
    """
    with ThreadPoolExecutor(len(functions)) as pool:
        running = [pool.submit(contextvars.copy_context().run, each) for each in functions]
    for future in running:
        future.result()
