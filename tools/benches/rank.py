"""A rank of a method: executes the commands that it receives over a pipe.

python -m benches.rank FILE_DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import itertools
import sys
import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist
from torch._dynamo.utils import calculate_time_spent
from torch.profiler import ProfilerActivity, profile

from benches.gradients import compare_with
from benches.processes import Assignment, Checked, Started, Stepped, serve
from workloads.models import SIZES, subject
from workloads.ways import WAYS, built, prepare

SEEDS: Final = 1000
"""Distance between the seeds of a rank's batches, and so the largest number of ranks whose batches
all differ."""


class Rank:
    """The commands. Each is called on all ranks of a method at the same time."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        torch.set_num_threads(len(assignment.cores))
        self._device = torch.device("cpu")
        if torch.cuda.is_available():
            self._device = torch.device("cuda", assignment.rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)
        self._run: Callable[[], None] = lambda: None

    # --- The process group -----------------------------------------------------------------------

    def listen(self) -> int:
        """Create the store of the process group on rank 0, and return its port."""
        self._store = self._connect(0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def join(self, port: int) -> None:
        """Join the process group."""
        place, rank = self._assignment.place, self._assignment.rank
        # NCCL registers memory only for a bound group. A rank that shares its GPU must not bind it.
        is_bound = self._device.type == "cuda" and place.ranks <= torch.cuda.device_count()
        if rank > 0:
            self._store = self._connect(port)
        dist.init_process_group(
            place.backend,
            store=self._store,
            rank=rank,
            world_size=place.ranks,
            timeout=datetime.timedelta(seconds=place.timeout_s),
            device_id=self._device if is_bound else None,
        )
        dist.barrier()

    def _connect(self, port: int, **options: bool) -> dist.TCPStore:
        place = self._assignment.place
        timeout = datetime.timedelta(seconds=place.timeout_s)
        return dist.TCPStore(place.host, port, place.ranks, timeout=timeout, **options)

    # --- A start ---------------------------------------------------------------------------------

    def build(self) -> None:
        """Build the model and its batches, which is not part of a measured start."""
        place, rank = self._assignment.place, self._assignment.rank
        made = subject(place.model, SIZES[place.size])
        self._model = built(made, self._device)
        batches = (made.batch(rank + SEEDS * number) for number in range(place.forwards))
        self._batches = tuple(
            tuple(tensor.to(self._device) for tensor in batch) for batch in batches
        )

    def wrap(self) -> None:
        """Wrap the model in DDP."""
        self._barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        mine = self._assignment
        self._training = prepare(
            WAYS[mine.way], self._model, self._batches, mine.cap_mb, mine.place.optimizer
        )
        self._run = self._training.run
        self._wrapped_s = time.perf_counter() - begin
        self._wrapped_cpu_s = time.process_time() - cpu

    def start(self, averages: bool = True) -> Started:
        """Run the first step, under ``no_sync`` unless its gradients are to be averaged."""
        ddp = self._training.ddp
        self._barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        with contextlib.nullcontext() if averages or ddp is None else ddp.no_sync():
            self._run()
        self._synchronize()
        seconds = self._wrapped_s + time.perf_counter() - begin
        cpu_s = self._wrapped_cpu_s + time.process_time() - cpu
        # Return the memory of the compilation: the processes of all methods are alive at once.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        sizes = [p.grad.nbytes for p in self._model.parameters() if p.grad is not None]
        self._give_back()
        return Started(seconds, sum(sizes), cpu_s)

    def first_average(self) -> float:
        """Run the first averaged step after :meth:`start` ran one under ``no_sync``, and return its
        seconds, without the seconds in which it compiled."""
        before = calculate_time_spent()["total_wall_time"]
        (seconds,) = self._timed(1).seconds
        return seconds - (calculate_time_spent()["total_wall_time"] - before)

    # --- Steps -----------------------------------------------------------------------------------

    def steps(self, count: int) -> Stepped:
        """Run and time steps, once all ranks are ready. On a GPU, an untimed step before them
        allocates the memory again."""
        if self._device.type == "cuda":
            self._run()
        stepped = self._timed(count)
        self._give_back()
        return stepped

    def reduce(self, num_bytes: int, count: int) -> Stepped:
        """Time all-reduces of one tensor, after one that is not timed."""
        flat, kept = torch.ones(num_bytes // 4, device=self._device), self._run
        self._run = lambda: dist.all_reduce(flat)
        self._run()
        try:
            return self._timed(count)
        finally:
            self._run = kept

    def _timed(self, count: int) -> Stepped:
        gc.collect()
        self._barrier()
        cpu = time.process_time()
        if self._device.type == "cuda":
            seconds = self._on_gpu(count)
        else:
            marks = [time.perf_counter()]
            for _ in range(count):
                self._run()
                marks.append(time.perf_counter())
            seconds = tuple(end - begin for begin, end in itertools.pairwise(marks))
        return Stepped(seconds, time.process_time() - cpu)

    def _on_gpu(self, count: int) -> tuple[float, ...]:
        """Seconds of steps, from CUDA events."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self._run()
            event.record()
        torch.cuda.synchronize()
        return tuple(begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(events))

    # --- Results ---------------------------------------------------------------------------------

    def check(self, reference: str, write: bool) -> Checked:
        """Run a step, and compare its gradients with those in the file ``reference``, which eager
        DDP writes."""
        self._run()
        self._synchronize()
        checked = compare_with(
            f"{reference}-{self._assignment.rank}",
            self._model,
            write=write,
            are_some=WAYS[self._assignment.way].is_sharded,
        )
        self._give_back()
        return checked

    def peak(self) -> int:
        """Peak memory of a step, including the memory that DDP keeps between steps, in bytes."""
        self._model.zero_grad(set_to_none=True)
        peak = self._peak_on_gpu() if self._device.type == "cuda" else self._peak_on_cpu()
        self._give_back()
        return peak + int(self._training.kept_bytes)

    def _peak_on_gpu(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._run()
        torch.cuda.synchronize()
        peak: int = torch.cuda.max_memory_allocated() - before
        return peak

    def _peak_on_cpu(self) -> int:
        """Peak memory from the allocations and releases that the profiler records."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self._run()
        events = profiler.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        changes.sort(key=lambda change: change[0])
        sizes: list[int] = [size for _, size in changes]
        return max(itertools.accumulate(sizes, initial=0))

    def state(self) -> int:
        """Bytes of the optimizer's state."""
        return self._training.state_bytes()

    def planned(self) -> str:
        """The buckets of the method in words, and the reason for them."""
        import fusion_passes

        modules = fusion_passes.report().modules
        buckets = [bucket for module in modules for bucket in module.buckets]
        mib = " + ".join(f"{bucket.num_bytes / 2**20:.1f}" for bucket in buckets)
        said = [sentence for module in modules for sentence in module.decision]
        return "; ".join([*said, f"{mib} MiB"])

    def _barrier(self) -> None:
        dist.barrier()
        self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _give_back(self) -> None:
        """Return cached memory to the device, so that the processes of all methods fit."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(sys.argv[1:], Rank)
