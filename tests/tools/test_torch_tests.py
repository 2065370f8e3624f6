"""The tool that runs torch's own DDP tests: which tests it selects, how it rewrites them, and how
it compares.

A few of torch's tests run here; all of them take hours.
"""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch_tests

from tests.support.launch import launch
from torch_tests_run import conftest, running
from torch_tests_run.known import Known, Outcome, judge, read_known
from torch_tests_run.running import last_error
from torch_tests_run.source import TorchTest, ddp_tests, rewritten, source_path

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
        (
            "@skip_if_lt_x_gpu(2)\n@require_world_size(4)\n@skipIf(IS_LINUX)\ndef f(): pass",
            "@require_world_size(4)\ndef f():\n    pass",
        ),
    ],
)
def test_rewritten_for_the_cpu(source: str, there: str) -> None:
    assert ast.unparse(rewritten(source, compiled=False)) == there


def test_each_new_module_is_compiled() -> None:
    source = "ddp = nn.parallel.DistributedDataParallel(net)\nisinstance(ddp, DDP)"
    wanted = "ddp = _compiled(nn.parallel.DistributedDataParallel(net))\nisinstance(ddp, DDP)"
    assert ast.unparse(rewritten(source, compiled=True)) == wanted


# Judging


IS_RIGHT = contextlib.nullcontext()
IS_KNOWN = pytest.raises(pytest.xfail.Exception, match=r"test_ddp \[\*\]: why")
IS_WRONG = pytest.raises(pytest.fail.Exception)
IS_LEFT_OUT = pytest.raises(pytest.skip.Exception)


@pytest.mark.parametrize(
    ("reference", "outcome", "verdict"),
    [
        (PASSED, PASSED, IS_RIGHT),
        (PASSED, FAILED, IS_KNOWN),
        (PASSED, Outcome("failed", "AssertionError: 1 is not 2"), IS_WRONG),
        (PASSED, Outcome("timed out", FAILED.words), IS_WRONG),
        (PASSED, Outcome("skipped"), IS_WRONG),
        (FAILED, FAILED, IS_LEFT_OUT),
        (Outcome("timed out"), PASSED, IS_LEFT_OUT),
        (Outcome("skipped"), PASSED, IS_LEFT_OUT),
    ],
)
def test_verdict(
    reference: Outcome, outcome: Outcome, verdict: contextlib.AbstractContextManager[Any]
) -> None:
    """A known difference fails with the same text."""
    known = [Known("test_ddp", "not close", "another"), Known("test_ddp", "not equal", "why")]
    with verdict:
        judge(reference, outcome, known)


def test_the_list_of_known_differences_is_sound() -> None:
    names = [test.name for test in ddp_tests(source_path().read_text())]
    for entry in read_known():
        assert any(entry.concerns(name, "compiled") for name in names), entry
        assert entry.words, entry
        assert entry.reason, entry
    assert not Known("test_*", "no", "why", models="compiled").concerns("test_ddp", "as-is")


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


def _hang(*_: object, **__: object) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)


def _die(*_: object, **__: object) -> None:
    raise MemoryError("of a test")


@pytest.mark.usefixtures("started")
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


@pytest.mark.slow
@pytest.mark.nightly
def test_torch_s_tests_run() -> None:
    """A test that trains and is averaged, one that differs, and two that do not pass here."""
    names = "across_ranks_with_no_sync or static_graph_api_cpu or mixed_precision_grad_as_bucket"
    chosen = f"({names}) and as-is and coalesced"
    said = launch(torch_tests.__file__, "-q", "-k", chosen).stdout
    assert "1 passed, 2 skipped, " in said
    assert ", 1 xfailed" in said
    assert "1 of 1 that passed were averaged by us" in said


def test_tests_are_chosen_by_name_and_variant() -> None:
    chosen = "static_graph_api_cpu and compiled and concat"
    said = launch(torch_tests.__file__, "-q", "-k", chosen, "--collect-only").stdout
    assert "::test_passes_as_without_the_flag[test_static_graph_api_cpu-compiled-concat]" in said
    assert said.count("::") == 1
