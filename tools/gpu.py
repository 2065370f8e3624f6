"""Runs all that needs a GPU, in minutes, with the torch that is installed, and writes a page of it.

Compares gradients of norms in sizes that people train; sets steps, peak memory and starts beside no
DDP and torch's own methods, on two ranks of one GPU and a network of several rates (over NCCL where
it allows that, else over Gloo); counts CUDA graphs; times kernels that move gradients; and trains
with every option beside eager DDP. Each part runs in processes of its own with a time limit, and
its result is kept as soon as it ends: a second call goes on where the first has stopped, and runs
again what was wrong.

Without a GPU it checks that all parts could run: flags, models, and kernels compiled to PTX.
The exit status is 1 if anything differs, failed, or was not run.

    python tools/gpu.py                              # all parts, at most 8 minutes
    python tools/gpu.py --only net-gpt2 --again      # one of them, anew
    python tools/gpu.py --list                       # their names
    python tools/gpu.py --device cpu --only copies   # to try a part out, tiny, without a GPU
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benches.processes import ROOT, environment
from command_line import parser_of
from gpu_checks import pages
from gpu_checks.machine import Machine
from gpu_checks.parts import Part, choose
from gpu_checks.processes import PartProcess
from gpu_checks.sites import Result, Sharing, Site, control_mps, read_result
from interrupting import INTERRUPTED, terminated_as_interrupted
from testing.side_by_side import run_side_by_side

UNTIMED: Final = "correctness"
"""Group of parts that may run side by side."""

CATALOG: Final = "gpu_checks.parts"
SECONDS: Final = 480.0
ANSWER_S: Final = 120.0
"""At most, until torch says what it runs on."""


def main(arguments: Sequence[str] | None = None, catalog: str = CATALOG) -> int:
    """Run parts, or check the plan where there is no GPU; 1 if something is wrong."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    parts = importlib.import_module(catalog).PARTS
    try:
        chosen = choose(parts, options.only)
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(part.name for part in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-cache-") as cache:
        try:
            machine = _ask_machine(options.device, Path(cache))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        if not machine.device:
            return _check_plan(machine, Path(cache), options.seconds)
        return Session(options, catalog, machine, Path(cache), arguments).run(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="PART", help="this part; can be repeated")
    add("--again", action="store_true", help="also what has ended well before")
    add("--list", action="store_true", help="print the names of the parts, run nothing")
    add("--seconds", type=float, default=SECONDS, help=f"for all parts ({SECONDS:g})")
    add("--jobs", type=int, help="trainings at a time (half of the cores, at most 8)")
    add("--results", type=Path, default=Path("gpu-results"), help="directory (gpu-results)")
    add("--out", type=Path, help="file of the page (docs/gpu/DATE.md; of a CPU, in --results)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny, to try parts out")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Complete the options.

    Raises:
        ValueError: one is off; it names the option, the rule, the value and the remedy.
    """
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be more than 0, but is {options.seconds:g}. Give more.")
    if options.jobs is None:
        options.jobs = max(1, min(8, _cores() // 2))
    if options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, but is {options.jobs}. Give more.")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _ask_machine(device: str, cache: Path) -> Machine:
    """What there is to run on.

    Raises:
        RuntimeError: torch cannot be imported, or the GPU does not answer.
    """
    command = [sys.executable, "-m", "gpu_checks.machine", device]
    try:
        text = subprocess.check_output(command, env=environment(cache), text=True, timeout=ANSWER_S)
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"torch or the GPU does not answer: {error}") from error
    return Machine(**json.loads(text.splitlines()[-1]))


def _check_plan(machine: Machine, cache: Path, seconds: float) -> int:
    print(f"No GPU: {machine.why_none}. Nothing is run; this checks that all parts could.")
    command = [sys.executable, "-m", "gpu_checks.plan"]
    try:
        subprocess.run(command, env=environment(cache), timeout=seconds, check=True)
    except subprocess.SubprocessError as error:
        print(f"The plan is broken: {error}")
        return 1
    print("The plan is sound.")
    return 0


class Session:
    """One call of the tool.

    Args:
        options: of the command line.
        catalog: module whose ``PARTS`` there are.
        machine: what they run on.
        cache: directory of compiled kernels.
        arguments: for the page.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        catalog: str,
        machine: Machine,
        cache: Path,
        arguments: Sequence[str],
    ) -> None:
        self._options, self._machine, self._cache = options, machine, cache
        self._catalog = catalog
        self._module = importlib.import_module(catalog)
        self._command = shlex.join(["python", "tools/gpu.py", *arguments])
        self._deadline = time.monotonic() + options.seconds
        # Who gives more time has a slow machine.
        self._patience = max(1.0, options.seconds / SECONDS)
        self._results: dict[str, Result] = {}
        self._backend_of_two = "gloo"
        self._sharing = Sharing()

    def run(self, parts: Sequence[Part]) -> int:
        """Run what has no good result yet, and write the page; the exit status."""
        self._options.results.mkdir(parents=True, exist_ok=True)
        interrupted = False
        try:
            with terminated_as_interrupted():
                parts = self._able(parts)
                self._run_rest(parts)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            if self._sharing.mps:
                control_mps(Path(self._sharing.mps), words="quit\n")
        self._write_page(parts)
        print(pages.summary(parts, self._results))
        if interrupted:
            return INTERRUPTED
        done = (self._results.get(part.name) for part in parts)
        return int(not all(result is not None and result.is_right for result in done))

    def _able(self, parts: Sequence[Part]) -> list[Part]:
        """The parts that the machine can run; say which it cannot."""
        if any(part.ranks > 1 for part in parts):
            self._backend_of_two, reason = self._choose_backend()
            print(f"Two ranks: {self._backend_of_two}{f', since {reason}' if reason else ''}.")
        able = []
        for part in parts:
            where = (self._backend(part), self._machine.device, part.mode)
            if where == ("gloo", "cuda", "coalesced"):
                # In torch, all_reduce_coalesced of Gloo refuses tensors of a GPU.
                print(f"Left out: {part.name}: Gloo has no coalesced all-reduce on GPUs.")
            else:
                able.append(part)
        return able

    def _choose_backend(self) -> tuple[str, str]:
        """Over what two ranks reduce, and why not over NCCL."""
        if self._machine.device == "cpu":
            return "gloo", "this is the CPU"
        self._backend_of_two, failure = "nccl", ""
        for way in self._ways_to_share() if self._machine.count == 1 else ():
            self._sharing = way
            failure = self._failure_of_probe()
            if not failure:
                break
            print(f"Two ranks, {way}: {failure}", flush=True)
        return ("gloo", failure) if failure else ("nccl", "")

    def _ways_to_share(self) -> Iterator[Sharing]:
        """How two ranks may have one GPU, the best first; the last is for NCCL 2.30 and newer."""
        directory = self._cache / "mps"
        if control_mps(directory, "-d"):
            yield Sharing(True, str(directory))
            control_mps(directory, words="quit\n")
        yield Sharing(True)
        yield Sharing(False)

    def _failure_of_probe(self) -> str:
        """Why two ranks cannot reduce over NCCL; empty if they can."""
        found: list[Result] = []
        probe = [self._module.PROBE]
        run_side_by_side(probe, self._start, lambda _, one: found.append(one), jobs=1)
        if not found:
            return "there is no time left"
        return "" if found[0].is_right else found[0].failure

    def _backend(self, part: Part) -> str:
        if part.ranks > 1:
            return self._backend_of_two
        return "nccl" if self._machine.device == "cuda" else "gloo"

    def _run_rest(self, parts: Sequence[Part]) -> None:
        rest = []
        for part in parts:
            kept = read_result(self._options.results, part.name, self._machine.key)
            counts = kept and kept.is_right and kept.backend == self._backend(part)
            if kept and counts and not self._options.again:
                self._results[part.name] = kept
                print(f"{part.name}: done before")
            else:
                rest.append(part)
        for is_untimed, group in itertools.groupby(rest, lambda part: part.group == UNTIMED):
            # What is timed runs alone.
            jobs = self._options.jobs if is_untimed else 1
            run_side_by_side(list(group), self._start, self._keep, jobs=jobs)

    def _start(self, part: Part) -> PartProcess | None:
        left_s = self._deadline - time.monotonic()
        if left_s < min(part.least_s, self._options.seconds):
            print(f"{part.name}: not run, {max(0.0, left_s):.0f} s are left", flush=True)
            return None
        logs = self._options.results / "logs"
        logs.mkdir(exist_ok=True)
        site = Site(
            self._machine.device,
            self._backend(part),
            cores=_cores(),
            gpus=self._machine.count,
            memory_gib=self._machine.memory_gib,
            sharing=self._sharing,
            catalog=self._catalog,
        )
        return PartProcess(
            part,
            key=self._machine.key,
            site=site,
            cache=self._cache,
            logs=logs,
            limit_s=min(part.limit_s * self._patience, left_s),
        )

    def _keep(self, part: Part, result: Result) -> None:
        result.write(self._options.results)
        self._results[part.name] = result
        word = "right" if result.is_right else result.failure or "wrong"
        print(f"{part.name}: {word} ({result.seconds:.0f} s, {len(result.rows)} rows)", flush=True)
        for row in result.rows:
            if not row.is_right:
                print(f"  {row.title}: {row.words}", flush=True)

    def _write_page(self, chosen: Sequence[Part]) -> None:
        """Write all results there are, also those of earlier calls for other parts."""
        kept = {
            part.name: self._results.get(part.name)
            or read_result(self._options.results, part.name, self._machine.key)
            for part in self._module.PARTS
        }
        results = {name: result for name, result in kept.items() if result is not None}
        parts = [part for part in self._module.PARTS if part in chosen or part.name in results]
        date = str(datetime.date.today())
        text = pages.as_markdown(self._machine, parts, results, date=date, command=self._command)
        page = self._page(date)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)
        print(f"Written to {page}; logs are in {self._options.results / 'logs'}")

    def _page(self, date: str) -> Path:
        """Where the page is written."""
        if self._options.out:
            return Path(self._options.out)
        on_cpu = self._machine.device == "cpu"
        return (self._options.results if on_cpu else ROOT / "docs" / "gpu") / f"{date}.md"


if __name__ == "__main__":
    sys.exit(main())
