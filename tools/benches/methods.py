"""Methods of training whose processes take turns in rounds, and their measurements."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benches.network import UNSHAPED, words_of
from benches.processes import Checked, Place, RankProcesses, RanksFailed, Started, Stepped
from benches.results import Row
from fusion_passes.tuning.choice import MOST_STEPS
from fusion_passes.tuning.tuner import WARM_UP
from workloads.ways import PLAIN, WAYS, Way

ALONE: Final = "all-reduce alone"
WARM_UP_STEPS: Final = 3
MAX_STEPS: Final = 50

MEASURING_STEPS: Final = WARM_UP + MOST_STEPS
"""Number of steps after which a method has chosen its buckets, if it compares some."""


@dataclass
class Method:
    """A method of training, and its processes while they are alive.

    Attributes:
        name: name in :data:`workloads.ways.WAYS`.
        cap_mb: size of a bucket in MiB; ``None``: the method's default.
        answer_s: time limit for an answer of its ranks, in seconds.
        processes: its ranks; ``None`` if it failed or has not started.
        planned_for: rate at which it compared buckets; empty if it compares none.
        seconds: seconds per step on the slowest rank, by rate, one value per round.
        cpu_s: CPU seconds per step of all ranks together, by rate, one value per round.
        first_s: seconds of the first averaged step of a process without compiling, by rate, one
            value per process.
        start_cpu_s: CPU seconds of a cold start, of all ranks together, then of each warm start.
        plans: its buckets and the reason for them, by rate; empty if it compares none.
        peak_bytes: peak memory of a step beyond parameters, including the buckets of DDP's reducer.
        state_bytes: bytes of the optimizer's state, on the rank that has most of it.
        error: largest difference of its gradients from eager DDP's, divided by the largest element.
        wrong: why it failed, or what is wrong with its gradients.
    """

    name: str
    cap_mb: float | None = None
    answer_s: float = 180.0
    processes: RankProcesses | None = None
    planned_for: str = ""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    start_cpu_s: list[float] = field(default_factory=list)
    plans: dict[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None
    state_bytes: int | None = None
    error: float | None = None
    wrong: str = ""

    @property
    def label(self) -> str:
        """``concat, 5 MB``."""
        return self.name if self.cap_mb is None else f"{self.name}, {self.cap_mb:g} MB"

    @property
    def way(self) -> Way:
        return WAYS[self.name]

    def launch(self, place: Place, timeout_s: float) -> None:
        """Start its processes, and build its model."""
        try:
            self.processes = RankProcesses(self.name, place, self.cap_mb)
        except RanksFailed as error:
            self.fail(str(error))
        else:
            self.ask("build", timeout_s=timeout_s)

    def start(
        self, place: Place, timeout_s: float, *, averages: bool = True
    ) -> list[Started] | None:
        """Start its processes, and run the first step, whose gradients are averaged or not. The
        time limit applies to the model, to its wrapping, and to the step, each."""
        self.launch(place, timeout_s)
        self.ask("wrap", timeout_s=timeout_s)
        return self.ask("start", averages, timeout_s=timeout_s)

    def ask(self, command: str, *values: object, timeout_s: float = 0.0) -> list[Any] | None:
        """The answers of its ranks within ``answer_s`` unless another limit is given; ``None`` if
        it fails, or failed before."""
        if self.processes is None:
            return None
        try:
            return self.processes.ask(command, *values, timeout_s=timeout_s or self.answer_s)
        except RanksFailed as error:
            self.fail(str(error))
            return None

    def fail(self, words: str) -> None:
        """Record why it cannot continue, and kill its processes."""
        self.wrong = self.wrong or words
        self.kill()

    def kill(self) -> None:
        """Kill its processes."""
        if self.processes:
            self.processes.kill()
            self.processes = None

    def check(self, reference: str, tolerance: float, *, writes: bool) -> None:
        """Compare its gradients with the reference's in a file, which the reference itself writes,
        and measure its peak memory."""
        if self.way.has_ddp:
            self.judge(self.ask("check", reference, writes), tolerance)
        peaks = self.ask("peak")
        self.peak_bytes = max(peaks) if peaks else None
        states = self.ask("state")
        self.state_bytes = max(states) if states else None

    def judge(self, answers: Sequence[Checked] | None, tolerance: float) -> None:
        """Record errors of its gradients."""
        if answers is None:
            return
        worst = max(answers, key=lambda one: one.error)
        self.error = worst.error
        found = (one.in_words(tolerance) for one in answers)
        self.wrong = next(filter(None, found), self.wrong)

    def over(self, other: Method, rate: str) -> list[float]:
        """Ratios of its step times to another method's in the same rounds."""
        return ratios(self.seconds.get(rate, ()), other.seconds.get(rate, ()))


