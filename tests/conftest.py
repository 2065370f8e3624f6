"""Fixtures of every test: its session's own caches, ranks to run on, and a check of what it leaves
behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.resource_tracker
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from testing.fresh import forget
from testing.processes import COLLECTED_AFTER, RankPool, TorchSettings, fork_server_pid
from testing.sessions import MARKS, Sessions

EACH_TORCH = frozenset(
    {
        *("graph", "stored", "traced", "install"),
        *("test_comm_hooks.py", "test_construction.py", "test_forward.py"),
    }
)
"""Folders and files whose tests depend on torch's version, except slow tests and those for the
newest torch only; these, and tests elsewhere, are marked individually."""

FLAG_VARIABLE = "FUSION_PASSES_DDP_FUSION"

END_S = 10.0
"""Until processes that were killed are gone, on busy cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--nightly", action="store_true", help="run the tests that are left to the nightly jobs too"
    )


@pytest.hookimpl(tryfirst=True)  # Before -m selects by marker.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests for nightly jobs. Tests that train in their own processes are slow, and files
    with such tests run first."""
    for item in items:
        if "run_on_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        is_there = not EACH_TORCH.isdisjoint((item.path.parent.name, item.path.name))
        if is_there and not any(map(item.get_closest_marker, ("slow", "newest_torch"))):
            item.add_marker("each_torch")
    if not config.getoption("--nightly"):
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    # At the end, a worker waits for the others no longer than a fast test takes.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Freeze existing objects, so that garbage collections of tests need not scan all of torch."""
    gc.freeze()
    gc.set_threshold(*COLLECTED_AFTER)


def pytest_configure(config: pytest.Config) -> None:
    """Give the session its own Inductor cache, shared by all of its processes.

    A user's cache is not changed, and an old one cannot make a test pass. Kernels are compiled in
    the process that needs them, because pools of compilers would only compete with the ranks for
    the cores. Torch uses this machine's vector instructions without a test, which would compile six
    programs per cache.
    """
    if os.environ.get(FLAG_VARIABLE):
        raise pytest.UsageError(f"{FLAG_VARIABLE} is set: the tests need the flag off. Unset it.")
    hypothesis.settings.register_profile(
        "everywhere",
        deadline=None,  # Cores are shared.
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        derandomize=True,
        database=None,
    )
    hypothesis.settings.load_profile("everywhere")
    if not hasattr(config, "workerinput"):  # Workers of pytest-xdist share their parent's cache.
        directory = tempfile.mkdtemp(prefix="fusion-passes-cache-")
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    import torch._inductor.config

    # As on ranks: one thread computes models with few rows, and others would only spin.
    torch.set_num_threads(1)
    # Torch reads it from the environment when it is imported, which already happened.
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.cpp.vec_isa_ok = True


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """The ranks of all tests; each starts when it gets its first job."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def run_on_ranks(pool: RankPool) -> Callable[..., list[Any]]:
    """``run_on_ranks(world_size, function, **kwargs)``: see :meth:`RankPool.run`."""
    return pool.run


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A Gloo group of this process alone."""
    from tests.support import fake_world

    with fake_world.one_rank():
        yield


@pytest.fixture
def fused_rank(one_rank: None) -> Iterator[None]:
    """The same, where modules are managed."""
    from torch._inductor import config

    with config.patch(ddp_fusion="concat"):
        yield


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sessions]:
    """The processes that a test starts, and that these start: they end, or are ended, by what is
    tested."""
    with Sessions(str(tmp_path)) as sessions:
        monkeypatch.setenv(MARKS, sessions.mark)
        yield sessions
        assert not sessions.left_after(END_S), "processes were left behind"


@pytest.fixture(scope="session")
def compiler() -> Iterator[Any]:
    """A compiler for a GPU that need not exist."""
    import torch

    from tests.support.cuda_codegen import CardCompiler

    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is a build without CUDA")
    pytest.importorskip("triton")
    with CardCompiler() as started:
        yield started


@pytest.fixture(autouse=True)
def _leaves_torch_as_it_was() -> Iterator[None]:
    """Check that the flag is off after a test, and that changes in torch by it and by managed
    modules can be undone, whoever still holds a module.

    Each test starts as in a new process: the package's state is reset.
    """
    import torch._inductor.config

    from fusion_passes.torch_private import owner_of_name
    from testing.state import PATCHED

    forget()
    settings = TorchSettings()
    before = {what: getattr(*owner_of_name(what)) for what in PATCHED}
    yield
    flag = torch._inductor.config.ddp_fusion
    torch._inductor.config.ddp_fusion = None  # The next test starts without it in any case.
    assert flag is None, f"the test left ddp_fusion = {flag!r}"
    forget()
    for what, value in before.items():
        assert getattr(*owner_of_name(what)) is value, f"the test left {what} replaced"
    changed = settings.restore()
    assert not changed, f"the test left these settings changed: {changed}"


@pytest.fixture(autouse=True)
def _leaves_no_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends the processes that it starts; a pool is ended with the session or module."""
    before = _children()
    yield
    pools = [request.getfixturevalue("pool").pids] if "pool" in request.fixturenames else []
    known = before.union(*pools, {_resource_tracker(), fork_server_pid()})
    assert not _children() - known, f"the test left processes: {_children() - known}"


def _children() -> set[int]:
    """Processes that this one started or forked; empty if the system does not tell."""
    children: set[int] = set()
    for parent in ("self", fork_server_pid()):
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            # When a thread ends, another one inherits its children.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children.update(int(pid) for pid in file.read_text().split())
    return children


def _resource_tracker() -> int | None:
    """Belongs to multiprocessing, and ends with this process."""
    return multiprocessing.resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
