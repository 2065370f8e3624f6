"""Runs one of torch's DDP tests in its own process, which forks the test's ranks, and leaves no
process behind.

Runs under the flag import the package with ``FUSION_PASSES_DDP_FUSION`` set. Without the flag it is
not even imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

from testing.sessions import kill_session
from torch_tests_run.known import Models, Outcome
from torch_tests_run.source import COMPILED, MODULE, TorchTest, rewritten, source_path

FLAG = "FUSION_PASSES_DDP_FUSION"
PACKAGE = "fusion_passes"

LOG, RESULT = "log.txt", "result.json"

LIMIT = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
"""Environment variable with torch's own time limit in seconds, after which it prints where the
ranks hang."""

LIMIT_S = 290
KILLED_S = 10.0
"""Time after that limit at which a run is killed, in seconds."""

TAIL = 4000
"""Number of characters of the log that are searched for an error, if a test ended without one."""

MAX_WORDS = 300
"""Maximum length of an error, in characters."""

_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Warning|Interrupt|Exit|Failure)\b")

_ENVIRONMENT = {
    "BACKEND": "gloo",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Kernels are shared between runs to save time; graphs are not: each run runs the passes.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
"""Environment of all runs, set before torch is imported."""

_PRELOADED = (
    "torch._dynamo.compiled_autograd",
    "torch._inductor.codegen.cpp",
    "torch._inductor.compile_fx",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_utils",
)


def prepare() -> None:
    """Set the environment of all runs, and import their common modules once: a test takes less time
    than its imports."""
    assert PACKAGE not in sys.modules, "runs without the flag are without the package"
    os.environ |= _ENVIRONMENT
    os.environ.setdefault(LIMIT, str(LIMIT_S))
    os.environ.pop(FLAG, None)
    for name in _PRELOADED:
        importlib.import_module(name)


def run_one(test: TorchTest, models: Models, mode: str = "") -> Outcome:
    """Run a test, under the flag if there is a mode, print its output, and kill the processes that
    it leaves."""
    limit_s = float(os.environ.get(LIMIT, LIMIT_S))
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as name:
        directory = Path(name)
        process = multiprocessing.get_context("fork").Process(
            target=_run_in_session, args=(test, models, mode, directory)
        )
        start = time.monotonic()
        process.start()
        try:
            process.join(limit_s + KILLED_S)
        finally:
            kill_session(process)
        log = (directory / LOG).read_text(errors="replace")
        print(log)
        if time.monotonic() - start >= limit_s:
            return Outcome("timed out", f"not done after {limit_s:g} s")
        result = directory / RESULT
        if not result.exists():
            return Outcome("failed", f"ended without a result: {last_error(log[-TAIL:])}")
        return Outcome(**json.loads(result.read_text()))


def _run_in_session(test: TorchTest, models: Models, mode: str, directory: Path) -> None:
    """The main function of the forked process; its ranks stay in its session, so that killing the
    session reaches all of them."""
    os.setsid()
    output = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= {"WORLD_SIZE": str(test.ranks), "TMPDIR": str(directory)}
    os.environ |= {FLAG: mode} if mode else {}
    tempfile.tempdir = None
    outcome = run_test(test.name, compiled=models == "compiled", directory=directory)
    (directory / RESULT).write_text(json.dumps(dataclasses.asdict(outcome)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # A remaining thread could keep it from ending.


def run_test(test: str, *, compiled: bool, directory: Path) -> Outcome:
    """Run a test in a process that may be left in any state. Each rank writes to the directory how
    many backwards it averaged."""
    is_flagged = FLAG in os.environ
    if is_flagged:
        importlib.import_module(PACKAGE)
    elif compiled:
        # The flag replaces the effect of this. With it, some tests fail without the flag.
        importlib.import_module("torch._dynamo.config").__dict__["optimize_ddp"] = False
    case = _case(_load(compiled=compiled), directory if is_flagged else None)
    result = unittest.TestResult()
    # A suite instead of a case, because it calls setUpClass.
    unittest.TestSuite([case(test)]).run(result)
    counted = directory / "averaged-0"
    averaged = int(counted.read_text() or 0) if counted.exists() else 0
    bad = [text for _, text in (*result.errors, *result.failures)]
    if bad:
        print(bad[0])
        return Outcome("failed", last_error(bad[0]), averaged)
    if result.skipped:
        return Outcome("skipped", result.skipped[0][1])
    if result.testsRun != 1:
        return Outcome("failed", f"RuntimeError: {result.testsRun} tests ran instead of 1")
    return Outcome("passed", averaged=averaged)


def last_error(text: str) -> str:
    """The line with the error in a traceback, or in the first rank's traceback."""
    first = text.partition("\nProcess 1 exited with")[0]
    lines = [line.strip() for line in first.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR.match(line)]
    words = re.sub(r"0x[0-9a-f]+", "0x...", (named or lines or [""])[-1])
    return words[:MAX_WORDS]


def _load(*, compiled: bool) -> ModuleType:
    """Import torch's tests, rewritten."""
    path = source_path()
    module = ModuleType(MODULE)
    module.__file__ = str(path)
    sys.modules[MODULE] = module
    tree = rewritten(path.read_text(), compiled=compiled)
    module.__dict__[COMPILED] = _compile
    # Without this file's annotations from the future, because torch inspects those of hooks.
    code = compile(tree, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    module.__dict__["init_multigpu_helper"] = _one_device_for_each_rank
    return module


def _compile(ddp: Any) -> Any:
    """Compile a new DDP module in place, so that it keeps its class and its attributes."""
    ddp.compile()
    return ddp


def _one_device_for_each_rank(world_size: int, _: str) -> dict[int, list[int]]:
    return {rank: [rank] for rank in range(world_size)}


def _case(module: Any, directory: Path | None) -> type[unittest.TestCase]:
    """Return the class of torch's tests with real processes. Each rank writes to the directory, if
    there is one, how many backwards it averaged."""

    class DdpTests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:  # noqa: N802 - unittest's name
            super().setUp()
            # Spawned ranks would import torch again, which takes longer than most tests.
            self._start_processes(module.torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, *args: Any, **kwargs: Any) -> None:
            try:
                super()._run(rank, *args, **kwargs)
            finally:
                if directory is not None:
                    directory.joinpath(f"averaged-{rank}").write_text(str(_averaged()))

    return DdpTests


def _averaged() -> int:
    """Number of backwards that the package averaged."""
    return sum(item.count for item in sys.modules[PACKAGE].report().backwards)
