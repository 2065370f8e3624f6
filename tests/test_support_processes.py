"""The harness itself: the effect of a failure or hang of one rank on the others, and what is
reported."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from testing.processes import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool() as pool:
        yield pool


def _sum_of_ranks(factor: int) -> dict[str, object]:
    tensor = torch.tensor([dist.get_rank() * factor])
    dist.all_reduce(tensor)
    return {"sum": tensor, "rank": dist.get_rank(), "threads": torch.get_num_threads()}


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise LookupError("rank one gives up")
    _wait_for_the_others()


def _abort_on_one() -> None:
    _begin_together()
    if dist.get_rank() == 1:
        os.write(2, b"last words")
        os.abort()
    time.sleep(60)


def _begin_together() -> None:
    """Wait until rank 0 has left the barrier at the start of a job: a rank that ends would make
    that barrier fail."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("rank 0 has begun", "")
    else:
        store.wait(["rank 0 has begun"])
        store.delete_key("rank 0 has begun")


def _wait_for_the_others() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(60)


def _leave_setting() -> None:
    torch._inductor.config.max_autotune = True


def _alive(pids: set[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110


def test_gives_the_result_of_each_rank_and_keeps_its_processes(pool: RankPool) -> None:
    pids = set()
    for factor in (1, 5):
        results = pool.run(2, _sum_of_ranks, factor=factor)
        assert [result["rank"] for result in results] == [0, 1]
        assert all(result["sum"].item() == factor for result in results)
        assert all(result["threads"] == 1 for result in results)
        pids |= pool.pids
    assert len(pids) == 2


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (_fail_on_one, ["rank 1: LookupError: rank one gives up\nTraceback", "rank 0: "]),
        (_abort_on_one, ["rank 1: died with exit code -6", "last words", "rank 0: still running"]),
        (
            _leave_setting,
            ["left these settings changed: {'torch._inductor.config.max_autotune': True}"],
        ),
    ],
)
def test_failure_of_one_ends_all_at_once(pool: RankPool, function: object, told: list[str]) -> None:
    pool.run(2, _sum_of_ranks, factor=1)
    pids, start = pool.pids, time.monotonic()
    with pytest.raises(RankError) as error:
        pool.run(2, function)  # type: ignore[arg-type]
    assert time.monotonic() - start < 20
    for text in told:
        assert text in str(error.value)
    assert not _alive(pids)
    pool.run(2, _sum_of_ranks, factor=1)


def test_hang_is_ended_with_the_stacks_of_all(pool: RankPool) -> None:
    pool.run(2, _sum_of_ranks, factor=1)
    pids = pool.pids
    with pytest.raises(RankError, match="rank 0: not done after 1 s\n") as error:
        pool.run(2, _wait_for_the_others, timeout_s=1)
    assert str(error.value).count("_wait_for_the_others") >= 2
    assert not _alive(pids)
