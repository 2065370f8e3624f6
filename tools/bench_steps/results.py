"""What was measured, as plain values that JSON keeps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from bench_steps.limits import lower_bound, ready_shares
from bench_steps.rows import Row, Stepped
from fusion_passes.profile.tables import NOTHING_TAKEN, CostTable, Taken
from workloads.ways import EAGER, PLAIN, TRACED

COMPUTE: Final = Row("way", PLAIN)
TRACED_COMPUTE: Final = Row("way", TRACED)
REFERENCE: Final = Row("way", EAGER)
NETWORK: Final = Row("network")
PROBE: Final = Row("probe")


@dataclass
class RowResult:
    """One row at one rate.

    Attributes:
        row: which.
        group: number of the group in which it was measured; the limits are in all of them.
        reason: why it could not be measured, else empty.
        wrong: how its gradients differ from eager DDP's, else empty.
        buffers: how many buffers of the model differ from eager DDP's.
        gradient_error: largest difference of gradients, over the largest element.
        cold_s: first step with an empty compiler cache, the wrapping in DDP included; seconds.
        warm_s: the same in a second process.
        peak_bytes: most memory of a step beyond parameters, buckets of DDP's reducer included.
        seconds: of a step, for each round: the median of its steps on the slowest rank.
        ratios: the same, over compute alone in the same round.
        cpu_s: CPU seconds of a step, of all ranks together, for each round.
        first_s: seconds of the first averaged step of a process beyond compiling, for each process.
        plan: its buckets and why they are these, for people; empty where it measures nothing.
    """

    row: Row
    group: int = 0
    reason: str = ""
    wrong: str = ""
    buffers: int = 0
    gradient_error: float = 0.0
    cold_s: float | None = None
    warm_s: float | None = None
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    plan: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it was measured, and its gradients are eager DDP's."""
        return bool(self.seconds) and not self.reason and not self.wrong

    def add(self, seconds: float, ratio: float, cpu_s: float) -> None:
        """Add a round."""
        self.seconds.append(seconds)
        self.ratios.append(ratio)
        self.cpu_s.append(cpu_s)

    def without_figures(self) -> RowResult:
        """A copy for another rate."""
        return replace(self, seconds=[], ratios=[], cpu_s=[], first_s=[])


@dataclass
class Cell:
    """All rows of a model at one rate.

    Attributes:
        model: its name.
        rate: of the network; ``None`` is as it was.
        ranks: how many.
        gradient_bytes: of each gradient.
        rows: in the order in which they were measured.
        table_bytes: sizes whose all-reduces were measured, beside that of all gradients.
        table_s: seconds of these.
        ready_shares: when each gradient is ready, as a share of a step of compute alone.
        ready_bytes: of these gradients.
        taken: what an all-reduce takes from the compute beside it; ``None``: not measured.
    """

    model: str
    rate: str | None
    ranks: int
    gradient_bytes: tuple[int, ...]
    rows: list[RowResult] = field(default_factory=list)
    table_bytes: tuple[int, ...] = ()
    table_s: tuple[float, ...] = ()
    ready_shares: tuple[float, ...] = ()
    ready_bytes: tuple[int, ...] = ()
    taken: Taken | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.rate or 'network as it is'}, {self.ranks} ranks"

    @property
    def total_bytes(self) -> int:
        return sum(self.gradient_bytes)

    def find(self, row: Row) -> RowResult | None:
        return next((result for result in self.rows if result.row == row), None)

    def add(self, results: Mapping[Row, RowResult]) -> None:
        """Add the rounds of a group. The limits are measured with each group."""
        for row, result in results.items():
            known = self.find(row)
            if known is None:
                self.rows.append(result)
                continue
            known.seconds += result.seconds
            known.ratios += result.ratios
            known.cpu_s += result.cpu_s

    def note_table(self, sizes: Sequence[int], rounds: Sequence[Sequence[float]]) -> None:
        """Note the seconds of an all-reduce of each size, by round and size."""
        medians = tuple(statistics.median(of_size) for of_size in zip(*rounds, strict=True))
        self.table_bytes, self.table_s = tuple(sizes), medians

    def note_taken(self, rounds: Sequence[Taken]) -> None:
        """Note what an all-reduce takes from the compute beside it, by round."""
        if rounds:
            each, mib = zip(*((taken.each_ns, taken.mib_ns) for taken in rounds), strict=True)
            self.taken = Taken(round(statistics.median(each)), round(statistics.median(mib)))

    def note_ready(self, rounds: Sequence[Sequence[Stepped]]) -> None:
        """Note when gradients were ready, by round and rank."""
        if not rounds:
            return
        ranks = list(zip(*rounds, strict=True))
        moments = [[step for stepped in rank for step in stepped.ready_s] for rank in ranks]
        seconds = [[step for stepped in rank for step in stepped.seconds] for rank in ranks]
        self.ready_shares = tuple(ready_shares(moments, seconds))
        self.ready_bytes = rounds[0][0].ready_bytes

    def lower_bound_s(self, *, contended: bool = False) -> float | None:
        """Seconds that no way can be faster than; ``None`` if it is not known: something of it was
        not measured, or the backward is more than one graph.

        Args:
            contended: whether all-reduces take from the compute beside them what was measured.
        """
        if contended and self.taken is None:
            return None
        compute, network = self.find(COMPUTE), self.find(NETWORK)
        if not (compute and network and compute.seconds and network.seconds):
            return None
        # With a graph break, what goes from one graph to the other is noted too.
        if sorted(self.ready_bytes) != sorted(self.gradient_bytes) or not self.table_s:
            return None
        known = [n for n in self.table_bytes if n < self.total_bytes]  # Models can be tiny.
        costs = CostTable.of(
            (*known, self.total_bytes),
            (*self.table_s[: len(known)], statistics.median(network.seconds)),
        )
        middle = statistics.median(compute.seconds)
        # By what is taken, all-reduces of less than 1 KiB cost less than by the table.
        counted = {NOTHING_TAKEN, self.taken or NOTHING_TAKEN} if contended else {NOTHING_TAKEN}
        return max(
            lower_bound(middle, self.ready_shares, self.ready_bytes, costs, taken)
            for taken in counted
        )

    def to_json(self) -> dict[str, Any]:
        bounds = {
            "lower_bound_s": self.lower_bound_s(),
            "contended_bound_s": self.lower_bound_s(contended=True),
        }
        return asdict(self) | bounds

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        values = {name: value for name, value in data.items() if not name.endswith("_bound_s")}
        values.pop("taken_s", None)  # Of results from before 2026-11-26, by another rule.
        rows = []
        for row in values.pop("rows"):
            row.pop("predicted", None)  # Of results from before 2026-11-27: plans within a run.
            rows.append(RowResult(**{**row, "row": Row(**row["row"])}))
        taken = values.pop("taken", None)
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**plain, rows=rows, taken=Taken(**taken) if taken else None)
