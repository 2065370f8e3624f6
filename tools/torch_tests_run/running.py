"""Runs one of torch's DDP tests in a process of its own, which forks the test's ranks, and leaves
none behind.

Runs under the flag import the package with ``FUSION_PASSES_DDP_FUSION`` set. Without the flag it is
not even imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_tests_run.comparing import OFF, Outcome, Run, last_error
from torch_tests_run.source import COMPILED, MODULE, rewritten

FLAG = "FUSION_PASSES_DDP_FUSION"
PACKAGE = "fusion_passes"

RESULT = "result.json"

STACKS_S = 10.0
"""How long before a run is killed torch's own time limit prints where the ranks hang."""

TAIL = 4000
"""Characters of the log that an error is looked for in, if a test died without a word."""

_ENVIRONMENT = {
    "BACKEND": "gloo",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Kernels are shared between runs, for time; graphs are not: each run runs the passes.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}
"""Of all runs; before torch is imported."""

_PRELOADED = (
    "torch._dynamo.compiled_autograd",
    "torch._inductor.codegen.cpp",
    "torch._inductor.compile_fx",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_utils",
)


def prepare(cache: Path, timeout_s: float) -> None:
    """Set the environment of all runs, and import what each needs, once: a test takes less than its
    imports do.

    Args:
        cache: Inductor's, unless the environment names one.
        timeout_s: for each run.
    """
    assert PACKAGE not in sys.modules, "runs without the flag are without the package"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ |= _ENVIRONMENT
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(max(1, timeout_s - STACKS_S)))
    os.environ.pop(FLAG, None)
    for name in _PRELOADED:
        importlib.import_module(name)


def run_one(run: Run, ranks: int, *, logs: Path, timeout_s: float) -> Outcome:
    """Run a test, and kill what it leaves running.

    Args:
        run: the test and its variant.
        ranks: how many processes the test needs.
        logs: directory for what they print.
        timeout_s: for the run.
    """
    log = logs / f"{run.test}-{run.models}-{run.mode}.log"
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as name:
        directory = Path(name)
        process = multiprocessing.get_context("fork").Process(
            target=_run_in_session, args=(run, ranks, directory, log)
        )
        start = time.monotonic()
        process.start()
        try:
            process.join(timeout_s)
        finally:
            assert process.pid is not None, "it was started"
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # It may not have got to its own session yet.
            process.join()
        return _outcome(directory, log, round(time.monotonic() - start, 1), timeout_s)


def _run_in_session(run: Run, ranks: int, directory: Path, log: Path) -> None:
    """What the forked process does; its ranks stay in its session, so that killing that reaches all
    of them."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= {"WORLD_SIZE": str(ranks), "TMPDIR": str(directory)}
    os.environ |= {} if run.mode == OFF else {FLAG: run.mode}
    tempfile.tempdir = None
    run_test(run.test, compiled=run.models == "compiled", directory=directory)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # A thread that is left could keep it from ending.


def _outcome(directory: Path, log: Path, seconds: float, timeout_s: float) -> Outcome:
    buckets = directory / "buckets-0"
    fused = int(buckets.read_text() or 0) if buckets.exists() else 0
    if seconds >= timeout_s - STACKS_S:
        return Outcome("timed out", f"not done after {timeout_s:g} s", fused, seconds)
    result = directory / RESULT
    if not result.exists():
        tail = log.read_text(errors="replace")[-TAIL:]
        return Outcome("failed", f"ended without a result: {last_error(tail)}", fused, seconds)
    data = json.loads(result.read_text())
    with log.open("a") as file:
        file.write(f"\n{data['kind']}\n{data['text']}\n")
    return Outcome(data["kind"], last_error(data["text"]), fused, seconds)


def run_test(test: str, *, compiled: bool, directory: Path) -> None:
    """Run a test, in a process where it may leave anything behind.

    Args:
        test: name of the method.
        compiled: whether DDP's modules are compiled.
        directory: for the result, and for the number of buckets of each rank.
    """
    is_flagged = FLAG in os.environ
    if is_flagged:
        importlib.import_module(PACKAGE)
    elif compiled:
        # The flag replaces what this does. With it, some tests fail without the flag.
        importlib.import_module("torch._dynamo.config").__dict__["optimize_ddp"] = False
    case = _case(_load(compiled=compiled), directory if is_flagged else None)
    result = unittest.TestResult()
    # A suite, not a case alone: it calls setUpClass.
    unittest.TestSuite([case(test)]).run(result)
    kind, text = _judge(result)
    directory.joinpath(RESULT).write_text(json.dumps({"kind": kind, "text": text}))


def _judge(result: unittest.TestResult) -> tuple[str, str]:
    bad = [text for _, text in (*result.errors, *result.failures)]
    if bad:
        return "failed", bad[0]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    if result.testsRun != 1:
        return "failed", f"RuntimeError: {result.testsRun} tests ran instead of 1"
    return "passed", ""


def _load(*, compiled: bool) -> ModuleType:
    """Import torch's tests, rewritten."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None, "it comes with torch"
    assert spec.origin is not None, "it is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    tree = rewritten(Path(spec.origin).read_text(), compiled=compiled)
    module.__dict__[COMPILED] = _compile
    # Without this file's annotations from the future: torch looks at those of hooks.
    code = compile(tree, spec.origin, "exec", dont_inherit=True)
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
    """Return the class of torch's tests over real processes.

    Args:
        module: torch's tests.
        directory: where each rank says how many buckets it has fused; ``None``: nowhere.
    """

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
                    directory.joinpath(f"buckets-{rank}").write_text(str(_backwards()))

    return DdpTests


def _backwards() -> int:
    """How many backwards the package has averaged."""
    return sum(item.count for item in sys.modules[PACKAGE].report().backwards)
