"""The examples with trainers, as their page runs them, with the flag and without.

On two ranks where there are two GPUs: each trainer gives each rank one of its own. One that wraps
the model in DDP on one rank too runs with one GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from gpu_checks.machine import ROOT
from gpu_checks.results import Row
from gpu_checks.sites import Note, Site
from testing.sessions import kill_session, start_session

DIRECTORY: Final = ROOT / "examples" / "trainers"
WRAPS_ONE_RANK: Final = {"accelerate": False, "lightning": True, "transformers": False}
"""Trainers, and whether they wrap the model in DDP on one rank."""

ENDS_WITHIN_S: Final = 120.0
FLAG: Final = "FUSION_PASSES_DDP_FUSION"

TOLERANCE: Final = 1e-5
"""Of a weight: 8 steps move it by 1e-3, and on a GPU sums are rounded otherwise in each run."""


def measure(site: Site, note: Note) -> None:
    """Run each example twice, one after the other."""
    for package in WRAPS_ONE_RANK:
        (path,) = DIRECTORY.glob(f"{package}_*.py")
        note(_row(package, path, site))


def _row(package: str, path: Path, site: Site) -> Row:
    # Their models are those of transformers.
    needed = {package, "transformers"}
    missing = sorted(name for name in needed if not importlib.util.find_spec(name))
    if missing:
        return Row(package, words=f"not run: without {' and '.join(missing)}")
    ranks = _ranks(package, site)
    if not ranks:
        return Row(package, words="not run: it needs two GPUs")
    try:
        with ThreadPoolExecutor() as pool:
            plain, fused = pool.map(lambda flag: train(path, flag, ranks, site), ("", "concat"))
    except RuntimeError as error:
        return Row(package, False, str(error))
    off = max(
        (fused.weights[name] - value).abs().max().item() for name, value in plain.weights.items()
    )
    totals = fused.report["totals"]
    before, after = totals["gradients"], totals["launches"]
    wrong = [*fused.report["warnings"]]
    if not off <= TOLERANCE:
        wrong.append(f"weights differ by more than {TOLERANCE:g}")
    if not 0 < after < before:
        wrong.append("nothing is fused")
    figures = {"ranks": ranks, "differ by 1e-6": off * 1e6, "all-reduces": before, "fused": after}
    return Row(package, not wrong, "; ".join(wrong), figures)


@dataclass(frozen=True)
class Trained:
    """What an example has written: its weights, and the report of the flag."""

    weights: dict[str, Any]
    report: dict[str, Any]


def _ranks(package: str, site: Site) -> int:
    """On how many an example can run here; 0 if on none."""
    if site.device == "cpu" or torch.cuda.device_count() > 1:
        return 2
    return int(WRAPS_ONE_RANK[package])


def train(path: Path, flag: str, ranks: int, site: Site) -> Trained:
    """Run an example.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    stem = Path(site.directory) / f"{path.stem}-{flag or 'without'}"
    files = [stem.with_suffix(suffix) for suffix in (".pt", ".json", ".log")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(path), *map(str, files[:2])]
    process = start_session(command, files[2], {**os.environ, FLAG: flag})
    try:
        code = process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {ENDS_WITHIN_S:.0f} s") from None
    finally:
        kill_session(process)
    print(files[2].read_text(), flush=True)
    if code != 0:
        lines = files[2].read_text().strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"it ended with {code}: {lines[-1].strip()}")
    return Trained(torch.load(files[0], map_location="cpu"), json.loads(files[1].read_text()))
