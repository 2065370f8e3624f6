"""Measures the rows of a model, at each rate, in rounds in which all rows take turns."""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench_steps import timelines
from bench_steps.gradients import TOLERANCE
from bench_steps.places import together_of
from bench_steps.processes import Place, RowFailed, RowProcesses
from bench_steps.progress import Progress
from bench_steps.results import COMPUTE, NETWORK, PROBE, REFERENCE, Cell, RowResult
from bench_steps.rows import Checked, Row, Started, Stepped, groups_of, rows_of
from bench_steps.timelines import Timeline
from fusion_passes.profile.files import DIRECTORY_VARIABLE
from fusion_passes.profile.tables import Taken, table_sizes
from fusion_passes.reducer.ready_clock import MEASURED_ROUNDS, SKIPPED_ROUNDS
from workloads.ways import EAGER, PLAIN, WAYS

START_TIMEOUT_S = 900.0
"""At most, for the first step: compilation on a busy core."""

WARM_UP_STEPS = 3
MEASURING_STEPS = SKIPPED_ROUNDS + MEASURED_ROUNDS
"""Of a way that plans its buckets from what an earlier run has measured: it has by then."""
MAX_STEPS = 50


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: in each of them every row takes its turn.
        round_s: seconds of steps in a turn, about; two steps at least.
        together: rows whose processes are alive at a time, beside the limits; ``None``: as many
            as memory holds.
        warm: whether a row is started a second time, with the compiler's cache filled.
        caps_mb: that are tried for each way that has one, in MiB.
        firsts: processes of each way and rate whose first averaged step is measured.
    """

    rounds: int
    round_s: float
    together: int | None
    warm: bool
    caps_mb: tuple[float, ...] = ()
    firsts: int = 0


@dataclass
class _Alive:
    """A row's processes between its turns."""

    result: RowResult
    processes: RowProcesses
    steps: int = 2