@dataclass
class Comparison:
    """Methods on a model.

    Attributes:
        model: name of the model, for titles.
        methods: the methods to compare; the first has no DDP, the second is the reference.
        rates: rates of the network, or :data:`benches.network.UNSHAPED`.
        gradient_bytes: total size of the gradients.
        alone: seconds of an all-reduce of all gradients, by rate, one value per round.
        alone_cpu_s: CPU seconds of that all-reduce, of all ranks together, by rate, one value per
            round.
    """

    model: str
    methods: list[Method]
    rates: tuple[str, ...] = (UNSHAPED,)
    gradient_bytes: int = 0
    alone: dict[str, list[float]] = field(default_factory=dict)
    alone_cpu_s: dict[str, list[float]] = field(default_factory=dict)

    def measure(
        self,
        rate: str,
        *,
        rounds: int,
        round_s: float,
        deadline: float = math.inf,
        on_round: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Measure all methods in turns at a rate. A first round warms up, and determines how many
        steps fit in a turn.

        Args:
            rate: the network's current rate. A method that planned for another rate is left out.
            rounds: number of rounds.
            round_s: approximate length of a turn, in seconds; at least two steps.
            deadline: time of ``time.monotonic`` at which to stop.
            on_round: called with the round's number after each round.
        """
        counts: dict[str, int] = {}
        for number in range(rounds + 1):
            for method in self.methods:
                if time.monotonic() > deadline:
                    return
                if method.planned_for not in ("", rate):
                    continue
                count = counts.get(method.label, WARM_UP_STEPS)
                stepped: list[Stepped] | None = method.ask("steps", count)
                if stepped is None:
                    continue
                seconds = _slowest(stepped)
                counts[method.label] = min(MAX_STEPS, max(2, math.ceil(round_s / seconds)))
                if number:
                    method.seconds.setdefault(rate, []).append(seconds)
                    cpu_s = sum(one.cpu_s for one in stepped) / count
                    method.cpu_s.setdefault(rate, []).append(cpu_s)
            alone: list[Stepped] | None = None
            if number and self.gradient_bytes:
                alone = self.methods[0].ask("reduce", self.gradient_bytes, 1)
            if alone:
                self.alone.setdefault(rate, []).append(_slowest(alone))
                self.alone_cpu_s.setdefault(rate, []).append(sum(one.cpu_s for one in alone))
            on_round(number)

    def measure_firsts(self, rate: str, place: Place, timeout_s: float, count: int) -> None:
        """Measure the first averaged step of ``count`` new processes, one after the other, of each
        method that runs the same compiled code with and without ``no_sync``."""
        for _ in range(count):
            for method in self.methods:
                if not method.way.compiles_the_same or method.cap_mb is not None:
                    continue
                one = Method(method.name, answer_s=method.answer_s)
                one.start(place, timeout_s, averages=False)
                seconds = one.ask("first_average")
                one.kill()
                if seconds is None:
                    method.fail(f"its first averaged step: {one.wrong}")
                else:
                    method.first_s.setdefault(rate, []).append(max(seconds))

    def measure_starts(self, place: Place, timeout_s: float, count: int) -> None:
        """Measure the CPU seconds of a cold start of each method with its defaults, then of
        ``count`` warm starts: from the wrapping in DDP to the end of the first step of a new
        process.

        Args:
            place: place of the ranks; no method has a compiler cache there yet, and each gets its
                own.
            timeout_s: time limit for the model, for its wrapping, and for the step, each.
            count: number of warm starts.
        """
        for method in self.methods:
            if method.cap_mb is not None or method.wrong:
                continue
            for _ in range(1 + count):
                one = Method(method.name, answer_s=method.answer_s)
                started = one.start(place, timeout_s)
                one.kill()
                if started is None:
                    method.fail(f"its start: {one.wrong}")
                    break
                method.start_cpu_s.append(sum(rank.cpu_s for rank in started))

    def rows(self) -> Iterator[Row]:
        """The results so far."""
        for rate in self.rates:
            case = f"{self.model}, {words_of(rate)}"
            if rate in self.alone:
                figures = {"ms": 1000 * statistics.median(self.alone[rate])}
                yield Row(f"{case}: {ALONE}", figures=figures)
            for method in self.methods:
                if rate in method.seconds or method.planned_for in ("", rate):
                    yield self._row(case, method, rate)

    def plans(self) -> Iterator[str]:
        """The plans, one sentence per method and rate."""
        for method in self.methods:
            for rate, plan in method.plans.items():
                yield f"{self.model}, {words_of(rate)}, {method.label}: {plan}."

    def _row(self, case: str, method: Method, rate: str) -> Row:
        plain, reference = self.methods[:2]
        over = method.over(plain, rate)
        low, middle, high = spread(over)
        own, base = _median(method.seconds.get(rate)), _median(plain.seconds.get(rate))
        first = _median(method.first_s.get(rate))
        starts, base_starts = method.start_cpu_s, plain.start_cpu_s
        figures = {
            "ms": own and 1000 * own,
            "time over no DDP": middle,
            "25 %": low,
            "75 %": high,
            "exposed ms": 1000 * (own - base) if own and base else None,
            "over torch's fastest": self._over_theirs(method, rate),
            "CPU over both alone": self._cpu(method, rate),
            "CPU over no DDP": _median(
                ratios(method.cpu_s.get(rate, ()), plain.cpu_s.get(rate, ()))
            ),
            "cold start, CPU over no DDP": _ratio(_median(starts[:1]), _median(base_starts[:1])),
            "warm start, CPU over no DDP": _ratio(_median(starts[1:]), _median(base_starts[1:])),
            "peak over no DDP": _ratio(method.peak_bytes, plain.peak_bytes),
            "optimizer state over no DDP": _ratio(method.state_bytes, plain.state_bytes),
            "first step, ms": first and 1000 * first,
            "first over eager DDP's": _median(
                ratios(method.first_s.get(rate, ()), reference.first_s.get(rate, ()))
            ),
            "gradients off by": method.error,
        }
        # An error in one of torch's other methods is not our fault.
        counts = method.way.is_ours or method in (plain, reference)
        is_right = not counts or (bool(over) and not method.wrong)
        return Row(f"{case}: {method.label}", is_right, method.wrong, figures)

    def _over_theirs(self, method: Method, rate: str) -> float | None:
        """The median ratio of its step time to that of torch's fastest method with defaults."""
        theirs = [
            other
            for other in self.methods
            if other.way.has_ddp and not other.way.is_ours and other.cap_mb is None
            if other.seconds.get(rate) and not other.wrong
        ]
        if not theirs:
            return None
        fastest = min(theirs, key=lambda other: statistics.median(other.seconds[rate]))
        return _median(method.over(fastest, rate))

    def _cpu(self, method: Method, rate: str) -> float | None:
        """CPU seconds per step, divided by those of a step without DDP plus an all-reduce alone."""
        plain, alone = self.methods[0].cpu_s.get(rate), self.alone_cpu_s.get(rate)
        own = _median(method.cpu_s.get(rate))
        if method.name == PLAIN or not (own and plain and alone):
            return None
        return own / (statistics.median(plain) + statistics.median(alone))

    def to_json(self) -> dict[str, Any]:
        """All measurements."""
        methods = [{**vars(method), "processes": None} for method in self.methods]
        return {**vars(self), "methods": methods}


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of values of the same rounds."""
    return [one / other for one, other in zip(mine, theirs, strict=False)]


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """First quartile, median and third quartile; a single value has no quartiles."""
    if len(values) < 2:
        return None, values[0] if values else None, None
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _slowest(stepped: Sequence[Stepped]) -> float:
    return max(statistics.median(one.seconds) for one in stepped)


def _median(values: Sequence[float] | None) -> float | None:
    return statistics.median(values) if values else None


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
