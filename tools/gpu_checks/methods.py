"""Methods of training whose processes are alive, and what a comparison of them has found."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bench_steps.network import bits_per_s
from bench_steps.processes import RowFailed, RowProcesses
from gpu_checks.results import Row
from workloads.ways import AUTO, EAGER, OURS, PLAIN, WAYS

THEIRS: Final = (EAGER, "DDPOptimizer", "torch concat")
COMPARED: Final = (PLAIN, *THEIRS, *OURS, AUTO)
COMPARED_IF_SMALL: Final = (PLAIN, EAGER, "concat", AUTO)
ALONE: Final = "all-reduce alone"

TURN_S: Final = 40.0


@dataclass
class Method:
    """A method whose processes are alive.

    Attributes:
        name: in :data:`workloads.ways.WAYS`.
        processes: its ranks; ``None`` where it failed.
        seconds: of a step on the slower rank, by rate, one for each round.
        peak_bytes: of a step.
        error: of its gradients beside eager DDP's.
        wrong: what is wrong with it.
    """

    name: str
    processes: RowProcesses | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int | None = None
    error: float | None = None
    wrong: str = ""

    @property
    def counts(self) -> bool:
        """Whether what is wrong with it is a fault: what is wrong with torch's is not ours."""
        return self.name in (PLAIN, EAGER) or WAYS[self.name].is_ours

    def ask(self, command: str, *values: object, timeout_s: float = 0.0) -> list[Any] | None:
        """What its ranks answer within :data:`TURN_S`, unless given; ``None`` if it fails, or has
        failed before."""
        if self.processes is None:
            return None
        try:
            return self.processes.ask(command, *values, timeout_s=timeout_s or TURN_S)
        except RowFailed as error:
            self.fail(str(error))
            return None

    def fail(self, words: str) -> None:
        """End it."""
        self.wrong = self.wrong or words
        if self.processes:
            self.processes.kill()
            self.processes = None


@dataclass
class Comparison:
    """Methods on a model.

    Attributes:
        kind: of the model, for titles.
        methods: that are compared; the first two are what the others are compared with.
        rates: of the network.
        alone: seconds of an all-reduce of all gradients, by rate.
    """

    kind: str
    methods: list[Method]
    rates: tuple[str, ...]
    alone: dict[str, float] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """What there is so far."""
        for rate in sorted(self.rates, key=bits_per_s) if len(self.rates) > 1 else self.rates:
            case = f"{self.kind}, {rate.replace('gbit', ' Gbit/s')}"
            if rate in self.alone:
                figures = {"ms": 1000 * self.alone[rate]}
                yield Row(f"{case}: {ALONE}", figures=figures)
            for method in self.methods:
                if method.name != AUTO or rate == self.rates[0]:
                    yield self._row(case, method, rate)

    def _row(self, case: str, method: Method, rate: str) -> Row:
        plain, seconds = self.methods[0], method.seconds.get(rate, [])
        bases = plain.seconds.get(rate, [])
        ratios = sorted(one / base for one, base in zip(seconds, bases, strict=False))
        theirs = [
            statistics.median(other.seconds[rate])
            for other in self.methods
            if other.name in THEIRS and other.seconds.get(rate)
        ]
        own = statistics.median(seconds) if seconds else None
        peak, base = method.peak_bytes, plain.peak_bytes
        figures = {
            "ms": own and 1000 * own,
            "time over no DDP": statistics.median(ratios) if ratios else None,
            "least": ratios[0] if ratios else None,
            "most": ratios[-1] if ratios else None,
            "exposed ms": 1000 * (own - statistics.median(bases)) if own and bases else None,
            "over torch's fastest": own / min(theirs) if own and theirs else None,
            "peak over no DDP": peak / base if peak is not None and base else None,
            "gradients off by": method.error,
        }
        is_right = not method.counts or (bool(ratios) and not method.wrong)
        return Row(f"{case}: {method.name}", is_right, method.wrong, figures)
