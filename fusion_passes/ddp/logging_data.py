"""What DDP's logging data say of a managed module."""

from __future__ import annotations

from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.protocol import participants
from fusion_passes.ddp.modules import registry
from fusion_passes.torch_private.ddp import parameters_of

_TIMED: Final = ("backward_comm_time", "backward_compute_time")
_MORE_TIMES: Final = (
    "forward_compute_time",
    "forward_compute_time_start",
    "avg_forward_compute_time",
    "backward_compute_comm_overlap_time",
    "avg_backward_compute_comm_overlap_time",
)


def run_time_fields(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What DDP's reducer would have written into its logging data, as far as it is known here.

    Times are not measured: 0, as DDP says where it has none yet. Sparse gradients lie in no bucket,
    and the flags that say what was used are none.
    """
    module = registry.module_of(ddp)
    participant = participants[module.group_name]
    rounds, lists = participant.rounds, participant.history.get("", [])
    parameters = parameters_of(ddp)
    items = [item for launches in lists for item in launches.buckets]
    buckets = [tuple(n for n in item.parameters if n != module.flags) for item in items]
    sizes = [sum(parameters[number].nbytes for number in bucket) for bucket in buckets]
    order = [number for bucket in buckets for number in bucket]
    fields = {
        "iteration": rounds,
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