class Measuring:
    """Measures one model.

    Args:
        place: where ranks run.
        effort: how much is measured.
        set_rate: makes the network as fast as a rate says; ``None`` as it is.
        progress: of the starts and turns.
    """

    def __init__(
        self,
        place: Place,
        effort: Effort,
        set_rate: Callable[[str | None], None],
        progress: Progress,
    ) -> None:
        self._place = place
        self._effort = effort
        self._set_rate = set_rate
        self._progress = progress
        self._gradients: Started | None = None
        self._reference = str(place.directory / f"{place.model}-gradients".replace(":", "."))

    def measure(self, ways: Sequence[str], rates: Sequence[str | None], cells: list[Cell]) -> None:
        """All rows of a model, a cell for each rate.

        Args:
            ways: beside compute alone and eager DDP, which are always measured: all figures are
                ratios to the one, all gradients are compared with the other's.
            rates: of the network.
            cells: where they are added; as far as measured, if this is interrupted.

        Raises:
            RowFailed: compute alone or the network alone cannot be measured.
        """
        self._progress.expect(2 + self._effort.warm)
        compute = self._started(COMPUTE, RowResult(COMPUTE))
        try:
            self._measure_beside(compute, ways, rates, cells)
        finally:
            compute.processes.end()
            shutil.rmtree(self._place.directory / "caches", ignore_errors=True)

    def timelines(
        self, way: str, cap_mb: float | None, rates: Sequence[str | None]
    ) -> Iterator[Timeline]:
        """The timeline of a step of a way, at each rate.

        Raises:
            RowFailed: there is none.
        """
        row = Row("way", way, cap_mb)
        self._progress.expect(1 + len(rates))
        self._progress.begin(f"{row.label}: start for a timeline")
        self._set_rate(None)
        processes = timelines.start(row, self._place, START_TIMEOUT_S)
        try:
            for rate in rates:
                name = Cell(self._place.model, rate, self._place.ranks, ()).name
                self._progress.begin(f"{name}: {row.label}, timeline")
                self._set_rate(rate)
                yield timelines.measure(processes, name)
        finally:
            processes.end()

    def _measure_beside(
        self,
        compute: _Alive,
        ways: Sequence[str],
        rates: Sequence[str | None],
        all_cells: list[Cell],
    ) -> None:
        assert self._gradients is not None
        total = sum(self._gradients.gradient_bytes)
        network = self._start_network(total)
        try:
            others = [EAGER, *(way for way in ways if way not in (PLAIN, EAGER))]
            capped = [way for way in others if WAYS[way].caps]
            rows = rows_of(others, capped, self._effort.caps_mb, total)
            cells = [
                Cell(self._place.model, rate, self._place.ranks, self._gradients.gradient_bytes)
                for rate in rates
            ]
            all_cells += cells
            together = self._effort.together or together_of(self._place.ranks, total)
            groups = groups_of([PROBE, *rows], together)
            self._expect(groups, len(cells))
            for number, group in enumerate(groups):
                starts = {row: RowResult(row, number) for row in group}
                self._measure_group(starts, compute, network, cells)
        finally:
            network.processes.end()
        for cell in cells if self._effort.firsts else ():
            self._measure_firsts(cell)

    def _measure_firsts(self, cell: Cell) -> None:
        """Measure the first averaged step of new processes of each way, one after the other in each
        round."""
        self._set_rate(cell.rate)
        results = [result for result in cell.rows if _has_first(result.row) and not result.reason]
        self._progress.expect(len(results) * self._effort.firsts)
        for number in range(self._effort.firsts):
            for result in results:
                self._progress.begin(f"{cell.name}: {result.row.label}, first step {number + 1}")
                try:
                    processes = RowProcesses(result.row, self._place_at(cell.rate))
                    try:
                        processes.ask("start", False, timeout_s=START_TIMEOUT_S)
                        result.first_s.append(max(processes.ask("first_average")))
                    finally:
                        processes.end()
                except RowFailed as error:
                    result.reason = str(error)

    def _expect(self, groups: Iterable[Sequence[Row]], rates: int) -> None:
        for group in groups:
            starts = sum(self._starts(row) * (rates if _starts_anew(row) else 1) for row in group)
            self._progress.expect(starts + (len(group) + 2) * rates * (self._effort.rounds + 1))

    def _starts(self, row: Row) -> int:
        # The kernels of other caps are the default's, which are in its cache.
        is_warm = self._effort.warm and row.kind == "way" and row.cap_mb is None
        return 1 + (is_warm or _starts_anew(row))

    def _measure_group(
        self,
        starts: dict[Row, RowResult],
        compute: _Alive,
        network: _Alive,
        cells: Sequence[Cell],
    ) -> None:
        """Start rows, and measure them in cells: some start anew in each."""
        alive: list[_Alive] = []
        try:
            self._set_rate(None)
            once = [result for row, result in starts.items() if not _starts_anew(row)]
            self._start_all(once, alive, None)
            for cell in cells:
                self._set_rate(cell.rate)
                anew = [
                    result.without_figures() for row, result in starts.items() if _starts_anew(row)
                ]
                new: list[_Alive] = []
                try:
                    self._start_all(anew, new, cell.rate)
                    results = {result.row: result for result in (*once, *anew)}
                    self._measure_rounds([compute, network, *alive, *new], cell, results)
                finally:
                    _end(new)
        finally:
            _end(alive)

    def _start_all(
        self, results: Sequence[RowResult], alive: list[_Alive], rate: str | None
    ) -> None:
        """Start rows on a network of a rate; add those that could be to ``alive``."""
        for result in results:
            try:
                alive.append(self._started(result.row, result, rate))
            except RowFailed as error:
                result.reason = str(error)

    def _started(self, row: Row, start: RowResult, rate: str | None = None) -> _Alive:
        """Start a row; one at its default twice, as on a new machine and with what the first left
        in its caches; and so one whose first run measures what the second plans from, on a network
        of that rate."""
        place = self._place_at(rate)
        both = self._starts(row) == 2
        if both:
            self._progress.begin(f"{row.label}: cold start")
            processes = RowProcesses(row, place)
            try:
                start.cold_s = _slowest(processes.ask("start", timeout_s=START_TIMEOUT_S))
                if _starts_anew(row):
                    processes.ask("steps", MEASURING_STEPS)
            finally:
                processes.end()
        self._progress.begin(f"{row.label}: start")
        processes = RowProcesses(row, place)
        try:
            started: list[Started] = processes.ask("start", timeout_s=START_TIMEOUT_S)
            if both:
                start.warm_s = _slowest(started)
            if row == COMPUTE:
                self._gradients = started[0]
            elif row.kind == "way" and WAYS[row.way].has_ddp:
                self._check(start, processes)
            if row.kind == "way":
                start.peak_bytes = max(processes.ask("peak"))
        except BaseException:
            processes.kill()
            raise
        return _Alive(start, processes)

    def _place_at(self, rate: str | None) -> Place:
        """Where ranks run, with the profiles of a network of a rate."""
        profile = str(self._place.directory / "profiles" / f"{rate}")
        variables = self._place.variables | {DIRECTORY_VARIABLE: profile}
        return replace(self._place, variables=variables)

    def _check(self, result: RowResult, processes: RowProcesses) -> None:
        """Compare gradients with eager DDP's, whose row is the first one."""
        is_reference = result.row == REFERENCE
        checked: list[Checked] = processes.ask("check", self._reference, is_reference)
        if not all(one.compared for one in checked):
            result.wrong = "gradients were compared with nothing: eager DDP failed"
            return
        worst = max(checked, key=lambda one: one.error)
        missing = sorted({name for one in checked for name in one.missing})
        result.gradient_error = worst.error
        result.buffers = len({name for one in checked for name in one.buffers})
        if missing:
            result.wrong = f"gradients of other parameters than eager DDP's: {', '.join(missing)}"
        elif not worst.error <= TOLERANCE:
            result.wrong = (
                f"gradients are not eager DDP's: {worst.worst} is off by {worst.error:.1%}"
            )

    def _start_network(self, total: int) -> _Alive:
        assert self._gradients is not None
        self._progress.begin("network alone: start")
        processes = RowProcesses(NETWORK, self._place)
        processes.ask("start_network", total, self._gradients.dtypes[0])
        return _Alive(RowResult(NETWORK), processes)

    def _measure_rounds(
        self, alive: Sequence[_Alive], cell: Cell, starts: dict[Row, RowResult]
    ) -> None:
        """Fill a cell with the rows that are alive, and those that did not come to be."""
        limits = {item.result.row: item.result for item in alive[:2]}
        results = {row: start.without_figures() for row, start in (limits | starts).items()}
        tables: list[list[float]] = []
        taken: list[Taken] = []
        probed: list[list[Stepped]] = []
        sizes = table_sizes(cell.total_bytes, 4)
        self._warm_up(alive, results)
        for number in range(self._effort.rounds):
            compute_s = 0.0
            for item in alive:
                row, result = item.result.row, results[item.result.row]
                if result.reason:
                    continue
                self._progress.begin(f"{cell.name}: {row.label}, round {number + 1}")
                try:
                    stepped = item.processes.ask("steps", item.steps)
                    if row == NETWORK:
                        tables.append(_table(item.processes.ask("table", sizes)))
                        taken.append(Taken(*item.processes.ask("taken", sizes, tables[-1])[0]))
                except RowFailed as error:
                    result.reason = item.result.reason = str(error)
                    if row in (COMPUTE, NETWORK):
                        raise
                    continue
                seconds = max(statistics.median(one.seconds) for one in stepped)
                compute_s = seconds if row == COMPUTE else compute_s
                cpu_s = sum(one.cpu_s for one in stepped) / item.steps
                result.add(seconds, seconds / compute_s, cpu_s)
                if row.kind == "probe":
                    probed.append(stepped)
        self._note_plans(alive, results)
        cell.add(results)
        cell.note_table(sizes, tables)
        cell.note_taken(taken)
        cell.note_ready(probed)

    def _note_plans(self, alive: Sequence[_Alive], results: Mapping[Row, RowResult]) -> None:
        """Note which buckets were planned, and why."""
        for item in alive:
            row = item.result.row
            if _starts_anew(row) and not results[row].reason:
                try:
                    planned: list[str] = item.processes.ask("planned")
                except RowFailed as error:
                    results[row].reason = str(error)
                else:
                    results[row].plan = planned[0]

    def _warm_up(self, alive: Sequence[_Alive], results: dict[Row, RowResult]) -> None:
        """Make the first steps at a rate, and choose how many of them fit in a turn."""
        for item in alive:
            row = item.result.row
            self._progress.begin(f"{row.label}: warm-up")
            if results[row].reason:
                continue
            try:
                stepped = item.processes.ask("steps", WARM_UP_STEPS)
            except RowFailed as error:
                results[row].reason = item.result.reason = str(error)
                if row in (COMPUTE, NETWORK):
                    raise
                continue
            fastest = max(min(one.seconds) for one in stepped)
            item.steps = min(MAX_STEPS, max(2, math.ceil(self._effort.round_s / fastest)))


def _starts_anew(row: Row) -> bool:
    """Whether a row starts on each network: its buckets follow from what it measures there."""
    return row.kind == "way" and WAYS[row.way].measures_network


def _has_first(row: Row) -> bool:
    """Whether what a row compiles under ``no_sync`` is what it runs without, at its default cap."""
    way = WAYS.get(row.way)
    is_same = way is not None and way.has_ddp and way.style != "inside" and not way.is_traced
    return is_same and row.cap_mb is None


def _end(alive: Iterable[_Alive]) -> None:
    for item in alive:
        item.processes.end()


def _slowest(started: Sequence[Started]) -> float:
    return max(one.seconds for one in started)


def _table(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(seconds) for seconds in zip(*of_ranks, strict=True)]
