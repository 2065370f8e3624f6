"""Measures what a start and a step cost beside the same model without DDP.

Each start is a process of its own on one rank, with an Inductor cache of its method's own: empty at
the first start (cold), filled by it at the others (warm). Prints a Markdown table of CPU seconds of
that process over those without DDP, which ran in the same round: on a busy machine, wall time says
little.

    python tools/bench.py starts                          # the table
    python tools/bench.py starts --model gpt2 mlp         # of some models
    python tools/bench.py starts --methods concat         # of one method, beside no DDP
    python tools/bench.py starts --by-block               # blocks compiled, the rest not
    python tools/bench.py starts --dynamic                # symbolic sizes
    python tools/bench.py starts --size tiny --starts 1   # quickly

A start's process: python -m benches.starts FILE_DESCRIPTOR
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benches import rank
from benches.processes import Place, RankProcesses
from benches.results import Origin, page, parser_of, table, write
from command_line import ROOT
from workloads.models import MAKERS, SIZES
from workloads.ways import PLAIN, WAYS, configure

METHODS: Final = (PLAIN, "DDPOptimizer", "concat", "concat, traced")

BARE_STEP: Final = "step, less collectives"

WARM_UP_STEPS: Final = 5
SECONDS_OF_STEPS: Final = 3.0
LIMIT_SECONDS: Final = 900
"""Of one start; the longest cold one takes some 150 s on two cores."""

FIGURES: Final = ("cold", "warm", "step", BARE_STEP)

Round = dict[str, dict[str, float]]
"""By method, CPU seconds by figure."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    options = _options(arguments)
    # An installed package has its bytecode, a checkout may have none.
    compileall.compile_dir(ROOT / "fusion_passes", quiet=1)
    origin = Origin.here("starts", arguments)
    cells: dict[str, list[Round]] = {}
    said = ""
    for model in [None, *options.model]:
        if model is not None:
            cells[model] = [_round(model, options) for _ in range(options.rounds)]
        text = as_markdown(cells, options.methods, origin)
        # Its last rows are those of the model that was measured last.
        print(text.removeprefix(said), end="", flush=True)
        said = text
        write(options.output, "starts", origin, {"cells": cells}, text)
    return 0


def as_markdown(cells: dict[str, list[Round]], methods: Sequence[str], origin: Origin) -> str:
    """The table, with what is needed to read and to repeat it."""
    rows = [
        [model, figure, *_cells(rounds, figure, methods)]
        for model, rounds in cells.items()
        for figure in FIGURES
    ]
    meaning = "CPU seconds of one rank over those without DDP: median over rounds."
    shown = table(["model", "", *methods], rows, words=2)
    return page("A start and a step", origin, meaning, shown)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", default=["gpt2"], metavar="NAME", choices=[*MAKERS])
    parser.add_argument("--size", default="small", choices=[*SIZES])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[*METHODS[1:]],
        metavar="METHOD",
        choices=METHODS[1:],
        help=f"beside {PLAIN}: {', '.join(METHODS[1:])} (all)",
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all is repeated")
    parser.add_argument("--starts", type=int, default=2, help="warm starts of a method and round")
    parser.add_argument(
        "--by-block",
        action="store_true",
        help="compile each block by itself (regional compilation), and not what is around them",
    )
    parser.add_argument(
        "--dynamic", action="store_true", help="compile for symbolic sizes (dynamic=True)"
    )
    return parser.parse_args(arguments)


def _round(model: str, options: argparse.Namespace) -> Round:
    """For each method the CPU seconds of its cold start, its warm starts' median, and a step."""
    found = {}
    for method in (PLAIN, *options.methods):
        with tempfile.TemporaryDirectory(prefix="bench-starts-") as cache:
            cold, *warm = [_start(model, options, method, cache) for _ in range(1 + options.starts)]
        found[method] = {
            "cold": cold["start"],
            "warm": statistics.median(said["start"] for said in warm),
            "step": min(said["step"] for said in warm),
            BARE_STEP: min(said["step"] - said["collectives"] for said in warm),
        }
    return found


