"""Runs a scenario each way, on a cache that a run without a fault has filled, and judges.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fault_runs.judging import violations
from fault_runs.machine import fresh_directory
from fault_runs.records import Run
from fault_runs.runner import RunProcesses
from fault_runs.scenarios import PEERS, CannotPrepareError, Scenario, Way

FILLING_STEPS = 2


@dataclass
class Verdict:
    """What became of a scenario one way.

    Attributes:
        scenario: its name.
        way: eager, compiled, or a mode.
        runs: each repetition; the last one is shown.
        violations: what is wrong; never anything for a peer.
        skipped: why it was not run.
    """

    scenario: str
    way: Way
    runs: list[Run] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    skipped: str = ""


@dataclass
class Runner:
    """Runs scenarios.

    Attributes:
        directory: for what ranks write; removed by the caller.
        caches: for caches that are filled; can be kept for other runs.
        output: where results are appended.
        peers: what the flag is compared with.
    """

    directory: Path
    caches: Path
    output: Path
    peers: Sequence[Way] = PEERS

    def verdicts(self, scenario: Scenario, modes: Sequence[Way]) -> Iterator[Verdict]:
        """One for each peer, then for each mode."""
        peers: list[Run] = []
        for way in (*(peer for peer in self.peers if peer in scenario.peers), *modes):
            verdict = Verdict(scenario.name, way)
            try:
                for _ in range(scenario.repeats):
                    run = self._run(scenario, way)
                    verdict.runs.append(run)
                    if way not in PEERS:
                        new = violations(scenario, run, peers)
                        verdict.violations += [t for t in new if t not in verdict.violations]
            except CannotPrepareError as error:
                verdict.skipped = str(error)
            if way in PEERS:
                peers += verdict.runs
            self._append(verdict)
            yield verdict
            if verdict.skipped:
                return

    def _run(self, scenario: Scenario, way: Way) -> Run:
        directory = fresh_directory(self.directory, scenario.name)
        cache = self.directory / f"cache-{directory.name}"
        if scenario.warm:
            shutil.copytree(self._filled_cache(scenario, way), cache)
        else:
            cache.mkdir()
        undo = scenario.prepare(cache) if scenario.prepare else None
        try:
            run = RunProcesses(
                scenario, way, directory=directory, cache=cache, headers=self._headers()
            ).run()
        finally:
            if undo is not None:
                undo()
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        return run

    def _headers(self) -> Path:
        headers = self.caches / "headers"
        headers.mkdir(parents=True, exist_ok=True)
        return headers.absolute()

    def _filled_cache(self, scenario: Scenario, way: Way) -> Path:
        """Of a run without a fault, shared by all scenarios with the same program."""
        program = scenario.program.partition(":")[2]
        chosen = [str(scenario.options.get(name) or "plain") for name in ("hook", "graph")]
        words = [program, *chosen, str(scenario.ranks), way, package_digest(), torch_version()]
        cache = self.caches / "-".join(["filled", *words])
        if cache.exists() or way == "eager":
            cache.mkdir(exist_ok=True)
            return cache
        filling = {"steps": FILLING_STEPS, "modules": 1, "goes_on": None, "pause_s": 0}
        calm = dataclasses.replace(
            scenario,
            options={**scenario.options, **filling},
            launcher="python",
            limit_s=600.0,
        )
        directory = fresh_directory(self.directory, "filling")
        filled = fresh_directory(self.caches, "filling")
        filled.mkdir(parents=True)
        run = RunProcesses(
            calm,
            way,
            directory=directory,
            cache=filled,
            headers=self._headers(),
            without_fault=True,
        ).run()
        if not all(rank.is_right for rank in run.ranks):
            logs = "\n".join(rank.log for rank in run.ranks)
            raise RuntimeError(f"{scenario.name}, {way}: a run without a fault failed\n{logs}")
        filled.replace(cache)
        return cache

    def _append(self, verdict: Verdict) -> None:
        with (self.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(dataclasses.asdict(verdict)) + "\n")


def package_digest() -> str:
    """Of the package's sources: what another state of them has cached is of no use."""
    spec = importlib.util.find_spec("fusion_passes")
    (package,) = (spec and spec.submodule_search_locations) or [""]
    sources = b"".join(path.read_bytes() for path in sorted(Path(package).rglob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:12]


def torch_version() -> str:
    """The installed one."""
    return importlib.metadata.version("torch")
