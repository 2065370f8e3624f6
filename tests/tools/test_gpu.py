"""The tool that runs checks that need a GPU: its plan, and on the CPU everything that a CPU can run
of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pkgutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import gpu
import pytest
import torch
from torch import Tensor, nn

from benches.network import Network, local_network
from benches.processes import Place
from benches.results import Row
from fusion_passes import config
from gpu_checks import copies, net, sites, starts, subjects, targets
from gpu_checks.machine import Machine
from gpu_checks.parts import LATE_ON_A_GPU, ON_TWO, PARTS, PROBE, THIRDS_EPS, Part
from gpu_checks.processes import Result
from gpu_checks.sites import Site, control_mps
from testing.scenarios.both_ways import flag_of, target_of
from testing.scenarios.entries import MODES
from testing.scenarios.run import DTYPES
from tests.support import bench_ranks, gpu_parts

ONE_GPU = Machine("cuda", "a GPU", count=1)
ON_CPU = replace(ONE_GPU, device="cpu", count=0)


# --- The plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_option_is_tried_in_every_mode_and_on_two_ranks(mode: str, ranks: int) -> None:
    checks = [c for p in PARTS for c in p.checks if (p.ranks, p.mode) == (ranks, mode)]
    options = [dict(check.scenario.options) for check in checks]
    scalings = {flag.get("scaling", "auto") for flag in options}
    assert scalings == {*get_args(config.ScalingOption)}
    assert {flag.get("reduce_dtype") for flag in options} == {None, *get_args(config.ReduceDtype)}
    assert {check.dtype for check in checks} >= {*DTYPES}


def test_features_that_each_check_trains_are_trained_on_a_gpu_too() -> None:
    checks = [check for part in PARTS if part.ranks == 2 for check in part.checks]
    trained = {(check.scenario.feature, check.mode) for check in checks}
    for feature, scenario in ON_TWO.items():
        if not scenario.tested:
            continue
        left_out = bool(scenario.fails_on_oldest) or feature in LATE_ON_A_GPU
        assert ((feature, scenario.tested[0]) in trained) != left_out, feature


def test_parts_and_their_rows_have_names_of_their_own() -> None:
    assert len({part.name for part in (PROBE, *PARTS)}) == len(PARTS) + 1
    for part in PARTS:
        titles = [check.title for check in part.checks]
        assert len(set(titles)) == len(titles), part.name


def test_what_a_part_names_is_there() -> None:
    for part in (PROBE, *PARTS):
        assert bool(part.measure) != bool(part.checks), part.name
        if part.measure:
            assert callable(pkgutil.resolve_name(part.measure))
        for check in part.checks:
            assert check.scenario.ranks == part.ranks
            flag_of(check.scenario, check.mode)
            assert callable(target_of(check.scenario))


def test_models_are_what_they_are_called() -> None:
    for factory, parameters in ((subjects.gpt2, 124_439_808), (subjects.resnet50, 25_557_032)):
        with torch.device("meta"):
            model, _ = factory()
        assert sum(value.numel() for value in model.parameters()) == parameters
    model, batch = subjects.tiny_resnet()
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    for tensor in (convolution.weight, *batch(0)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_without_a_gpu_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    assert gpu.main(["--only", "copies"]) == 1
    assert "No GPU: torch" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_names_of_parts_are_listed_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list", "--only", "options-concat", "--only", "copies"]) == 0
    assert capsys.readouterr().out == "copies\noptions-concat\n"


# --- A run ---------------------------------------------------------------------------------------


def _run(directory: Path, *arguments: str, parts: Sequence[Part] = gpu_parts.PARTS) -> int:
    return gpu.main(["--device", "cpu", "--results", str(directory), *arguments], parts)


def _result(directory: Path, part: str) -> dict[str, Any]:
    return json.loads((directory / f"{part}.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("started")
def test_a_part_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ask_machine", lambda _: ON_CPU)
    names = ["hangs", "raises", "dies", "is-wrong", "is-right"]
    chosen = [word for name in names for word in ("--only", name)]
    assert _run(tmp_path, *chosen) == 1
    failures = {name: _result(tmp_path, name)["failure"] for name in names}
    assert failures == {
        "hangs": "not done after 9 s",
        "raises": "it ended with 1: RuntimeError: no memory is left",
        "dies": "it ended with 3: it said nothing",
        "is-wrong": "",
        "is-right": "",
    }
    said = capsys.readouterr().out
    assert "| right | 12.3 | cpu |" in said
    assert "| what there was before | 2.00 |  |" in said
    assert "| wrong |  | **wrong** values differ |" in said
    assert "1 of 5 parts are as they must be.\nWrong: " in said


@pytest.mark.slow
@pytest.mark.nightly
def test_trainings_are_judged_one_by_one(tmp_path: Path) -> None:
    assert _run(tmp_path, "--only", "trains", "--seconds", "2000") == 1
    rows = [Row(**row) for row in _result(tmp_path, "trains")["rows"]]
    assert [row.is_right for row in rows] == [True, False, False, False, True]
    assert rows[0].words == ""
    assert "2 differences from eager DDP" in rows[1].words
    assert "on ranks [0, 1]: ValueError: not while ddp_fusion is set" in rows[2].words
    assert "on ranks [1]: ValueError: not while ddp_fusion is set" in rows[3].words
    assert rows[4].words == "", "what failed before does not touch it"


def test_without_time_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "ask_machine", lambda _: ON_CPU)
    assert _run(tmp_path, "--only", "is-right", "--seconds", "0") == 1
    assert "0 of 1 parts are as they must be.\nNot run: is-right." in capsys.readouterr().out


# --- Two ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "services", "works_with", "backend", "asked"),
    [
        (0, ["mps", ""], [], "gloo", []),
        (2, ["mps", ""], [], "nccl", []),
        (1, ["mps", ""], ["mps"], "nccl", ["mps"]),
        (1, ["mps", ""], [""], "nccl", ["mps", ""]),
        (1, ["mps", ""], [], "gloo", ["mps", ""]),
        (1, [""], [""], "nccl", [""]),
        (1, [""], [], "gloo", [""]),
    ],
)
def test_nccl_is_asked_before_it_is_used(
    gpus: int,
    services: list[str],
    works_with: list[str],
    backend: str,
    asked: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First with the service that runs kernels at the same time, if there is one, then without it.
    Checks that only NCCL can do are skipped if it refuses."""
    tried: list[str] = []

    def probe(part: Part) -> Result:
        assert part is PROBE
        tried.append(Path(session._mps).name)
        return Result("probe", "nccl", 1.0, (), "" if tried[-1] in works_with else "refused")

    monkeypatch.setattr(gpu, "control_mps", lambda *_, **__: "mps" in services)
    options = gpu._parser([]).parse_args([])
    session = gpu.Session(options, replace(ONE_GPU, count=gpus) if gpus else ON_CPU, tmp_path)
    monkeypatch.setattr(session, "_run_part", probe)
    able = session._able(PARTS)
    assert session._backend_of_two == backend
    assert tried == asked
    coalesced = [part for part in PARTS if (part.mode, part.ranks) == ("coalesced", 2)]
    assert [part for part in PARTS if part not in able] == (
        coalesced if gpus and backend == "gloo" else []
    )


