"""Runs all checks that need a GPU, in minutes, with the installed torch.

Trains norms of realistic sizes, all options, and buckets that NCCL has registered, and compares
with eager DDP; measures steps, peak memory and starts against no DDP and torch's own methods, on
two ranks of one GPU and a network of several rates (over NCCL if it allows that, otherwise over
Gloo); counts CUDA graphs; and times kernels that move gradients. Each part runs in its own
processes with a time limit, and its result is kept as soon as it ends. At the end, all figures are
printed, and which parts are wrong or were not run: ``--only`` runs those.

The exit status is 1 if anything differs, failed, or was not run.

    python tools/gpu.py                              # all parts, at most 8 minutes
    python tools/gpu.py --only net-gpt2              # one of them
    python tools/gpu.py --list                       # their names
    python tools/gpu.py --device cpu --only copies   # to try a part out, tiny, without a GPU
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from benches.results import figures_table
from command_line import exit_on_signals, parser_of
from gpu_checks.machine import Machine, ask_machine
from gpu_checks.parts import PARTS, PROBE, Part
from gpu_checks.processes import Result, kill_parts, run_part
from gpu_checks.sites import Site, control_mps

SECONDS: Final = 480.0


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run parts; 1 if something is wrong, or if there is no GPU."""
    options = _parser([part.name for part in parts]).parse_args(arguments)
    chosen = [part for part in parts if not options.only or part.name in options.only]
    if options.list:
        print("\n".join(part.name for part in chosen))
        return 0
    try:
        machine = ask_machine(options.device)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if not machine.device:
        print(f"No GPU: {machine.words}. Nothing is run; --device cpu tries parts, tiny.")
        return 1
    with tempfile.TemporaryDirectory(prefix="gpu-work-") as work:
        return Session(options, machine, Path(work)).run(chosen)


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    only = "this part; can be repeated"
    add("--only", action="append", choices=names, metavar="PART", help=only)
    add("--list", action="store_true", help="print the names of the parts, run nothing")
    add("--seconds", type=float, default=SECONDS, help=f"for all parts ({SECONDS:g})")
    jobs = max(1, min(8, _cores() // 2))
    add("--jobs", type=int, default=jobs, help="trainings at a time (half of the cores, at most 8)")
    add("--results", type=Path, default=Path("gpu-results"), help="directory (gpu-results)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try parts out")
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class Session:
    """One call of the tool."""

    def __init__(self, options: argparse.Namespace, machine: Machine, work: Path) -> None:
        self._options, self._machine, self._work = options, machine, work
        self._deadline = time.monotonic() + options.seconds
        self._results: dict[str, Result] = {}
        self._backend_of_two = "gloo"
        self._mps = ""

    def run(self, parts: Sequence[Part]) -> int:
        """Run the parts, and print the results; the exit status."""
        (self._options.results / "logs").mkdir(parents=True, exist_ok=True)
        try:
            parts = self._able(parts)
            for is_timed, group in itertools.groupby(parts, lambda part: bool(part.measure)):
                # Timed parts run alone; on the CPU, times have no meaning.
                is_alone = is_timed and self._machine.device == "cuda"
                self._run_all(list(group), 1 if is_alone else self._options.jobs)
        finally:
            if self._mps:
                control_mps(Path(self._mps), words="quit\n")
            self._say(parts)
        done = (self._results.get(part.name) for part in parts)
        are_right = all(result is not None and result.is_right for result in done)
        return int(not are_right)

    def _able(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that the machine can run; print those that it cannot."""
        if any(part.ranks > 1 for part in parts):
            self._backend_of_two, reason = self._choose_backend()
            print(f"Two ranks: {self._backend_of_two}{f', since {reason}' if reason else ''}.")
        able = []
        for part in parts:
            where = (self._backend(part), self._machine.device, part.mode)
            if where == ("gloo", "cuda", "coalesced"):
                # In torch, all_reduce_coalesced of Gloo refuses GPU tensors.
                print(f"Left out: {part.name}: Gloo has no coalesced all-reduce on GPUs.")
            else:
                able.append(part)
        return able

    def _choose_backend(self) -> tuple[str, str]:
        """The backend for two ranks, and the reason if it is not NCCL."""
        if self._machine.device == "cpu":
            return "gloo", "this is the CPU"
        self._backend_of_two, failure = "nccl", ""
        for mps in self._services() if self._machine.count == 1 else ():
            self._mps = mps
            probed = self._run_part(PROBE)
            failure = "there is no time left" if probed is None else probed.failure
            if not failure:
                break
            kernels = "side by side" if mps else "in turns"
            print(f"Two ranks, kernels {kernels}: {failure}", flush=True)
        return ("gloo", failure) if failure else ("nccl", "")

    def _services(self) -> Iterator[str]:
        """First the directory of a running Multi-Process Service, if one can be started; then an
        empty string, without one."""
        directory = self._work / "mps"
        if control_mps(directory, "-d"):
            yield str(directory)
            control_mps(directory, words="quit\n")
        yield ""

    def _backend(self, part: Part) -> str:
        if part.ranks > 1:
            return self._backend_of_two
        return "nccl" if self._machine.device == "cuda" else "gloo"

    def _run_all(self, parts: Sequence[Part], jobs: int) -> None:
        """Run parts in their order, ``jobs`` at a time; keep each result as it arrives."""
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(self._run_part, part) for part in parts]
            try:
                for future in as_completed(futures):
                    if result := future.result():
                        self._keep(result)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in futures):
                    kill_parts(self._work)
                raise

    def _run_part(self, part: Part) -> Result | None:
        """Run a part; ``None`` if there is not enough time."""
        left_s = self._deadline - time.monotonic()
        if left_s < min(part.least_s, self._options.seconds):
            print(f"{part.name}: not run, {max(0.0, left_s):.0f} s are left", flush=True)
            return None
        site = Site(
            self._machine.device,
            self._backend(part),
            cores=_cores(),
            gpus=self._machine.count,
            memory_gib=self._machine.memory_gib,
            mps=self._mps,
        )
        # A user who gives more time has a slow machine.
        limit_s = min(part.limit_s * max(1.0, self._options.seconds / SECONDS), left_s)
        logs = self._options.results / "logs"
        return run_part(part, site, work=self._work, logs=logs, limit_s=limit_s)

    def _keep(self, result: Result) -> None:
        result.write(self._options.results)
        self._results[result.part] = result
        word = "right" if result.is_right else result.failure or "wrong"
        print(
            f"{result.part}: {word} ({result.seconds:.0f} s, {len(result.rows)} rows)", flush=True
        )
        for row in result.rows:
            if not row.is_right:
                print(f"  {row.title}: {row.words}", flush=True)

    def _say(self, parts: Sequence[Part]) -> None:
        """Print the figures of all parts that measure, and the number of parts that are right."""
        print(f"\n{self._machine.words}")
        for part in parts:
            if part.measure and (result := self._results.get(part.name)):
                print(f"\n{part.name}, {result.backend}\n\n{figures_table(result.rows)}")
        right = sum(result.is_right for result in self._results.values())
        wrong = [name for name, result in self._results.items() if not result.is_right]
        missing = [part.name for part in parts if part.name not in self._results]
        print(f"\n{right} of {len(parts)} parts are as they must be.")
        for words, names in (("Wrong", wrong), ("Not run", missing)):
            if names:
                print(f"{words}: {', '.join(names)}.")
        print(f"Results and logs are in {self._options.results}.")


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
