"""The modules whose optimizers are divided by the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusion_passes.reducer.backward import reducers
from fusion_passes.reducer.communication import AllReduce
from fusion_passes.reducer.parameters import Parameters
from fusion_passes.reducer.reducer import Reducer
from fusion_passes.sharded.owners import with_owners
from fusion_passes.sharded.reduction import ReduceToOwners


def shard(
    ddp: Any, label: str, parameters: Parameters, communication: AllReduce
) -> tuple[Parameters, AllReduce]:
    """Give the parameters of a new module owners, and have its gradients sent to these. A module on
    one rank stays as it is.

    Raises:
        ValueError: the module has what is not implemented beside owners.
    """
    del ddp
    sparse = [parameters.names[n] for n, kind in parameters.kinds.items() if kind.is_sparse]
    if sparse:
        raise ValueError(
            f"FusionConfig.shard_optimizer = True of {label} needs gradients that are not sparse, "
            f"but {', '.join(sparse)} is of an embedding with sparse=True. Construct it with "
            "sparse=False, or set shard_optimizer = False."
        )
    if communication.group.size() == 1:
        return parameters, communication
    kinds = with_owners(parameters.kinds, communication.group.size())
    parameters = replace(parameters, kinds=kinds)
    return parameters, ReduceToOwners(communication, parameters, label)


def sharded() -> Sequence[tuple[Reducer, ReduceToOwners]]:
    """The reducers of such modules, in the order of their construction."""
    pairs = ((reducer, reducer.queue.communication) for reducer in reducers.alive())
    return [(reducer, sends) for reducer, sends in pairs if isinstance(sends, ReduceToOwners)]


def before_backward() -> None:
    """Prepare for a backward, which may accumulate gradients of such modules.

    Raises:
        RuntimeError: gradients that exist cannot be averaged as DDP would.
    """
    for reducer, communication in sharded():
        why = communication.note_averages(reducer.received)
        if why:
            reducer.failures.leave(reducer.steps, why)
            raise RuntimeError(f"{reducer.label}: {why}")
