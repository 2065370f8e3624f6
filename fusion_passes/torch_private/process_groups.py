"""Private names of process groups, and their collectives, called as DDP's own reducer calls them:
without the checks and records of ``torch.distributed``'s functions, which take longer than the
collective's own call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from fusion_passes.torch_private import ProcessGroup

AnyFuture: Final = torch._C.Future
"""The class of a work's future. The public class, torch.futures.Future, is derived from it."""


# --- Groups --------------------------------------------------------------------------------------


def group_timeout(group: ProcessGroup) -> timedelta:
    """The timeout of a group's collectives, which has no public name. A backend that does not tell
    its timeout is assumed to have torch's default."""
    try:
        options: Any = group._get_backend(group._device_types[0]).options
        return timedelta(seconds=options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return default_pg_timeout


def backend_name(group: ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for a device: ``"gloo"``, ``"nccl"``."""
    return str(group._get_backend(device).name())


# In a traced graph, a second name of a process group tells to which DDP module, and to which of its
# parameters, an all-reduce belongs. Groups are resolved by name when the graph runs.
register_process_group: Final[Any] = dist.distributed_c10d._register_process_group
unregister_process_group: Final[Any] = dist.distributed_c10d._unregister_process_group


# --- Collectives ---------------------------------------------------------------------------------


def begin_all_reduce(group: Any, tensor: Tensor, operation: Any) -> Callable[[], Any]:
    """Launch an all-reduce, in place. Return the function that waits for it."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    return group.allreduce([tensor], options).wait


def begin_all_reduce_coalesced(
    group: Any, tensors: Sequence[Tensor], operation: Any
) -> Callable[[], Any]:
    """Launch an all-reduce of several tensors, in place, by one collective. Return the function
    that waits for it."""
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = operation
    return group.allreduce_coalesced(list(tensors), options).wait


def begin_all_to_all(
    group: Any, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
) -> Callable[[], Any]:
    """Send a part of a flat tensor to each rank, and receive one from each; sizes in elements.
    Return the function that waits for it."""
    options = dist.AllToAllOptions()
    return group.alltoall_base(received, sent, received_sizes, sent_sizes, options).wait


def begin_reduce_to_owners(
    group: Any, memory: Tensor, sizes: Sequence[int], operation: Any
) -> Callable[[], Any]:
    """Reduce the r-th part of a flat tensor to rank r, in place, over NCCL; sizes in elements. The
    other parts are undefined afterwards. Return the function that waits for it."""
    parts = memory.split(list(sizes))
    if len(set(sizes)) == 1:
        options = dist.ReduceScatterOptions()
        options.reduceOp = operation
        return group._reduce_scatter_base(parts[group.rank()], memory, options).wait

    def reduce(rank: int) -> None:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = operation, rank
        group.reduce([parts[rank]], options)

    return _together(group, memory.device, reduce, [r for r, size in enumerate(sizes) if size])


def begin_broadcasts(
    group: Any, tensors: Sequence[tuple[int, Tensor]], *, is_grouped: bool
) -> Callable[[], Any]:
    """Broadcast tensors, each from a rank, in place; as one NCCL operation if ``is_grouped``.
    Return the function that waits for all."""

    def broadcast(index: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, tensor = tensors[index]
        return group.broadcast([tensor], options)

    if is_grouped and tensors:
        return _together(group, tensors[0][1].device, broadcast, range(len(tensors)))
    works = [broadcast(index) for index in range(len(tensors))]

    def wait() -> None:
        for work in works:
            work.wait()

    return wait


def _together(
    group: Any, device: torch.device, launch: Callable[[int], Any], items: Sequence[int]
) -> Callable[[], Any]:
    """Launch collectives as one NCCL operation."""
    group._start_coalescing(device)
    for item in items:
        launch(item)
    return group._end_coalescing(device).wait


def all_gather(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """Gather the tensors of all ranks of a group, one behind the other, and wait for that."""
    gathered = tensor.new_empty(group.size() * tensor.numel())
    group._allgather_base(gathered, tensor).wait()
    return gathered


def broadcast_first(group: Any, tensor: Tensor) -> None:
    """Broadcast the tensor of a group's first rank, in place, and wait for that."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def seen_by_autograd() -> Any:
    """A context in which writes bump the version counters of tensors, as they do when no compiled
    graph runs. A compiled graph can run with that switched off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.ADInplaceOrView, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    return torch._C._ForceDispatchKeyGuard(included, excluded)
