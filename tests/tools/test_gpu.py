"""The tool that runs what needs a GPU: its plan, and on the CPU whatever a CPU can run of it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from torch import nn

from bench_steps import places
from bench_steps.rows import Checked
from fusion_passes import config
from gpu_checks import (
    copies,
    methods,
    net,
    norms,
    pages,
    plan,
    rank,
    shaped,
    sharing,
    starts,
    subjects,
    trainers,
)
from gpu_checks import machine as machines
from gpu_checks.machine import Machine, machine
from gpu_checks.parts import (
    DTYPES,
    LATE_ON_A_GPU,
    PARTS,
    PROBE,
    REDUCE_DTYPES,
    SCALINGS,
    Check,
    Part,
    choose,
)
from gpu_checks.results import Result, Row, read_result
from gpu_checks.sites import Sharing, Site
from testing.fake_world import one_rank
from testing.scenarios.catalog import SCENARIOS
from testing.scenarios.entries import Scenario
from tests.support import bench_ranks, gpu_parts

CATALOG = gpu_parts.__name__
ONE_GPU = Machine("cuda", name="a GPU", count=1, torch="2.13.0", nccl="2.29.7", code="c0de")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """With ranks that answer and measure nothing."""
    monkeypatch.setattr(net, "WORKER", bench_ranks.__name__)
    monkeypatch.setattr(methods, "TURN_S", 3.0)
    return Site("cpu", "gloo", str(tmp_path), cores=1, deadline=time.monotonic() + 1000)


# --- The plan ------------------------------------------------------------------------------------


def test_every_option_is_tried_in_every_mode_and_on_two_ranks() -> None:
    assert SCALINGS == config.SCALING_OPTIONS
    assert REDUCE_DTYPES == config.REDUCE_DTYPES
    for ranks in (1, 2):
        for mode in config.REDUCE_MODES:
            flags = {
                (check.dtype, check.flag["scaling"], check.flag.get("reduce_dtype"))
                for part in PARTS
                for check in part.checks
                if part.ranks == ranks and part.mode == mode and "scaling" in check.flag
            }
            scalings = [name for name in SCALINGS if (mode, name) != ("coalesced", "bucket")]
            plain = {(dtype, scaling, None) for dtype in DTYPES for scaling in scalings}
            sent = {("fp32", scaling, kind) for kind in REDUCE_DTYPES for scaling in scalings}
            assert flags == plain | sent


def test_features_that_each_check_trains_are_trained_on_a_gpu_too() -> None:
    checks = [check for part in PARTS if part.ranks == 2 for check in part.checks]
    trained = {(check.scenario.feature, check.flag["mode"]) for check in checks}
    for scenario in SCENARIOS:
        if scenario.parallelism != "ddp-2" or not scenario.tested:
            continue
        left_out = bool(scenario.fails_on_oldest) or scenario.feature in LATE_ON_A_GPU
        assert ((scenario.feature, scenario.tested[0]) in trained) != left_out, scenario.feature


def test_parts_and_their_rows_have_names_of_their_own() -> None:
    assert len({part.name for part in (PROBE, *PARTS)}) == len(PARTS) + 1
    for part in PARTS:
        titles = [check.title for check in part.checks]
        assert len(set(titles)) == len(titles)
        assert {check.scenario.ranks for check in part.checks} <= {part.ranks}


@pytest.mark.parametrize("part", [PROBE, *PARTS], ids=lambda part: part.name)
def test_parts_get_as_far_as_ddp(part: Part) -> None:
    with one_rank():
        plan.check_part(part)


def test_a_broken_plan_is_found() -> None:
    def part(target: str, **flag: Any) -> Part:
        check = Check(Scenario("gpu", "x", "x", target), "fp32", {"mode": "concat"} | flag)
        return Part("broken", "correctness", checks=(check,))

    plain = "testing.scenarios.features.loops:plain"
    plan.check_part(part(plain))
    with pytest.raises(ValueError, match="scaling"):
        plan.check_part(part(plain, scaling="twice"))
    with pytest.raises(AttributeError, match="never_was"):
        plan.check_part(part("gpu_checks.targets:never_was"))
    with pytest.raises(ValueError, match="makes no DDP module"):
        plan.check_part(part("builtins:repr"))


@pytest.mark.parametrize(
    ("factory", "parameters"), [(subjects.gpt2, 124_439_808), (subjects.resnet50, 25_557_032)]
)
def test_models_are_what_they_are_called(factory: Any, parameters: int) -> None:
    with torch.device("meta"):
        model, _ = factory()
    assert sum(value.numel() for value in model.parameters()) == parameters


def test_images_are_channels_last() -> None:
    model, batch = subjects.tiny_resnet()
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    for tensor in (convolution.weight, *batch(0)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_the_gpt_learns() -> None:
    torch.manual_seed(0)
    made, batch = subjects.tiny_gpt()
    assert isinstance(made, nn.Module)
    optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = made(*batch(0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_without_a_gpu_the_plan_is_checked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    assert gpu.main(["--only", "copies"]) == 0
    said = capfd.readouterr().out
    assert "No GPU: torch" in said
    assert said.endswith("The plan is sound.\n")
    assert "BROKEN" not in said
    assert list(tmp_path.iterdir()) == []


def test_this_machine_is_known() -> None:
    here = machine("cpu")
    assert (here.device, here.torch) == ("cpu", torch.__version__)
    assert here.code in here.key
    if not torch.cuda.is_available():
        assert machine("cuda").device == ""
        assert machine("cuda").why_none.startswith(f"torch {torch.__version__}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "copys"], "--only must be one of norms, .*, but is 'copys'"),
        (["--seconds", "0"], "--seconds must be more than 0, but is 0. Give more."),
        (["--jobs", "0"], "--jobs must be at least 1, but is 0. Give more."),
    ],
)
def test_options_that_are_off_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(arguments)
    assert ended.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_parts_are_chosen_in_their_order() -> None:
    assert [part.name for part in choose(PARTS, ["options-concat", "copies"])] == [
        "copies",
        "options-concat",
    ]
    assert choose(PARTS, []) == list(PARTS)
    first = ["norms", "net-gpt2", "graphs", "copies", "starts", "net-resnet"]
    assert [part.name for part in PARTS[:6]] == first, "short ones before those that end the time"


# --- A run ---------------------------------------------------------------------------------------


def _run(directory: Path, *arguments: str) -> tuple[int, str]:
    page = directory / "page.md"
    common = ["--device", "cpu", "--results", str(directory / "results"), "--out", str(page)]
    return gpu.main([*common, *arguments], CATALOG), page.read_text()


def _result(directory: Path, part: str) -> dict[str, Any]:
    return json.loads((directory / "results" / f"{part}.json").read_text())


@pytest.mark.slow
def test_a_part_that_fails_stops_no_other_and_a_good_one_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(gpu_parts.PID_FILE, str(tmp_path / "pid"))
    monkeypatch.setattr(gpu, "_ask_machine", lambda *_: replace(ONE_GPU, device="cpu"))
    names = ["hangs", "raises", "dies", "is-wrong", "is-right"]
    chosen = [word for name in names for word in ("--only", name)]
    status, page = _run(tmp_path, *chosen)
    assert status == 1
    failures = {name: _result(tmp_path, name)["failure"] for name in names}
    assert failures == {
        "hangs": "not done after 9 s",
        "raises": "rank 0 ended with 1: RuntimeError: no memory is left",
        "dies": "rank 0 ended with 3: it said nothing",
        "is-wrong": "",
        "is-right": "",
    }
    assert "| right | 12.3 |  | cpu |" in page
    assert "| what there was before | 2.00 |  |  |" in page
    assert "| wrong |  |  | **wrong** values differ |" in page
    assert "1 of 5 parts are as they must be. Wrong: " in page
    assert "tools/gpu.py --device cpu" in page
    assert not _is_alive(int((tmp_path / "pid").read_text())), "it ends with its part"

    written = (tmp_path / "results" / "is-right.json").stat().st_mtime_ns
    assert _run(tmp_path, "--only", "is-right")[0] == 0
    assert "is-right: done before" in capsys.readouterr().out
    assert "1 of 5 parts are as they must be." in (tmp_path / "page.md").read_text(), "as before"
    assert (tmp_path / "results" / "is-right.json").stat().st_mtime_ns == written
    assert _run(tmp_path, "--only", "is-right", "--again")[0] == 0
    assert (tmp_path / "results" / "is-right.json").stat().st_mtime_ns > written


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.nightly
def test_trainings_are_judged_one_by_one(tmp_path: Path) -> None:
    status, page = _run(tmp_path, "--only", "trains")
    assert status == 1
    rows = [Row(**row) for row in _result(tmp_path, "trains")["rows"]]
    assert [row.is_right for row in rows] == [True, False, False, True, False, False]
    assert rows[0].words == ""
    assert "2 differences from eager DDP" in rows[1].words
    assert rows[2].words.startswith("refused: fake=True is not supported")
    assert rows[3].words == "", "both went on"
    assert "on ranks [1] only: ddp_fusion does not like rank 1" in rows[4].words
    assert rows[5].words == 'not run, because of "one rank fails, fp32"'
    assert "| a real one, fp32 | equal |" in page
    assert "| another result, fp32 | **wrong** |" in page
    assert "2 ranks over gloo" in page


def test_without_time_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_ask_machine", lambda *_: replace(ONE_GPU, device="cpu"))
    clock = iter([0.0, *[1000.0] * 100])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    status, page = _run(tmp_path, "--only", "is-right")
    assert status == 1
    assert "0 of 1 parts are as they must be. Not run: is-right." in page
    assert "| `is-right` |  | not run |" in page


def test_results_of_other_code_or_torch_are_not_kept(tmp_path: Path) -> None:
    Result("copies", ONE_GPU.key, "nccl", 1.0, (Row("a", figures={"s": 1.0}),)).write(tmp_path)
    kept = read_result(tmp_path, "copies", ONE_GPU.key)
    assert kept is not None
    assert kept.is_right
    assert kept.rows[0].figures == {"s": 1.0}
    assert read_result(tmp_path, "starts", ONE_GPU.key) is None
    others: list[dict[str, Any]] = [{"code": "other"}, {"torch": "2.14.0"}, {"name": "another GPU"}]
    for other in others:
        assert read_result(tmp_path, "copies", replace(ONE_GPU, **other).key) is None


def test_a_result_without_rows_is_not_right() -> None:
    result = Result("copies", "", "nccl", 1.0)
    assert not result.is_right
    assert replace(result, rows=(Row("a"),)).is_right
    assert not replace(result, rows=(Row("a"),), failure="not done after 9 s").is_right
    assert not replace(result, rows=(Row("a"), Row("b", False))).is_right


# --- Two ranks -----------------------------------------------------------------------------------


def _session(where: Machine, directory: Path) -> gpu.Session:
    options = gpu._parser().parse_args(["--results", str(directory)])
    return gpu.Session(options, CATALOG, where, directory, [])


@pytest.mark.parametrize(
    ("where", "backend", "reason"),
    [
        (replace(ONE_GPU, device="cpu"), "gloo", "this is the CPU"),
        (replace(ONE_GPU, count=2), "nccl", ""),
    ],
)
def test_two_ranks_use_what_there_is(
    where: Machine, backend: str, reason: str, tmp_path: Path
) -> None:
    assert _session(where, tmp_path)._choose_backend() == (backend, reason)


@pytest.mark.parametrize("has_service", [False, True])
@pytest.mark.parametrize(
    ("where", "works", "backend", "nccl"),
    [
        (ONE_GPU, [True], "nccl", "2.29.7"),
        (ONE_GPU, [False], "gloo", "2.29.7"),
        (replace(ONE_GPU, nccl="2.30.4", shares_gpu=True), [False, True], "nccl", "2.30.4"),
        (replace(ONE_GPU, newer_nccl="2.30.7", newer_file="/x"), [True], "nccl", "2.29.7"),
        (replace(ONE_GPU, newer_nccl="2.30.7", newer_file="/x"), [False, True], "nccl", "2.30.7"),
        (replace(ONE_GPU, newer_nccl="2.30.7", newer_file="/x"), [False] * 2, "gloo", "2.29.7"),
    ],
)
def test_nccl_is_asked_before_it_is_used(
    where: Machine,
    works: list[bool],
    backend: str,
    nccl: str,
    has_service: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As two machines, which any version takes on one GPU; then as two ranks of one, which newer
    ones take."""
    asked: list[tuple[bool, str, str]] = []

    def probe(parts: Any, start: Any, *, jobs: int, on_result: Any) -> None:
        way = session._sharing
        asked.append((way.apart, Path(way.mps).name, os.environ.get("LD_PRELOAD", "")))
        right = works[len(asked) - 1]
        failure = "" if right else "rank 0 ended with 1: ncclInvalidUsage"
        rows = (Row("two ranks"),) if right else ()
        on_result(parts[0], Result("probe", "", "nccl", 1.0, rows, failure))

    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.delenv("LD_PRELOAD")
    monkeypatch.setattr(gpu, "run_parts", probe)
    monkeypatch.setattr(sharing, "start", lambda _: has_service)
    session = _session(where, tmp_path)
    works = [False] * has_service + works
    reason = "" if backend == "nccl" else "rank 0 ended with 1: ncclInvalidUsage"
    assert session._choose_backend() == (backend, reason)
    ways = [(True, "mps", "")] if has_service else []
    ways += [(True, "", ""), (False, "", where.newer_file)]
    assert asked == ways[: len(asked)]
    assert len(asked) == len(works)
    assert session._machine.nccl == nccl
    assert os.environ.get("LD_PRELOAD", "") == ("/x" if nccl == "2.30.7" else "")


