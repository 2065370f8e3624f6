"""One rank of a row: trains as it is told over a pipe, and says what it measured.

python -m bench_steps.rank ASSIGNMENT FILE_DESCRIPTOR
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import functools
import gc
import itertools
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench_steps.rows import Assignment, Checked, Started, Stepped

PR_SET_PDEATHSIG = 1

TABLE_STEPS = 5
TABLE_BYTES = 2**20
"""Up to this size so many all-reduces are made: small ones vary more, and cost little."""


def main(arguments: list[str], kind: type[Rank] | None = None) -> int:
    """Answer commands until ``end``; 1 after a command that failed, which is reported.

    Args:
        arguments: of the command line.
        kind: the commands that there are; by default :class:`Rank`.
    """
    assignment = Assignment.from_json(arguments[0])
    connection = Connection(int(arguments[1]))
    # A bench that is killed leaves no ranks behind, not even one that waits in a collective.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # By the command that is terminated when it is.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    # Before torch starts threads.
    os.sched_setaffinity(0, assignment.cores)
    status = 0
    try:
        rank = (kind or Rank)(assignment, connection)
        connection.send(("done", None))
        while (command := connection.recv())[0] != "end":
            name, *values = command
            connection.send(("done", getattr(rank, name)(*values)))
    except EOFError:
        status = 1
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the row's result.
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # What would follow waits for process groups that others may have left.
    os._exit(status)


class Rank:
    """The commands; each is called on all ranks of a row at the same time."""

    def __init__(self, assignment: Assignment, connection: Connection) -> None:
        import torch

        self._assignment = assignment
        torch.set_num_threads(len(assignment.cores))
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", assignment.rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._join(connection)
        self._run: Callable[[], None] = lambda: None
        self._training: Any = None
        self._clock: Any = None

    def _join(self, connection: Connection) -> None:
        import torch.distributed as dist

        mine, timeout = self._assignment, datetime.timedelta(seconds=self._assignment.timeout_s)
        if mine.rank == 0:
            # The port is free where rank 0 runs, which can be another network namespace.
            store = dist.TCPStore(
                mine.host, 0, mine.ranks, is_master=True, timeout=timeout, wait_for_workers=False
            )
            connection.send(("port", store.port))
        else:
            store = dist.TCPStore(mine.host, connection.recv(), mine.ranks, timeout=timeout)
        dist.init_process_group(
            self.backend(), store=store, rank=mine.rank, world_size=mine.ranks, timeout=timeout
        )
        dist.barrier()

    def backend(self) -> str:
        """Of the process group."""
        return "nccl" if self._device.type == "cuda" else "gloo"

    def start(self) -> Started:
        """Prepare the row's way and make its first step."""
        from workloads.models import SIZES, subject
        from workloads.ways import PLAIN, built, prepare

        mine = self._assignment
        if mine.timeline:
            import torch._inductor.config

            torch._inductor.config.cpp.enable_kernel_profile = True
        made = subject(mine.model, SIZES[mine.size])
        model = built(made, self._device)
        if mine.row.kind == "probe":
            from bench_steps.probe import ReadyClock

            self._clock = ReadyClock(self._device)
        self._barrier()
        begin = time.perf_counter()
        way, cap_mb = mine.row.way or PLAIN, mine.row.cap_mb
        training = prepare(way, made, self._device, cap_mb=cap_mb, seed=mine.rank, model=model)
        self._training, self._run = training, training.run
        training.run()
        self._synchronize()
        seconds = time.perf_counter() - begin
        # What compilation took is given back: many processes wait for their turn.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return Started(
            seconds,
            tuple(gradient.nbytes for gradient in gradients),
            tuple(str(gradient.dtype).removeprefix("torch.") for gradient in gradients),
        )

    def start_network(self, num_bytes: int, dtype: str) -> Started:
        """Make a buffer to be reduced, instead of a model."""
        import torch
        import torch.distributed as dist

        kind = getattr(torch, dtype)
        flat = torch.zeros(num_bytes // kind.itemsize, dtype=kind, device=self._device)
        self._flat = flat
        self._run = lambda: dist.all_reduce(flat)
        return Started(0.0)

    def check(self, reference: str, write: bool) -> Checked:
        """Make a step, and compare with what eager DDP left in the file ``reference``; eager DDP
        itself writes it."""
        from bench_steps.gradients import compare_with

        self._training.run()
        self._synchronize()
        path = f"{reference}-{self._assignment.rank}"
        return compare_with(path, self._training.model, write=write)

    def steps(self, count: int) -> Stepped:
        """Make some steps, once all ranks are ready."""
        gc.collect()
        if self._clock:
            self._clock.clear()
        self._barrier()
        if self._device.type == "cuda":
            return self._steps_on_gpu(count)
        seconds, ready = [], []
        cpu = time.process_time()
        for _ in range(count):
            begin = time.perf_counter()
            self._run()
            seconds.append(time.perf_counter() - begin)
            if self._clock:
                ready.append(self._clock.read(begin))
        cpu = time.process_time() - cpu
        sizes = tuple(self._clock.sizes) if self._clock else ()
        return Stepped(tuple(seconds), cpu, tuple(ready), sizes)

    def _steps_on_gpu(self, count: int) -> Stepped:
        """By CUDA events; the last one is waited for."""
        import torch

        def event() -> Any:
            noted = torch.cuda.Event(enable_timing=True)
            noted.record()
            return noted

        marks, ready = [event()], []
        cpu = time.process_time()
        for _ in range(count):
            self._run()
            marks.append(event())
            if self._clock:
                ready.append(self._clock.read(marks[-2]))
        torch.cuda.synchronize()
        cpu = time.process_time() - cpu
        pairs = itertools.pairwise(marks)
        seconds = tuple(begin.elapsed_time(end) / 1000 for begin, end in pairs)
        sizes = tuple(self._clock.sizes) if self._clock else ()
        return Stepped(seconds, cpu, tuple(ready), sizes)

    def table(self, sizes: tuple[int, ...]) -> list[float]:
        """Seconds of an all-reduce of each size in bytes: of one alone, or a share of the time that
        several take together, whichever is less."""
        import torch.distributed as dist

        from fusion_passes.profile.measure import in_flight

        whole, found, ranks = self._run, [], self._ranks()
        for size in sizes:
            numel = max(1, size // self._flat.itemsize)
            parts = self._flat.split(numel)
            count = TABLE_STEPS if size <= TABLE_BYTES else 1
            costs = []
            for together in sorted({1, min(in_flight(size), len(parts))}):
                self._run = functools.partial(ranks.reduce_all, parts[:together], dist.ReduceOp.SUM)
                costs.append(statistics.median(self.steps(count).seconds) / together)
            found.append(min(costs))
        self._run = whole
        return found

    def taken(self, sizes: tuple[int, ...], seconds: list[float]) -> tuple[int, int]:
        """What an all-reduce takes from the compute beside it, in nanoseconds: any of them, and
        more for each MiB; the same on all ranks.

        Args:
            sizes: in bytes.
            seconds: of an all-reduce of each, on the slowest rank.
        """
        from fusion_passes.profile.measure import measure_taken
        from fusion_passes.profile.records import Kind
        from fusion_passes.profile.tables import CostTable

        kind = Kind(str(self._flat.dtype).removeprefix("torch."), "sum")
        taken = measure_taken(self._ranks(), kind, CostTable.of(sizes, seconds))
        return taken.each_ns, taken.mib_ns

    def _ranks(self) -> Any:
        """All ranks, as what measures a profile sees them."""
        from fusion_passes.profile.measure import Ranks
        from fusion_passes.torch_private.process_groups import world_group

        timeout = datetime.timedelta(seconds=self._assignment.timeout_s)
        return Ranks(world_group(), self._device, timeout)

    def timelines(self, count: int) -> list[Any]:
        """What this rank does when, in each of some steps: a ``RankTimeline`` for each."""
        from fusion_passes.reporting.recording import new_profiler, read_profile

        self.steps(2)
        found = []
        for _ in range(count + 1):
            with new_profiler() as profiler:
                self._barrier()
                begin = time.time_ns()
                self._run()
                self._synchronize()
                end = time.time_ns()
            found.append(read_profile(profiler, begin, end))
        return found[1:]  # The first time, the profiler is set up.

    def planned(self) -> str:
        """The way's buckets, and why they are these."""
        import fusion_passes

        modules = fusion_passes.report().modules
        buckets = [bucket for module in modules for bucket in module.buckets]
        mib = " + ".join(f"{bucket.num_bytes / 2**20:.1f}" for bucket in buckets)
        said = [sentence for module in modules for sentence in module.decision]
        return "; ".join([*said, f"{mib} MiB"])

    def peak(self) -> int:
        """Bytes: the peak of a step, and what DDP keeps between steps."""
        from workloads.memory import peak_bytes

        return peak_bytes(self._training) + int(self._training.kept_bytes)

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
