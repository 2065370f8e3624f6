"""A rank that waits over the store hears of others whose process has ended, and of a store whose
host has."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from fusion_passes.agreement.exchange import Meeting, RendezvousError, exchange
from fusion_passes.agreement.processes import Process, introduce, processes_here

TIMEOUT_S = 20.0

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="nobody can look at processes without /proc"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which runs."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


# --- Of processes -------------------------------------------------------------------------------


def _process(pid: int) -> Process:
    store = dist.HashStore()
    introduce(store, 0, pid)
    return processes_here(store)[0]


def test_a_process_has_ended_before_its_parent_asks(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    assert not process.has_ended()
    child.kill()
    end = time.monotonic() + TIMEOUT_S
    while not process.has_ended():
        assert time.monotonic() < end
        time.sleep(0.01)
    child.wait()
    assert process.has_ended()


def test_another_process_of_the_same_number_is_not_it(child: subprocess.Popen[bytes]) -> None:
    process = _process(child.pid)
    assert replace(process, started=process.started - 1).has_ended()


def test_nothing_is_known_of_a_process_that_may_not_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not Process(1, -1).has_ended()


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_the_last_process_of_a_rank_counts(
    kind: str, tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 2)
    assert processes_here(store) == {}
    for rank, pid in ((1, child.pid), (0, child.pid), (1, os.getpid())):
        introduce(store, rank, pid)
    assert processes_here(store) == {0: _process(child.pid), 1: _process(os.getpid())}


def test_nobody_looks_where_proc_has_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        introduce(store, 0, 1)
    assert processes_here(store) == {}


def test_a_store_without_lists_is_left_as_it_is() -> None:
    store = Mock(spec=dist.Store)
    store.append.side_effect = RuntimeError("append is not supported")
    store.check.return_value = False
    introduce(store, 0, os.getpid())
    assert processes_here(store) == {}
    store.set.assert_not_called()


# --- Of ranks that wait -------------------------------------------------------------------------


def _wait_for_all(store: dist.Store, rank: int, timeout_s: float = TIMEOUT_S) -> tuple[Any, Any]:
    """As one of three ranks."""
    timeout = timedelta(seconds=timeout_s)
    meeting = Meeting(rank, 3, timeout, store, store)
    return exchange(meeting, "place", "all", timeout, may_leave=False, compare=lambda _: "right")


def test_all_who_wait_hear_of_a_rank_whose_process_has_ended(
    child: subprocess.Popen[bytes],
) -> None:
    store = dist.HashStore()
    for rank, pid in enumerate((os.getpid(), child.pid, os.getpid())):
        introduce(store, rank, pid)
    errors: list[str] = []

    def wait(rank: int) -> None:
        with pytest.raises(RendezvousError) as caught:
            _wait_for_all(store, rank)
        errors.append(str(caught.value))

    ranks = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in ranks:
        thread.start()
    time.sleep(1.2)
    assert not errors, "a process that runs is waited for"
    killed = time.monotonic()
    child.kill()
    for thread in ranks:
        thread.join(TIMEOUT_S)
    assert errors == [f"rank 1: its process ({child.pid}) has ended"] * 2
    assert time.monotonic() - killed < TIMEOUT_S / 4


def test_what_a_rank_has_said_before_it_ended_counts(child: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    introduce(store, 1, child.pid)
    store.set("place/1", "all")
    store.add("place/arrived", 1)
    child.kill()
    child.wait()
    assert _wait_for_all(store, 0, timeout_s=2) == (None, {0: "all", 1: "all"})
    assert _wait_for_all(store, 2)[0] == "right"


_HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_whose_host_has_ended_is_said_to_be_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as host:
        assert host.stdout is not None
        store: Any = dist.TCPStore("localhost", int(host.stdout.readline()), is_master=False)
        meeting = Meeting(0, 2, timedelta(seconds=TIMEOUT_S), store.clone(), store)
        threading.Timer(1.0, host.kill).start()
        start = time.monotonic()
        with pytest.raises(
            RendezvousError, match="does not answer: the process that hosts"
        ) as caught:
            exchange(meeting, "here", "all", meeting.timeout, may_leave=False, compare=str)
        assert time.monotonic() - start < TIMEOUT_S / 2
        assert isinstance(caught.value.__cause__, dist.DistNetworkError)
