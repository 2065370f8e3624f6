"""How the gradients of this process's backwards were reduced, and why in this way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from fusion_passes.reducer.backward import RunningBackward
from fusion_passes.reporting.records import BackwardReport, ReducedIn


@dataclass
class BackwardCounts:
    """Counts the backwards that averaged gradients, by how they did; calls ``after`` after each
    one."""

    after: Callable[[], None] | None = None
    _counts: Counter[tuple[tuple[str, ...], ReducedIn, str, int]] = field(default_factory=Counter)

    def note(self, run: RunningBackward, modules: Sequence[str], copied: int) -> None:
        """Note a backward that has ended and averaged the gradients of these modules; see
        :class:`BackwardReport`."""
        if run.is_traced:
            self._counts[tuple(modules), "compiled_autograd", "", 0] += 1
        else:
            self._counts[tuple(modules), "reducer", run.why_untraced, copied] += 1
        if self.after is not None:
            self.after()

    def reports(self) -> tuple[BackwardReport, ...]:
        """The reports, in the order in which the first backward of each kind ran."""
        return tuple(
            BackwardReport(modules, reduced_in, because, count, copied)
            for (modules, reduced_in, because, copied), count in self._counts.items()
        )


backward_counts: Final = BackwardCounts()
"""How many backwards were reduced in each way, and who is called after one."""
