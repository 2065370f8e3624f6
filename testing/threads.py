"""Runs functions at once, each in a thread of its own."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence


def run_at_once(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions in threads that see the caller's context variables, torch's options among them.

    Raises:
        Exception: what one of them has raised, once all have ended.
    """
    failed: list[Exception] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, function))
        for function in functions
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
