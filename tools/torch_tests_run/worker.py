"""Runs one of torch's DDP tests: this process and the ranks that it forks.

Runs under the flag import the package with ``FUSION_PASSES_DDP_FUSION`` set. Without the flag it is
not even imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_tests_run.source import COMPILED, MODULE, rewritten

FLAG = "FUSION_PASSES_DDP_FUSION"
PACKAGE = "fusion_passes"

RESULT = "result.json"

_PRELOADED = (
    "torch._dynamo.compiled_autograd",
    "torch._inductor.codegen.cpp",
    "torch._inductor.compile_fx",
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_utils",
)


def preload() -> None:
    """Import what each run needs, once: a test takes less than its imports do."""
    assert PACKAGE not in sys.modules, "runs without the flag are without the package"
    for name in _PRELOADED:
        importlib.import_module(name)


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
