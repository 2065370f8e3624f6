"""Runs each cell in processes of its own, and leaves none behind."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nightly_matrix.cells import Cell
from nightly_matrix.outcomes import judge
from nightly_matrix.results import Result
from testing.scenarios.ranks import read_reports
from testing.sessions import kill_marked, kill_session, start_session
from testing.side_by_side import run_side_by_side

ROOT = Path(__file__).resolve().parent.parent.parent
WORKER = "nightly_matrix.worker"

MARK = "NIGHTLY_CELL"
"""Environment variable by which the processes of a cell are known, whoever their parent is."""

STACKS_S = 5.0
"""How long before the launcher is killed the ranks say where they hang, and end."""

TAIL_LINES = 60


class CellProcesses:
    """One cell's ``torchrun`` and its ranks.

    Args:
        cell: what runs.
        catalog: module whose ``SCENARIOS`` the cell is from.
        graph: which graph is to reduce gradients, ``FusionConfig.backward_graph``.
        log: file for what the processes print.
        cache: directory of compiled kernels, of this and other cells.
        timeout_s: for the cell.
    """

    def __init__(
        self, cell: Cell, *, catalog: str, graph: str, log: Path, cache: Path, timeout_s: float
    ) -> None:
        self.cell = cell
        self._log = log
        self._timeout_s = timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="nightly-"))
        self._mark = str(self._directory)
        self._start = time.monotonic()
        # Of the clock that all processes of a machine share: a rank may take long to start.
        deadline = self._start + max(1.0, timeout_s - STACKS_S)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={cell.scenario.ranks}", "--module", WORKER]
        command += [catalog, cell.name, graph, str(self._directory), str(deadline)]
        self._process = start_session(command, log, environment(self._mark, cache))

    def poll(self) -> Result | None:
        """The result, once the cell is done or its time is over."""
        seconds = time.monotonic() - self._start
        fate = ""
        if self._process.poll() is None:
            if seconds < self._timeout_s:
                return None
            fate = f"not done after {self._timeout_s:g} s"
        elif seconds >= self._timeout_s - STACKS_S:
            fate = f"not done after {self._timeout_s:g} s"
        self.end()
        reports = read_reports(self._directory, self.cell.scenario.ranks)
        outcome = judge(self.cell.scenario, reports, fate=fate, log=tail(self._log))
        shutil.rmtree(self._directory, ignore_errors=True)
        return Result(self.cell.name, outcome, round(seconds, 1), torch_version())

    def end(self) -> None:
        """Kill what still runs: the launcher, the ranks, and what these have started."""
        kill_session(self._process)
        # The ranks are sessions of their own.
        kill_marked(MARK, self._mark)

    def discard(self) -> None:
        """End the cell without a result."""
        self.end()
        shutil.rmtree(self._directory, ignore_errors=True)


def run_cells(
    cells: Sequence[Cell],
    *,
    catalog: str,
    graph: str,
    logs: Path,
    timeout_s: float,
    jobs: int,
    on_start: Callable[[Cell], None],
    on_result: Callable[[Cell, Result], None],
) -> None:
    """Run cells, up to ``jobs`` at a time; kill what runs if it is interrupted.

    Args:
        cells: in this order.
        catalog: module whose ``SCENARIOS`` they are from.
        graph: which graph is to reduce gradients, ``FusionConfig.backward_graph``.
        logs: directory for what they print.
        timeout_s: for each cell.
        jobs: how many run at a time.
        on_start: called with each cell as it starts.
        on_result: called with each cell as it is done.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nightly-cache-") as cache:

        def start(cell: Cell) -> CellProcesses:
            on_start(cell)
            log = logs / f"{cell.file_name}.log"
            return CellProcesses(
                cell,
                catalog=catalog,
                graph=graph,
                log=log,
                cache=Path(cache),
                timeout_s=timeout_s,
            )

        run_side_by_side(cells, start, on_result, jobs=jobs)


def torch_version() -> str:
    """The installed one, without what says how it was built: ``2.13.0``."""
    return importlib.metadata.version("torch").partition("+")[0]


def environment(mark: str, cache: Path) -> dict[str, str]:
    """The environment of processes that train.

    Kernels are shared between cells, for time; graphs are not: each cell runs the passes.

    Args:
        mark: by which :func:`testing.sessions.kill_marked` knows the processes.
        cache: directory of compiled kernels.
    """
    variables = {
        name: value for name, value in os.environ.items() if name != "FUSION_PASSES_DDP_FUSION"
    }
    paths = [str(ROOT), str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return variables | {
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Torch takes this machine's vectors without a trial, which compiles six programs.
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }


def tail(log: Path) -> str:
    """The end of what processes have printed."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])
