"""Inductor's FX graph cache: a second process takes graphs that store gradients from it, and only
equal ones (``test_pass_identity.py`` tests their keys)."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config as inductor_config
from torch.nn.parallel import DistributedDataParallel

from testing.processes import RankPool

# The first test fills the cache for all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cache")]


def two_steps(
    cache: Path, mode: str = "concat", load: Path | None = None, save: Path | None = None
) -> dict[str, int]:
    """Train, and count the hits in Inductor's caches and the gradients that the second backward
    stored in its bucket; a job for a process that has not imported the package. Kernels compute
    nothing.

    Args:
        cache: the folder of the caches.
        mode: mode of the flag.
        load: a file of ``torch.compiler.save_cache_artifacts()`` to start from.
        save: file to save such artifacts to.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    if load is not None:
        torch.compiler.load_cache_artifacts(load.read_bytes())
    from fusion_passes import FusionWarning
    from fusion_passes.reducer.reducer import reducer_of
    from tests.support.fake_world import two_layers, without_kernels

    with inductor_config.patch(ddp_fusion=mode), without_kernels(), warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        ddp = DistributedDataParallel(two_layers())
        compiled = torch.compile(ddp)
        for _ in range(2):
            compiled(torch.ones(2, 4)).sum().backward()
    if save is not None:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        save.write_bytes(saved[0])
    counters = torch._dynamo.utils.counters
    return {
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "bypasses": counters["inductor"]["fxgraph_cache_bypass"],
        "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "aot_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "traced": counters["compiled_autograd"]["captures"],
        "stored": reducer_of(ddp).record.num_stored,
    }


def in_a_new_process(**options: Any) -> dict[str, int]:
    with RankPool() as pool:
        (said,) = pool.run(1, two_steps, **options)
    return said


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A cache, and the output of the process that filled it."""
    cache = tmp_path_factory.mktemp("inductor")
    return cache, in_a_new_process(cache=cache, save=cache / "artifacts")


@pytest.fixture
def cache(first: tuple[Path, dict[str, int]], tmp_path: Path) -> Path:
    """A copy of the filled cache, so that no test finds what another one left."""
    return Path(shutil.copytree(first[0], tmp_path / "inductor"))


@pytest.mark.each_torch
def test_first_process_fills_the_cache(first: tuple[Path, dict[str, int]]) -> None:
    _, said = first
    assert (said["hits"], said["bypasses"]) == (0, 0)
    # The forward and the backward, which is the same for fresh and for existing gradients.
    assert (said["misses"], said["traced"]) == (2, 0)
    assert said["stored"] == 4


@pytest.mark.each_torch
@pytest.mark.parametrize("mode", ["concat", pytest.param("coalesced", marks=pytest.mark.nightly)])
def test_second_process_hits_and_stores_in_place(cache: Path, mode: str) -> None:
    """Another mode hits too: no graph contains the way a bucket is sent."""
    said = in_a_new_process(cache=cache, mode=mode)
    assert (said["misses"], said["bypasses"]) == (0, 0)
    assert said["aot_hits"] == 1
    assert said["stored"] == 4


@pytest.mark.parametrize("machines", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_saved_artifacts_start_another_machine(
    first: tuple[Path, dict[str, int]], tmp_path: Path, machines: int
) -> None:
    """With an empty cache, by ``torch.compiler.load_cache_artifacts``; the artifacts that are saved
    there start a third machine."""
    source = first[0] / "artifacts"
    for number in range(machines):
        saved = tmp_path / f"artifacts{number}"
        said = in_a_new_process(cache=tmp_path / f"cache{number}", load=source, save=saved)
        assert (said["misses"], said["bypasses"], said["traced"]) == (0, 0, 0)
        assert (said["aot_hits"], said["aot_misses"]) == (1, 0)
        assert said["stored"] == 4
        source = saved