def test_a_service_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / sites.MPS_COMMAND
    said = tmp_path / "said"
    command.write_text(f"#!/bin/sh\necho $1 ${sites.MPS} $(cat) >> {said}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert control_mps(tmp_path / "mps", "-d")
    control_mps(tmp_path / "mps", words="quit\n")
    assert said.read_text().split() == ["-d", f"{tmp_path}/mps", f"{tmp_path}/mps", "quit"]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sites, "MPS_PATHS", ())
    assert not control_mps(tmp_path / "mps", "-d")


def test_ranks_know_which_gpu_is_theirs() -> None:
    network = Network("a network", (("ip", "0"), ("ip", "1")))
    site = Site("cuda", "nccl", cores=2, gpus=1, mps="/mps")

    def place(where: Site) -> Place:
        return net.place_of(where, "gpt2", network)

    apart = tuple(("ip", f"{rank}", "env", f"NCCL_HOSTID=rank-{rank}") for rank in range(2))
    assert place(site).prefixes == apart
    assert place(site).variables[sites.MPS] == "/mps"
    assert place(site).variables["NCCL_SHM_DISABLE"] == "1"
    two = place(replace(site, gpus=2))
    assert two.prefixes == network.prefixes
    assert not {sites.MPS, "CUDA_VISIBLE_DEVICES"} & {*two.variables}
    assert place(Site("cpu", "gloo", cores=2)).variables["CUDA_VISIBLE_DEVICES"] == ""


# --- What is measured ----------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with ranks that answer and measure nothing."""
    monkeypatch.setattr(sites, "Place", functools.partial(Place, worker=bench_ranks.__name__))
    return Site("cpu", "gloo", str(tmp_path), cores=1, deadline=time.monotonic() + 1000)


