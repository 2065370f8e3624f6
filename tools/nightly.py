"""Trains with eager DDP and under the flag, in each combination of how ranks share the work, mode,
dtype and feature, and shows what is equal, what is refused, and what is broken.

Each cell runs under its own ``torchrun`` on this machine: over NCCL where there are as many GPUs as
ranks, else over Gloo. docs/works.json keeps what the cells are known to become; the exit status is
1 if one of them got worse and the new table is not to be kept.

    python tools/nightly.py                           # the whole matrix
    python tools/nightly.py --quick                   # a few cells
    python tools/nightly.py --select 'ddp-2/*/bf16/*' --list
    python tools/nightly.py --graph compiled_autograd # the other graph that can reduce
    python tools/nightly.py --resume DIRECTORY        # what is left of a run
    python tools/nightly.py --keep                    # writes docs/works.json and docs/works.md
    python tools/nightly.py --page                    # writes docs/works.md from docs/works.json
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from command_line import parser_of
from interrupting import INTERRUPTED, terminated_as_interrupted
from nightly_matrix import pages
from nightly_matrix.cells import Cell, cells_of, select
from nightly_matrix.processes import ROOT, run_cells, torch_version
from nightly_matrix.results import Result, ResultFile
from nightly_matrix.table import Table, read_table

CATALOG = "testing.scenarios.catalog"
KEPT = ROOT / "docs" / "works.json"
TIMEOUT_S = 240.0
GRAPHS = ("auto", "compiled_autograd", "aot_autograd")


@dataclass(frozen=True)
class Matrix:
    """What is run, and where its table is kept.

    Attributes:
        catalog: module whose ``SCENARIOS`` it is.
        kept: file of the table for programs; the one for people lies beside it.
    """

    catalog: str = CATALOG
    kept: Path = KEPT

    def cells(self) -> list[Cell]:
        return cells_of(importlib.import_module(self.catalog).SCENARIOS)


def main(arguments: Sequence[str] | None = None, matrix: Matrix | None = None) -> int:
    """Run cells; 1 if one is worse than the kept table (0 with ``--keep``), 130 if interrupted."""
    matrix = matrix or Matrix()
    parser = _parser()
    options = parser.parse_args(arguments)
    cells = matrix.cells()
    try:
        chosen = select(cells, options.select, quick=options.quick)
        if options.list:
            print("\n".join(cell.name for cell in chosen))
            return 0
        if options.page:
            _write_page(matrix, cells, read_table(matrix.kept))
            return 0
        return _run(matrix, cells, chosen, options)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--select", action="append", default=[], metavar="PATTERN", help="cells, or a part's name")
    add("--quick", action="store_true", help="a selection that takes less than 3 minutes")
    add("--list", action="store_true", help="print the names of the cells, run nothing")
    add("--timeout", type=_positive, default=TIMEOUT_S, help=f"s for each cell ({TIMEOUT_S:g})")
    add("--jobs", type=int, default=1, help="cells at a time (1); one keeps 2 to 4 cores busy")
    add("--graph", choices=GRAPHS, default=GRAPHS[0], help="FusionConfig.backward_graph (auto)")
    add("--output", type=Path, help="directory for results and pages (nightly-DATE-TIME)")
    add("--resume", type=Path, metavar="DIRECTORY", help="of a run: do what is left of it")
    add("--keep", action="store_true", help="write the results into the kept table")
    add("--page", action="store_true", help="write the kept table for people anew, run nothing")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0 s, but is {text}")
    return value


def _run(matrix: Matrix, cells: list[Cell], chosen: list[Cell], options: argparse.Namespace) -> int:
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, but is {options.jobs}")
    if options.keep and options.graph != GRAPHS[0]:
        raise ValueError(
            f"--keep: the kept table is of --graph {GRAPHS[0]}, but this is {options.graph}. "
            "Leave one of them out"
        )
    if options.resume and not options.resume.is_dir():
        raise ValueError(f"--resume {options.resume}: there is no such directory")
    output = options.resume or options.output or Path(time.strftime("nightly-%Y%m%d-%H%M%S"))
    output.mkdir(parents=True, exist_ok=True)
    file, version = ResultFile(output), torch_version()
    done = file.read(version) if options.resume else {}
    results = {cell.name: done[cell.name] for cell in cells if cell.name in done}
    kept = read_table(matrix.kept)
    interrupted = False
    try:
        with terminated_as_interrupted():
            _run_rest(matrix, chosen, results, file, options, output)
    except KeyboardInterrupt:
        interrupted = True
    _write_pages(output, cells, results, kept, version)
    worse, better = kept.worse(results), kept.better(results)
    for change, names in (("worse", worse), ("better", better)):
        for name in names:
            now, was = results[name].outcome.kind, kept.entries[name].outcome
            print(f"{change}: {name}: {now}, was {was}")
    print(f"{_summary(results, version)} {output / 'report.html'}")
    if interrupted:
        return INTERRUPTED
    if options.keep:
        _keep(matrix, cells, kept.updated(cells, results, version))
        return 0
    return int(bool(worse))


def _run_rest(
    matrix: Matrix,
    chosen: list[Cell],
    results: dict[str, Result],
    file: ResultFile,
    options: argparse.Namespace,
    output: Path,
) -> None:
    """Run what has no result yet; add to ``results``."""
    rest = [cell for cell in chosen if cell.name not in results]
    past = len(chosen) - len(rest)
    with tqdm(total=len(chosen), initial=past, unit="cell", smoothing=0.1) as bar:

        def start(cell: Cell) -> None:
            bar.set_postfix_str(cell.name)

        def finish(cell: Cell, result: Result) -> None:
            results[cell.name] = result
            file.append(result)
            words = f": {result.outcome.words}" if result.outcome.words else ""
            line = f"{cell.name}: {result.outcome.kind} ({result.seconds:.0f} s){words}"
            bar.write(line, file=sys.stdout)
            sys.stdout.flush()
            bar.update()

        run_cells(
            rest,
            catalog=matrix.catalog,
            graph=options.graph,
            logs=output / "logs",
            timeout_s=options.timeout,
            jobs=options.jobs,
            on_start=start,
            on_result=finish,
        )


def _summary(results: dict[str, Result], version: str) -> str:
    minutes = sum(result.seconds for result in results.values()) / 60
    counts = pages.counted(pages.entries_of(results))
    return f"torch {version}, {len(results)} cells in {minutes:.0f} min: {counts}."


def _write_pages(
    output: Path, cells: list[Cell], results: dict[str, Result], kept: Table, version: str
) -> None:
    summary = _summary(results, version)
    (output / "report.html").write_text(pages.as_html(cells, results, kept, summary))
    markdown = pages.as_markdown(cells, pages.entries_of(results))
    (output / "report.md").write_text(f"# ddp_fusion beside eager DDP\n\n{summary}\n\n{markdown}")
    (output / "junit.xml").write_text(pages.as_junit(cells, results, kept))


def _keep(matrix: Matrix, cells: list[Cell], table: Table) -> None:
    matrix.kept.write_text(table.to_json())
    _write_page(matrix, cells, table)


def _write_page(matrix: Matrix, cells: list[Cell], table: Table) -> None:
    matrix.kept.with_suffix(".md").write_text(pages.kept_page(cells, table))


if __name__ == "__main__":
    sys.exit(main())
