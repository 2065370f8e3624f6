"""The tool that runs torch's own DDP tests: which it takes, how it rewrites them, what it compares.

Two of torch's tests run here, one of them under the flag; all of them take hours.
"""

from __future__ import annotations

import ast
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch_tests

from torch_tests_run import conftest, running
from torch_tests_run.known import Known, Outcome, judge, read_known
from torch_tests_run.running import last_error
from torch_tests_run.source import TorchTest, ddp_tests, rewritten, source_path

TOOL = torch_tests.__file__
PASSED = Outcome("passed")
FAILED = Outcome("failed", "AssertionError: Scalars are not equal!")


# Which tests


def test_tests_that_construct_ddp_directly_or_through_a_helper() -> None:
    source = """
class DistributedTest:
    class _DistTestBase:
        def _helper(self):
            return nn.parallel.DistributedDataParallel(model)
        def _outer(self):
            self._helper()
        @require_world_size(4)
        def test_direct(self):
            DDP(model)
        def test_indirect(self):
            self._outer()
        @skip_if_lt_x_gpu(2)
        def test_broadcast(self):
            dist.broadcast(tensor)
"""
    assert ddp_tests(source) == [TorchTest("test_direct", 4), TorchTest("test_indirect", 2)]


def test_the_installed_torch_has_them() -> None:
    names = {test.name for test in ddp_tests(source_path().read_text())}
    assert {"test_DistributedDataParallelCPU", "test_ddp_uneven_inputs"} <= names
    assert "test_all_reduce_sum" not in names
    assert len(names) > 90


# On the CPU


def cpu(source: str, *, compiled: bool = False) -> str:
    return ast.unparse(rewritten(source, compiled=compiled))


@pytest.mark.parametrize(
    ("source", "there"),
    [
        ("Net().cuda(rank)(x)", "Net()(x)"),
        ("torch.cuda.set_device(rank)", "None"),
        ("torch.cuda.manual_seed(rank)", "torch.cuda.manual_seed(rank)"),
        ("x.to(self.rank)", "x.to('cpu')"),
        ("x.to(torch.float16)", "x.to(torch.float16)"),
        ("torch.ones(2, device=self.rank)", "torch.ones(2, device='cpu')"),
        ("f(device=None)", "f(device=None)"),
        ("torch.device(f'cuda:{rank}')", "torch.device('cpu')"),
        ("{'cuda:0': f'cuda:{rank:d}'}", "{'cpu': 'cpu'}"),
        ("DDP(net.cuda(), device_ids=[rank])", "DDP(net, device_ids=None)"),
        ("table.backend_feature['cuda']", "table.backend_feature['cuda']"),
    ],
)
def test_rewritten_for_the_cpu(source: str, there: str) -> None:
    assert cpu(source) == there


def test_only_decorators_that_ask_for_gpus_go() -> None:
    source = "@skip_if_lt_x_gpu(2)\n@require_world_size(4)\n@unittest.skipIf(IS_LINUX, 'x')\n"
    source += "def test():\n    pass"
    assert cpu(source) == "@require_world_size(4)\ndef test():\n    pass"


def test_lines_keep_their_numbers() -> None:
    tree = rewritten("\n\nx = y.cuda(\n    rank\n)\nz = 1", compiled=False)
    assert [node.lineno for node in tree.body] == [3, 6]


def test_each_new_module_is_compiled() -> None:
    source = "ddp = nn.parallel.DistributedDataParallel(net)\nisinstance(ddp, DDP)"
    wanted = "ddp = _compiled(nn.parallel.DistributedDataParallel(net))\nisinstance(ddp, DDP)"
    assert cpu(source, compiled=True) == wanted


# Judging


@pytest.mark.parametrize(
    ("reference", "outcome", "verdict"),
    [
        (PASSED, PASSED, "passed"),
        (PASSED, FAILED, "test_ddp [*]: why"),
        (PASSED, Outcome("failed", "AssertionError: 1 is not 2"), "failed"),
        (PASSED, Outcome("timed out", FAILED.words), "failed"),
        (PASSED, Outcome("skipped"), "failed"),
        (FAILED, FAILED, "skipped"),
        (Outcome("timed out"), PASSED, "skipped"),
        (Outcome("skipped"), PASSED, "skipped"),
    ],
)
def test_verdict(reference: Outcome, outcome: Outcome, verdict: str) -> None:
    """A known difference is one that fails in the same words."""
    known = [Known("test_ddp", "not close", "another"), Known("test_ddp", "not equal", "why")]
    try:
        judge(reference, outcome, known)
        found = "passed"
    except pytest.skip.Exception:
        found = "skipped"
    except pytest.xfail.Exception as error:
        found = str(error)
    except pytest.fail.Exception:
        found = "failed"
    assert found == verdict