def test_a_service_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / sharing.COMMAND
    said = tmp_path / "said"
    command.write_text(f"#!/bin/sh\necho $1 ${sharing.DIRECTORY} $(cat) >> {said}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert sharing.start(tmp_path / "mps")
    sharing.end(tmp_path / "mps")
    assert said.read_text().split() == ["-d", f"{tmp_path}/mps", f"{tmp_path}/mps", "quit"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sharing, "PATHS", ())
    assert not sharing.start(tmp_path / "mps")


def test_ranks_of_one_gpu_can_be_machines_of_their_own(tmp_path: Path) -> None:
    network = shaped.Network("a network", prefixes=(("ip", "0"), ("ip", "1")))
    site = Site("cuda", "nccl", str(tmp_path), cores=2, sharing=Sharing(True))
    prefixes = net.place_of(site, "gpt2", network).prefixes
    assert prefixes == tuple(
        ("ip", f"{rank}", "env", f"NCCL_HOSTID=rank-{rank}") for rank in range(2)
    )
    together = net.place_of(replace(site, sharing=Sharing()), "gpt2", network)
    assert together.prefixes == network.prefixes
    assert together.variables["NCCL_SHM_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("where", "variables"),
    [
        (ONE_GPU, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (replace(ONE_GPU, count=2), {}),
        (replace(ONE_GPU, device="cpu"), {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_ranks_know_which_gpus_are_theirs(
    where: Machine, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    class Rank:
        pid = 2**30  # Nobody's.

        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            started.append(env)

        def wait(self) -> int:
            return 0

    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "Popen", Rank)
    part = next(part for part in PARTS if part.ranks == 2)
    begun = _session(where, tmp_path)._start(part)
    assert begun is not None
    begun.discard()
    assert len(started) == 2
    for environment in started:
        assert variables.items() <= environment.items()
        shares = "NCCL_MULTI_RANK_GPU_ENABLE"
        assert (shares in environment) == (shares in variables)


def test_gloo_coalesces_nothing_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = _session(ONE_GPU, tmp_path)
    monkeypatch.setattr(session, "_choose_backend", lambda: ("gloo", "NCCL refuses"))
    able = [part.name for part in session._able(PARTS)]
    left_out = [part.name for part in PARTS if part.name not in able]
    coalesced = [part.name for part in PARTS if (part.mode, part.ranks) == ("coalesced", 2)]
    assert left_out == coalesced
    assert {"options-coalesced-2", "loops-coalesced-2", "features-1-coalesced-2"} <= {*left_out}
    assert _session(replace(ONE_GPU, count=2), tmp_path)._able(PARTS) == list(PARTS)


def test_the_nccl_that_runs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the one that torch was built with, which ``torch.cuda.nccl.version`` names."""

    class Library:
        def __init__(self, name: str) -> None:
            if not is_apart:
                raise OSError(f"{name}: cannot open shared object file")

        def ncclGetVersion(self, found: Any) -> int:  # noqa: N802
            found._obj.value = 23007
            return 0

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    is_apart = True
    assert places.nccl_version() == (2, 30, 7)
    is_apart = False
    assert places.nccl_version() == (2, 28, 9)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert places.nccl_version() == ()


def test_a_newer_nccl_is_found_where_packages_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "broken"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / "libnccl.so.2").touch()
    versions = {"one": (2, 28, 9), "two": (2, 30, 7), "broken": ()}
    monkeypatch.setattr(
        places, "version_of_nccl", lambda file: versions[Path(file).parent.parent.name]
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "is not there")])
    monkeypatch.setattr(machines, "PACKAGES", ())
    assert max(machines.other_nccls()) == ((2, 30, 7), str(tmp_path / "two/lib/libnccl.so.2"))
    assert len(machines.other_nccls()) == 2


# --- Trainers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused", "is_right", "words"),
    [
        ({"launches": 1}, True, ""),
        ({"launches": 41}, False, "nothing is fused"),
        ({"off": 1e-3}, False, "weights differ by more than 1e-05"),
        ({"off": math.nan}, False, "weights differ by more than 1e-05"),
        ({"warnings": ["not all of it"]}, False, "not all of it"),
        ({"error": "it ended with 1: no memory"}, False, "it ended with 1: no memory"),
    ],
)
def test_a_trainer_must_be_fused_and_end_where_it_ends_without_the_flag(
    fused: dict[str, Any], is_right: bool, words: str, monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    pytest.importorskip("lightning")

    def train(path: Path, flag: str, ranks: int, site: Site) -> Any:
        assert ranks == 2
        if flag and "error" in fused:
            raise RuntimeError(fused["error"])
        totals = {"gradients": 41, "launches": 1, **fused}
        weights = {"weight": torch.tensor([1.0, 2.0 + (fused.get("off", 0.0) if flag else 0.0)])}
        report = {"totals": totals, "warnings": fused.get("warnings", [])}
        return trainers.Trained(weights, report)

    monkeypatch.setattr(trainers, "train", train)
    rows: list[Row] = []
    trainers.measure(site, rows.append)
    assert [row.title for row in rows] == ["accelerate", "lightning", "transformers"]
    assert {(row.is_right, row.words) for row in rows} == {(is_right, words)}


def test_a_trainer_that_cannot_run_is_said_not_to(
    monkeypatch: pytest.MonkeyPatch, site: Site
) -> None:
    monkeypatch.setattr(trainers, "train", lambda *_: pytest.fail("it runs"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "transformers" or None)
    rows: list[Row] = []
    trainers.measure(site, rows.append)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        trainers,
        "_row",
        lambda package, _path, where: Row(package, words=str(trainers._ranks(package, where))),
    )
    trainers.measure(replace(site, device="cuda"), rows.append)
    assert [row.words for row in rows] == ["not run: without transformers"] * 3 + ["0", "1", "0"]


# --- What is measured ----------------------------------------------------------------------------


class Rates:
    """A network that notes its rates."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def set_rate(self, rate: str) -> None:
        self.noted.append(rate)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """A network of which :mod:`gpu_checks.net` asks rates."""
    made = Rates()
    network = shaped.Network("a network", rated=made)
    monkeypatch.setattr(net, "best_network", lambda: contextlib.nullcontext(network))
    return made


def test_methods_are_compared_round_by_round_at_each_rate(
    site: Site, rates: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "COMPARED_IF_SMALL", (*methods.COMPARED, bench_ranks.HANGS))
    noted: dict[str, Row] = {}
    net.gpt2(site, lambda row: noted.update({row.title: row}))
    assert rates.noted == ["1gbit", "1gbit", "10gbit"]
    for rate in ("1 Gbit/s", "10 Gbit/s"):
        assert noted[f"gpt2, {rate}: all-reduce alone"].figures["ms"] == pytest.approx(10.0)
        for name, ratio in (("no DDP", 1.0), ("eager DDP", 2.0), ("concat", 1.5)):
            row = noted[f"gpt2, {rate}: {name}"]
            assert row.is_right
            figures = row.figures
            assert figures["time over no DDP"] == figures["least"] == pytest.approx(ratio)
            assert figures["ms"] == pytest.approx(100 * ratio)
            assert figures["exposed ms"] == pytest.approx(100 * (ratio - 1))
            assert figures["over torch's fastest"] == pytest.approx(ratio / 2)
            assert figures["peak over no DDP"] == 1.0
            assert figures["gradients off by"] == (None if name == "no DDP" else 0.0)
        failed = noted[f"gpt2, {rate}: {bench_ranks.RAISES}"]
        assert failed.words.endswith("this way does not compile")
        hung = noted[f"gpt2, {rate}: {bench_ranks.HANGS}"]
        assert "has not answered for 3 s" in hung.words
    planned = noted["gpt2, 1 Gbit/s: auto"].figures["time over no DDP"]
    assert planned == pytest.approx(1.2), "in the run after the one that measures"
    assert "gpt2, 10 Gbit/s: auto" not in noted, "its buckets are for the other network"
    assert noted["gpt2: over gloo"].words == "a network"
    assert all(row.is_right for row in noted.values()), "what is torch's is no fault of ours"


def test_a_network_that_cannot_be_shaped_has_one_case(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = shaped.Network("network not shaped: no root")
    monkeypatch.setattr(net, "best_network", lambda: contextlib.nullcontext(network))
    monkeypatch.setattr(net, "COMPARED_IF_SMALL", ("no DDP", "eager DDP"))
    noted: dict[str, Row] = {}
    net.resnet(site, lambda row: noted.update({row.title: row}))
    assert set(noted) == {
        "resnet, unshaped: no DDP",
        "resnet, unshaped: eager DDP",
        "resnet, unshaped: all-reduce alone",
        "resnet: over gloo",
    }


@pytest.mark.parametrize(
    ("refused", "words", "interface"),
    [
        ("", "a pair of veth devices", "eth0"),
        ("veth", "the loopback device of a namespace", "lo"),
        ("tbf", "network not shaped: tbf is refused", "lo"),
        ("netns", "network not shaped: netns is refused", "lo"),
    ],
)
def test_the_best_network_that_the_system_has_is_used(
    refused: str, words: str, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: set[str] = set()

    def run(command: list[str]) -> str:
        if refused and refused in command:
            raise OSError(f"{refused} is refused")
        if command[:3] == ["ip", "netns", "add"]:
            made.add(command[3])
        if command[:3] == ["ip", "netns", "delete"]:
            made.discard(command[3])
        commands.append(" ".join(command))
        return ""

    commands: list[str] = []
    monkeypatch.setattr(shaped, "check_allowed", lambda: None)
    with shaped.best_network(run) as network:
        assert network.words.startswith(words)
        assert network.interface == interface
        if network.rated:
            network.rated.set_rate("25gbit")
            bound = "rate 25gbit" if not refused else "rate 50000mbit"
            assert any(bound in command for command in commands)
            assert made
    assert not made, "nothing is left"


def test_a_method_of_ours_that_fails_or_is_wrong_is_a_failure(site: Site, rates: Rates) -> None:
    plain = methods.Method("no DDP", seconds={"1gbit": [1.0]})

    def is_right(method: methods.Method) -> bool:
        return methods.Comparison("x", [plain], ("1gbit",))._row("x", method, "1gbit").is_right

    ours = methods.Method("concat", seconds={"1gbit": [1.1]})
    assert is_right(ours)
    assert not is_right(methods.Method("concat"))
    assert is_right(methods.Method("torch concat"))
    for checked in (Checked(0.5, "a.weight"), Checked(missing=("b",)), Checked(compared=False)):
        wrong = methods.Method("concat", seconds={"1gbit": [1.1]})
        net._judge(wrong, [Checked(), checked])
        assert not is_right(wrong)
    late: list[Row] = []
    net.gpt2(replace(site, deadline=time.monotonic()), late.append)
    assert not any(row.is_right for row in late if "no DDP" in row.title)


def test_starts_are_over_those_without_ddp(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "COMPARED_IF_SMALL", starts.COMPARED)
    rows: list[Row] = []
    starts.measure(site, rows.append)
    assert [row.title for row in rows] == [f"gpt: {name}" for name in starts.COMPARED]
    assert rows[1].figures == {
        "cold s": pytest.approx(1.0),
        "warm s": pytest.approx(1.0),
        "cold over no DDP": 1.0,
        "warm over no DDP": 1.0,
        "host ms a step": 2.0,
        "host over no DDP": 1.0,
    }
    failed = rows[starts.COMPARED.index(bench_ranks.RAISES)]
    assert failed.words.endswith("this way does not compile")
    assert set(failed.figures.values()) == {None}


def test_a_log_says_what_a_start_was_spent_on(capsys: pytest.CaptureFixture[str]) -> None:
    one = rank.CheckRank.__new__(rank.CheckRank)
    one._wrapped_s = 0.5
    one._log_phases(1.25)
    said = capsys.readouterr().out
    assert said.startswith("wrapped in 0.500 s, first step in 1.250 s\naot_autograd: {")
    assert "TorchDynamo compilation metrics" in said


def test_every_norm_is_compared_above_the_threshold() -> None:
    cases = norms.cases_on(Site("cuda", "nccl", ""))
    assert {(case.name, case.dtype) for case in cases} >= {
        (name, dtype) for name in ("layer_norm", "rms_norm", "post-LN block") for dtype in DTYPES
    }
    assert all(case.rows * case.width >= 5 * 2**20 for case in cases)
    assert {*norms.TIMED} <= {case.name for case in cases}


def test_a_gradient_that_is_lost_is_found() -> None:
    expected = {"gain": torch.tensor([1.0, 2.0]), "shift": torch.tensor([4.0])}
    assert norms._difference(expected, expected, 1e-3) == ""
    nearly = expected | {"gain": torch.tensor([1.0, 2.001])}
    assert norms._difference(nearly, expected, 1e-3) == ""
    for lost in (torch.nan, 0.0):
        found = expected | {"gain": torch.full([2], lost)}
        assert "gain by" in norms._difference(found, expected, 1e-3)
        assert "shift" not in norms._difference(found, expected, 1e-3)
    assert "shift are missing" in norms._difference({"gain": expected["gain"]}, expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["norms", "graphs"])
def test_what_one_rank_trains_runs_on_the_cpu(part: str, tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    options = ["--device", "cpu", "--only", part, "--seconds", "2000"]
    assert gpu.main([*options, "--results", str(results), "--out", str(page)]) == 0
    titles = [row["title"] for row in json.loads((results / f"{part}.json").read_text())["rows"]]
    expected = {
        "norms": {f"layer_norm, {d}, `{m}`" for d in ("fp32", "bf16") for m in norms.FLAGS},
        "graphs": {"gpt: no DDP", "gpt: concat"},
    }
    assert {*titles} == expected[part]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", ["net-gpt2", "net-resnet", "starts"])
def test_what_several_processes_train_runs_on_the_cpu(part: str, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", part, "--seconds", "2000"]
    paths = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / "page.md")]
    assert gpu.main([*options, *paths]) == 0


@pytest.mark.slow
def test_copies_are_compiled_compared_and_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [
        copies.Packing("cast and scaled", "fp32", "bf16", "div", True),
        copies.Writing("written"),
    ]
    monkeypatch.setattr(copies, "KERNELS", tuple(chosen))
    rows: list[Row] = []
    copies.measure(Site("cpu", "gloo", str(tmp_path)), rows.append)
    assert [row.title for row in rows] == ["plain copy", "cast and scaled", "written"]
    assert all(row.is_right for row in rows)
    assert rows[0].figures["of the copy"] == 1.0
    assert all((row.figures["GB/s"] or 0) > 0 for row in rows)


@pytest.mark.parametrize("kernel", copies.KERNELS, ids=lambda kernel: kernel.title)
def test_a_kernel_that_differs_is_found(
    kernel: copies.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    call = copies.Call.of(kernel, torch.device("cpu"), 1)
    assert call.difference() == ""

    def off() -> Any:
        made = call.run()
        changed = call.written[-1] if made is None else made
        changed.view(-1)[-1] += 1
        return made

    assert replace(call, run=off).difference() == "values differ"


def test_moved_bytes_are_what_is_read_and_written() -> None:
    assert copies.Packing("p").moved_bytes(10) == 80
    assert copies.Packing("p", "bf16", "bf16").moved_bytes(10) == 40
    assert copies.Packing("p", "fp32", "bf16").moved_bytes(10) == 60
    assert copies.Packing("p", scale="div", in_bucket=True).moved_bytes(10) == 160
    assert copies.Widening("w").moved_bytes(10) == 60
    assert copies.Writing("w").moved_bytes(10) == 80


def test_gradients_to_copy_have_the_size_that_is_asked_for() -> None:
    for mib in (1, 64, 256):
        elements = sum(torch.Size(shape).numel() for shape in copies.shapes_of(mib * 2**18))
        assert elements == pytest.approx(mib * 2**18, rel=0.2)


# --- The page ------------------------------------------------------------------------------------


def test_the_page_has_a_column_for_each_mode_and_number_of_ranks() -> None:
    parts = choose(PARTS, ["options-concat", "options-coalesced-2", "copies", "starts"])
    results = {
        "options-concat": Result("options-concat", "", "nccl", 9.0, (Row("a, fp32"),)),
        "options-coalesced-2": Result(
            "options-coalesced-2", "", "gloo", 9.0, (Row("a, fp32", False, "broken: x | y"),)
        ),
        "copies": Result("copies", "", "nccl", 9.0, (Row("pack", figures={"GB/s": 2871.4}),)),
    }
    text = pages.as_markdown(
        ONE_GPU, parts, results, date="2026-11-23", command="python tools/gpu.py"
    )
    assert text.startswith("# On a GPU\n\n2026-11-23, a GPU, torch 2.13.0, NCCL 2.29.7, Python")
    assert "\n    python tools/gpu.py\n" in text
    assert "one rank over nccl, 2 ranks over gloo." in text
    assert "| a, fp32 | equal | **wrong** |" in text
    assert "* a, fp32, `coalesced`, 2 ranks: broken: x | y" in text
    assert "| pack | 2871 |  |" in text
    assert "2 of 4 parts are as they must be. Wrong: options-coalesced-2. Not run: starts." in text


def test_the_page_begins_with_all_methods_in_one_table() -> None:
    def row(method: str, time: float, peak: float, is_right: bool = True) -> Row:
        figures = {"ms": 50 * time, "time over no DDP": time, "peak over no DDP": peak}
        return Row(f"gpt2, 25 Gbit/s: {method}", is_right, figures=figures)

    rows = (
        row("no DDP", 1.0, 1.0),
        row("eager DDP", 5.0, 1.5),
        row("concat", 4.0, 1.01, is_right=False),
        Row("gpt2, 25 Gbit/s: all-reduce alone", figures={"ms": 160.0}),
        Row("gpt2: over nccl", words="a network"),
    )
    parts = choose(PARTS, ["net-gpt2", "net-resnet"])
    results = {"net-gpt2": Result("net-gpt2", "", "nccl", 9.0, rows)}
    where = replace(ONE_GPU, nccl="2.30.7", torchs_nccl="2.28.9")
    text = pages.as_markdown(
        where, parts, results, date="2026-11-27", command="python tools/gpu.py"
    )
    assert "NCCL 2.30.7 (torch's own is 2.28.9)" in text
    head, _, rest = text.partition("## Steps and peak memory")
    assert "| two ranks | no DDP, ms | eager DDP | concat |" in head
    assert "| gpt2, 25 Gbit/s | 50.0 | 5.00 (1.50) | 4.00 (1.01) **wrong** |" in head
    assert "Not run: net-resnet." in head
    assert "| gpt2, 25 Gbit/s: all-reduce alone | 160 |" in rest


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0, "0"), (1.0, "1.00"), (0.12345, "0.123"), (12.34, "12.3"), (2871.4, "2871"),
     (float("nan"), "")],
)  # fmt: skip
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert pages.number(value) == text
