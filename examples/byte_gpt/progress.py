"""Shows the progress of a training: a bar in a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import time
from typing import Final

from tqdm import tqdm

LOG_SECONDS: Final = 10.0
"""Seconds between two lines in a log."""


class Progress:
    """Shows steps when they end, with the loss and the tokens per second.

    Args:
        steps: total number of steps.
        step_tokens: tokens of all ranks in one step.
        is_shown: whether to show it on this rank.
    """

    def __init__(self, steps: int, step_tokens: int, is_shown: bool) -> None:
        self._all, self._step_tokens, self._is_shown = steps, step_tokens, is_shown
        self._is_log = not sys.stderr.isatty()
        self._steps = 0
        self._start = self._shown_at = time.perf_counter()
        self._bar = tqdm(
            total=steps,
            desc="compiling",
            unit="step",
            disable=self._is_log or not is_shown,
            # Without tqdm's own rate, which includes the time of compiling.
            bar_format="{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            mininterval=0.2,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, loss: float) -> None:
        """Count a step. The rate excludes the first step, in which everything compiles."""
        now = time.perf_counter()
        if self._steps == 0:
            self._start = now
            self._bar.set_description("training", refresh=False)
        rate = self._steps * self._step_tokens / (now - self._start) if self._steps else 0.0
        self._steps += 1
        said = f"loss {loss:.3f}" + (f", {rate:,.0f} tokens/s" if rate else "")
        self._bar.set_postfix_str(said, refresh=False)
        self._bar.update()
        self._log(f"step {self._steps} of {self._all}: {said}", self._steps == self._all)

    def _log(self, text: str, is_last: bool = False) -> None:
        now = time.perf_counter()
        if self._is_log and self._is_shown and (is_last or now - self._shown_at > LOG_SECONDS):
            self._shown_at = now
            print(text, file=sys.stderr, flush=True)