def test_methods_are_compared_at_each_rate(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same processes, started before the first rate, run at each rate."""
    network, rates = Network("a network", ((), ()), devices=(("ns", "eth0"),)), list[str]()
    monkeypatch.setattr(network, "set_rate", rates.append)
    monkeypatch.setattr(net, "best_network", lambda: contextlib.nullcontext(network))
    monkeypatch.setattr(net, "COMPARED_IF_SMALL", (*net.COMPARED, bench_ranks.HANGS))
    monkeypatch.setattr(net, "TURN_S", 3.0)
    noted: dict[str, Row] = {}
    net.gpt2(site, lambda row: noted.update({row.title: row}))
    assert rates == ["1gbit", "1gbit", "10gbit"]
    for rate in ("1 Gbit/s", "10 Gbit/s"):
        assert noted[f"gpt2, {rate}: all-reduce alone"].figures["ms"] == pytest.approx(10.0)
        for name, ratio in (("no DDP", 1.0), ("DDP, one graph", 2.0), ("concat", 1.5)):
            figures = noted[f"gpt2, {rate}: {name}"].figures
            assert figures["time over no DDP"] == pytest.approx(ratio)
        failed = noted[f"gpt2, {rate}: {bench_ranks.RAISES}"]
        assert failed.words.endswith("this way does not compile")
        assert "not done after 3 s" in noted[f"gpt2, {rate}: {bench_ranks.HANGS}"].words
    planned = noted["gpt2, 1 Gbit/s: auto"].figures["time over no DDP"]
    assert planned == pytest.approx(1.2), "after the steps that compare buckets"
    assert "gpt2, 10 Gbit/s: auto" not in noted, "its buckets are for the other network"
    assert noted["gpt2: over gloo"].words == "a network"
    assert all(row.is_right for row in noted.values()), "what is torch's is no fault of ours"


def test_what_the_time_was_too_short_for_is_not_right(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network whose rate cannot be limited."""
    monkeypatch.setattr(net, "best_network", lambda: contextlib.nullcontext(local_network(2)))
    monkeypatch.setattr(net, "COMPARED_IF_SMALL", ("no DDP", "DDP, one graph"))
    late: list[Row] = []
    net.resnet(replace(site, deadline=time.monotonic()), late.append)
    methods = {row.title: row.is_right for row in late if "unshaped" in row.title}
    assert methods == {"resnet, unshaped: no DDP": False, "resnet, unshaped: DDP, one graph": False}


def test_starts_are_over_those_without_ddp(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "COMPARED_IF_SMALL", starts.COMPARED)
    rows: list[Row] = []
    starts.measure(site, rows.append)
    assert [row.title for row in rows] == [f"gpt: {name}" for name in starts.COMPARED]
    seconds = dict.fromkeys(["cold s", "warm s", "cold s over no DDP", "warm s over no DDP"], 1.0)
    cpu = {"CPU ms a step": 150, "CPU ms a step over no DDP": 1.5}
    assert rows[1].figures == pytest.approx(seconds | cpu)
    failed = rows[starts.COMPARED.index(bench_ranks.RAISES)]
    assert failed.words.endswith("this way does not compile")
    assert failed.is_right, "what is torch's is no fault of ours"
    assert set(failed.figures.values()) == {None}


def test_norms_have_sizes_from_which_orders_are_mixed() -> None:
    assert targets.ROWS * targets.WIDTH >= 5 * 2**20


def test_averages_that_are_all_too_large_are_told_from_rounding() -> None:
    """Compares the gradients of three ranks: eager DDP's, ours with a division before the sum,
    Gloo's with a division after it, and NCCL's average, which multiplies by 1/3 in bf16."""
    generator = torch.Generator().manual_seed(0)

    def gradient() -> Tensor:
        x, weights = (torch.rand(1, 256, generator=generator).bfloat16() for _ in range(2))
        return weights.T @ x

    def mean(shares: Sequence[Tensor]) -> float:
        first, second, third = shares
        return (first + second + third).double().mean().item()

    shares, reciprocal = [gradient() for _ in range(3)], torch.tensor(1 / 3)
    eager = mean([(share.float() * reciprocal).bfloat16() for share in shares])
    divided = mean([share / 3 for share in shares])
    after = ((shares[0] + shares[1] + shares[2]) / 3).double().mean().item()
    nccl = mean([share * reciprocal.bfloat16() for share in shares])
    off_by = [abs(value / eager - 1) * 2**23 for value in (divided, after, nccl)]
    assert max(off_by[:2]) < THIRDS_EPS / 10
    assert off_by[2] > 15 * THIRDS_EPS


@pytest.mark.slow
@pytest.mark.nightly  # The check runs the shorter ones as a separate stage.
@pytest.mark.parametrize("part", ["net-gpt2", "net-resnet", "starts"])
def test_what_is_measured_runs_on_the_cpu(part: str, tmp_path: Path) -> None:
    assert _run(tmp_path, "--only", part, "--seconds", "2000", parts=PARTS) == 0


@pytest.mark.parametrize("kernel", copies.KERNELS, ids=lambda kernel: kernel.title)
def test_a_kernel_that_differs_is_found(
    kernel: copies.Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    call = copies.Call(kernel, torch.device("cpu"), ((16, 8), (8,), (8, 16)))
    assert call.difference() == ""
    run = call.run

    def off() -> Any:
        made = run()
        changed = call.written[-1] if made is None else made
        changed.view(-1)[-1] += 1
        return made

    monkeypatch.setattr(call, "run", off)
    assert call.difference() == "values differ"
