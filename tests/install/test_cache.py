"""Inductor's FX graph cache: a second process takes graphs that store gradients from it, and only
the same ones (``test_pass_identity.py`` has what tells them apart)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The first fills the cache for all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cache")]

ROOT = Path(__file__).parent.parent.parent


def _train(cache: Path, *options: str, mode: str = "concat") -> dict[str, Any]:
    """What a process of its own says after two steps; its standard error under ``"stderr"``."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.cached_training", mode, *options],
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return {**said, "stderr": result.stderr}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A cache, and what the process said that filled it."""
    cache = tmp_path_factory.mktemp("inductor")
    return cache, _train(cache, "--save", f"{cache}/artifacts")


@pytest.fixture
def cache(first: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the filled cache, so that no test finds what another one left."""
    return Path(shutil.copytree(first[0], tmp_path / "inductor"))


@pytest.mark.each_torch
def test_first_process_fills_the_cache(first: tuple[Path, dict[str, Any]]) -> None:
    _, said = first
    assert (said["hits"], said["bypasses"]) == (0, 0)
    # The forward and the backward, which fresh gradients and kept ones have in common.
    assert (said["misses"], said["traced"]) == (2, 0)
    assert said["stored"] == 4


@pytest.mark.each_torch
@pytest.mark.parametrize("mode", ["concat", pytest.param("coalesced", marks=pytest.mark.nightly)])
def test_second_process_hits_and_stores_in_place(cache: Path, mode: str) -> None:
    """In another mode too: how a bucket is sent is in no graph."""
    said = _train(cache, mode=mode)
    assert (said["misses"], said["bypasses"]) == (0, 0)
    assert said["aot_hits"] == 1
    assert said["stored"] == 4
    assert "FusionWarning" not in said["stderr"]


@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_saved_artifacts_start_another_machine(
    first: tuple[Path, dict[str, Any]], tmp_path: Path, machines: int
) -> None:
    """On an empty cache, by ``torch.compiler.load_cache_artifacts``; and what was saved there once
    more starts a third one."""
    source = first[0] / "artifacts"
    for number in range(machines):
        saved = tmp_path / f"artifacts{number}"
        said = _train(tmp_path / f"cache{number}", "--load", str(source), "--save", str(saved))
        assert (said["misses"], said["bypasses"], said["traced"]) == (0, 0, 0)
        assert (said["aot_hits"], said["aot_misses"]) == (1, 0)
        assert said["stored"] == 4
        source = saved