def test_the_list_of_known_differences_is_sound(tmp_path: Path) -> None:
    names = [test.name for test in ddp_tests(source_path().read_text())]
    for entry in read_known():
        assert any(entry.concerns(name, "compiled") for name in names), entry
    assert not Known("test_*", "no", "why", models="compiled").concerns("test_ddp", "as-is")
    file = tmp_path / "known.json"
    file.write_text('[{"test": "test_ddp", "words": "no", "reason": ""}]')
    with pytest.raises(ValueError, match="reason"):
        read_known(file)


def test_what_was_averaged_and_what_differs_no_longer_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = [Known("test_ddp", "no", "gone"), Known("test_other", "no", "not run")]
    known.append(Known("test_*", "no", "left"))
    monkeypatch.setattr(conftest, "read_known", lambda: known)
    properties = [("test", "test_ddp"), ("models", "as-is"), ("averaged", 2)]
    report = SimpleNamespace(user_properties=properties, wasxfail=f"reason: {known[2]}")
    said = list[str]()
    stats = {"passed": [report], "xfailed": [report]}
    reporter: Any = SimpleNamespace(stats=stats, write_line=said.append)
    conftest.pytest_terminal_summary(reporter)
    averaged = "1 of 1 that passed were averaged by us"
    assert said == [averaged, "no longer differs: test_ddp [*]: gone"]


def test_the_error_of_the_first_rank_without_what_changes() -> None:
    text = """RuntimeError: Process 0 exited with error code 10 and exception:
Traceback (most recent call last):
AssertionError: Tensor-likes at 0x7f12 are not close!

Mismatched elements: 1 / 4
Process 1 exited with error code 10 and exception:
RuntimeError: Connection closed by peer
"""
    assert last_error(text) == "AssertionError: Tensor-likes at 0x... are not close!"
    assert last_error("only words") == "only words"


# Processes


SLEEP = f"import time; time.sleep(600)  # {os.getpid()}"


def _hang(*_: object, **__: object) -> None:
    subprocess.Popen([sys.executable, "-c", SLEEP])
    time.sleep(600)


def _die(*_: object, **__: object) -> None:
    raise MemoryError("of a test")


@pytest.mark.parametrize(
    ("test", "limit_s", "outcome"),
    [
        (_hang, "1", ("timed out", "not done after 1 s")),
        (_die, "60", ("failed", "ended without a result: MemoryError: of a test")),
    ],
)
def test_a_run_that_hangs_or_dies_leaves_nothing(
    test: Callable[..., None],
    limit_s: str,
    outcome: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "run_test", test)
    monkeypatch.setattr(running, "KILLED_S", 0.0)
    monkeypatch.setenv(running.LIMIT, limit_s)
    found = running.run_one(TorchTest("test_ddp", 2), "as-is", "concat")
    assert (found.kind, found.words) == outcome
    deadline = time.monotonic() + 60
    while _sleeping():  # Until init has taken note of a killed child of a killed child.
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _sleeping() -> list[str]:
    """The processes that :func:`_hang` has started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if SLEEP.encode() in path.read_bytes() else []
    return found


def _run(*arguments: str) -> str:
    command = [sys.executable, TOOL, "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_torch_s_tests_run() -> None:
    """One that trains, which is averaged, one that differs, and two that do not pass here."""
    names = "across_ranks_with_no_sync or static_graph_api_cpu or mixed_precision_grad_as_bucket"
    said = _run("-k", f"({names}) and as-is and coalesced")
    assert "1 passed, 2 skipped, " in said
    assert ", 1 xfailed" in said
    assert "1 of 1 that passed were averaged by us" in said


def test_tests_are_chosen_by_name_and_variant() -> None:
    said = _run("-k", "static_graph_api_cpu and compiled and concat", "--collect-only")
    assert "::test_passes_as_without_the_flag[test_static_graph_api_cpu-compiled-concat]" in said
    assert said.count("::") == 1