def _start(model: str, options: argparse.Namespace, method: str, cache: str) -> dict[str, float]:
    """CPU seconds of a start and a step: see :meth:`StartRank.measure`."""
    place = Place(
        Path(cache),
        LIMIT_SECONDS,
        ((min(os.sched_getaffinity(0)),),),
        model=model,
        size=options.size,
        worker=__name__,
    )
    ranks = RankProcesses(method, place)
    try:
        seconds: dict[str, float]
        (seconds,) = ranks.ask("measure", options.by_block, options.dynamic)
    finally:
        ranks.end()
    return seconds


def _cells(rounds: Sequence[Round], figure: str, methods: Sequence[str]) -> list[str]:
    ratios = [
        [found[method][figure] / found[PLAIN][figure] for found in rounds] for method in methods
    ]
    return [f"{statistics.median(values):.2f}" for values in ratios]


# --- In the process of a start -------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: what it has in lists.

    Raises:
        ValueError: it has none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for found in lists for block in found]
    if not blocks:
        raise ValueError(
            f"--by-block needs a model whose blocks are in a list, which {type(model).__name__} is "
            "not: choose gpt2, bert or llama"
        )
    return blocks


class StartRank(rank.Rank):
    """The one rank of a start."""

    def measure(self, by_block: bool, dynamic: bool) -> dict[str, float]:
        """Start a training.

        Args:
            by_block: whether each block of the model is compiled by itself, and nothing else.
            dynamic: whether sizes are symbolic.

        Returns:
            CPU seconds: ``"start"``, from the wrapping to the end of the first backward,
            ``"step"``, of one forward and backward, the fastest of many, and ``"collectives"``, of
            those of a step without anything else, likewise.
        """
        self.build()
        way, module, batch = WAYS[self._assignment.way], self._model, self._made.batch(0)
        begin = time.process_time()
        wrapped: Any = module
        if way.has_ddp:
            configure(way)
            wrapped = DistributedDataParallel(module)
        compiled = wrapped if by_block else torch.compile(wrapped, dynamic=dynamic or None)
        for block in blocks_of(module) if by_block else ():
            block.compile(dynamic=dynamic or None)

        def step() -> float:
            start = time.process_time()
            module.zero_grad()
            compiled(*batch).backward()
            return time.process_time() - start

        step()
        started = time.process_time() - begin
        for _ in range(WARM_UP_STEPS):
            step()
        fastest, collectives = _fastest(step), 0.0
        if way.has_ddp:
            collectives = _seconds_of_collectives(wrapped, is_fused=way.is_ours)
        return {"start": started, "step": fastest, "collectives": collectives}


def _fastest(step: Callable[[], float]) -> float:
    """The least of what a step says it took, over many."""
    end, steps = time.monotonic() + SECONDS_OF_STEPS, []
    while time.monotonic() < end:
        steps.append(step())
    return min(steps)


def _seconds_of_collectives(ddp: DistributedDataParallel, is_fused: bool) -> float:
    """CPU seconds of a step's collectives, launched by themselves and waited for: an all-reduce for
    each bucket, and a broadcast of the buffers, which is left out on one rank where it is ours."""
    sizes = map(int, ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    op = dist.ReduceOp.AVG if is_fused else dist.ReduceOp.SUM
    buckets = [torch.zeros(size // torch.float32.itemsize) for size in sizes]
    buffers = [buffer.detach() for buffer in ddp.buffers() if not is_fused]

    def step() -> float:
        start = time.process_time()
        if buffers:
            dist._broadcast_coalesced(ddp.process_group, buffers, sum(b.nbytes for b in buffers), 0)
        works = [dist.all_reduce(bucket, op, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()
        return time.process_time() - start

    return _fastest(step)


if __name__ == "__main__":
    sys.exit(rank.main(sys.argv[1:], StartRank))
