"""Peak memory of a training step."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from workloads.ways import Training


def peak_bytes(training: Training) -> int:
    """Bytes that a step allocates at most beyond what is there before it.

    On the CPU, each allocation and release is an event of the profiler.
    """
    training.model.zero_grad(set_to_none=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        training.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.run()
    events = profiler.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    allocated = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        allocated += change
        peak = max(peak, allocated)
    return peak
