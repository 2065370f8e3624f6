"""The tool that runs torch's own DDP tests: which it takes, how it rewrites them, what it compares.

Two of torch's tests run here, one of them under the flag; all of them take hours.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch_tests

from torch_tests_run import running
from torch_tests_run.comparing import (
    Known,
    Outcome,
    Run,
    as_json,
    compare,
    last_error,
    no_longer,
    read_known,
    summary,
)
from torch_tests_run.source import TorchTest, ddp_tests, rewritten, source_path

TOOL = Path(torch_tests.__file__)
PASSED = Outcome("passed")
FAILED = Outcome("failed", "AssertionError: Scalars are not equal!")
FLAGGED = Run("test_ddp", "as-is", "concat")


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


# Comparing


@pytest.mark.parametrize(
    ("reference", "outcome", "verdict"),
    [
        (PASSED, PASSED, "alike"),
        (PASSED, FAILED, "new"),
        (PASSED, Outcome("timed out"), "new"),
        (PASSED, Outcome("skipped"), "new"),
        (FAILED, Outcome("not run"), "no reference"),
        (Outcome("skipped"), PASSED, "no reference"),
    ],
)
def test_verdict(reference: Outcome, outcome: Outcome, verdict: str) -> None:
    (comparison,) = compare({FLAGGED.reference: reference, FLAGGED: outcome}, [])
    assert comparison.verdict == verdict


def test_models_are_compared_with_the_same_models() -> None:
    compiled = Run("test_ddp", "compiled", "concat")
    assert compare({FLAGGED.reference: PASSED, compiled: FAILED}, []) == []


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        (Known("test_d*", "failed", "why", "not equal"), "known"),
        (Known("test_ddp", "failed", "why", "not close"), "new"),
        (Known("test_ddp", "timed out", "why"), "new"),
        (Known("test_ddp", "failed", "why", models="compiled"), "new"),
        (Known("test_ddp", "failed", "why", mode="coalesced"), "new"),
        (Known("test_other", "failed", "why"), "new"),
    ],
)
def test_a_known_difference_is_one_that_fails_in_the_same_words(known: Known, verdict: str) -> None:
    outcomes = {FLAGGED.reference: PASSED, FLAGGED: FAILED}
    (comparison,) = compare(outcomes, [known])
    assert (comparison.verdict, comparison.reason) == (verdict, "why" * (verdict == "known"))


def test_known_differences_that_are_gone() -> None:
    known = [
        Known("test_ddp", "failed", "gone"),
        Known("test_other", "failed", "not run"),
        Known("test_*", "failed", "left"),
    ]
    other = Run("test_third", "as-is", "concat")
    outcomes = {FLAGGED.reference: PASSED, FLAGGED: PASSED}
    outcomes |= {other.reference: PASSED, other: FAILED}
    assert no_longer(compare(outcomes, known), known) == known[:1]


def test_the_list_of_known_differences_is_sound(tmp_path: Path) -> None:
    known = read_known(torch_tests.KNOWN)
    names = [test.name for test in ddp_tests(source_path().read_text())]
    for entry in known:
        runs = [Run(name, "as-is", "concat") for name in names]
        runs += [Run(name, "compiled", "coalesced") for name in names]
        assert any(entry.concerns(run) for run in runs), entry
    file = tmp_path / "known.json"
    file.write_text('[{"test": "test_ddp", "kind": "failed", "reason": ""}]')
    with pytest.raises(ValueError, match="reason"):
        read_known(file)


def test_what_is_written_has_the_verdicts() -> None:
    outcomes = {FLAGGED: Outcome("failed", "E", 2, 1.5), FLAGGED.reference: PASSED}
    flagged, reference = json.loads(as_json(outcomes, []))["runs"]
    assert (flagged["mode"], flagged["verdict"], flagged["words"]) == ("concat", "new", "E")
    assert reference["mode"] == "off"
    assert "verdict" not in reference


def test_summary_counts_by_variant() -> None:
    outcomes = {FLAGGED.reference: PASSED, FLAGGED: Outcome("passed", buckets=3)}
    counts = {"as-is, concat: alike": 1, "as-is, concat: fused": 1}
    assert summary(compare(outcomes, [])) == counts


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
    ("test", "timeout_s", "outcome"),
    [
        (_hang, 1.0, ("timed out", "not done after 1 s")),
        (_die, 60.0, ("failed", "ended without a result: MemoryError: of a test")),
    ],
)
def test_a_run_that_hangs_or_dies_leaves_nothing(
    test: Callable[..., None],
    timeout_s: float,
    outcome: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(running, "run_test", test)
    found = running.run_one(FLAGGED, 2, logs=tmp_path, timeout_s=timeout_s)
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


@pytest.mark.slow
@pytest.mark.nightly
def test_torch_s_tests_run(tmp_path: Path) -> None:
    """One without DDP's backward and one that trains, which is fused."""
    output = tmp_path / "results.json"
    command = [sys.executable, str(TOOL), "--models", "as-is", "--mode", "coalesced"]
    command += ["--output", str(output)]
    command += ["--select", "test_grads_same_across_ranks_with_no_sync"]
    command += ["--select", "test_DistributedDataParallel_requires_grad"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {row["test"]: row for row in json.loads(output.read_text())["runs"] if "verdict" in row}
    assert [row["verdict"] for row in runs.values()] == ["alike", "alike"]


def test_a_pattern_that_fits_no_test(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        torch_tests.main(["--select", "test_nothing"])
    assert "no test has a name like test_nothing" in capsys.readouterr().err
    assert torch_tests.main(["--select", "*CPU", "--list"]) == 0
    assert capsys.readouterr().out == "test_DistributedDataParallelCPU (2 ranks)\n"
