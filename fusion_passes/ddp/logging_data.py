"""What DDP's logging data say of a module with a reducer."""

from __future__ import annotations

from typing import Any, Final

from fusion_passes.reducer.reducer import Reducer

_TIMED: Final = ("backward_comm_time", "backward_compute_time")
_MORE_TIMES: Final = (
    "forward_compute_time",
    "forward_compute_time_start",
    "avg_forward_compute_time",
    "backward_compute_comm_overlap_time",
    "avg_backward_compute_comm_overlap_time",
)


def run_time_fields(reducer: Reducer) -> dict[str, Any]:
    """What DDP's reducer would have written into its logging data, as far as it is known here.

    Times are not measured: 0, as DDP says where it has none yet. Sparse gradients lie in no bucket.
    """
    layout, parameters = reducer.layout, reducer.parameters.all
    buckets = [b.numbers for b in layout.buckets if not b.is_sparse] if layout is not None else []
    sizes = [sum(parameters[number].nbytes for number in bucket) for bucket in buckets]
    order = [number for bucket in buckets for number in bucket]
    fields = {
        "iteration": reducer.steps,
        "unused_parameter_size": 0,
        "has_rebuilt_buckets": int(bool(buckets)),
        "num_buckets_reduced": len(buckets),
        "rebuilt_bucket_sizes": ", ".join(map(str, sizes)),
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, b)) for b in buckets),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, order)),
    }
    times = [f"{name}_{end}" for name in _TIMED for end in ("start", "end")]
    times += [f"{prefix}{name}" for name in _TIMED for prefix in ("", "avg_")]
    return dict.fromkeys((*times, *_MORE_TIMES), 0) | fields
