"""Calls a communication hook of DDP with the buckets of a managed module.

In a compiled graph, and after a backward, a bucket of such a module is sent like any other. The
module's name for its group stands for a group whose all-reduce is a call of the hook: the launch
gives the hook the bucket, and the wait waits for the future that it has returned, whose value is
what the bucket's gradients become.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.agreement.launches import Collective
from fusion_passes.agreement.protocol import LaunchCounter, participants
from fusion_passes.plan.layout import as_it_lies
from fusion_passes.reducer.communication import (
    GradBucket,
    name_of_hook,
    numel_in_bucket,
    refuse_capture,
)
from fusion_passes.torch_private import disable_dynamo
from fusion_passes.torch_private.autograd import version_of_tensor
from fusion_passes.torch_private.ddp import parameters_of
from fusion_passes.torch_private.process_groups import AnyFuture, seen_by_autograd


@dataclass
class HookCaller:
    """Calls the hook of a managed module.

    Attributes:
        module: the module's name for its group.
        ddp: the module.
        hook: as it was registered.
        state: with which it is called.
    """

    module: str
    ddp: weakref.ref[DistributedDataParallel]
    hook: Callable[..., Any]
    state: object
    _previous: AnyFuture[Any] | None = field(default=None, repr=False)
    _counter: LaunchCounter = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._counter = LaunchCounter(self.module)

    @disable_dynamo
    def launch(self, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
        """Call the hook with the next bucket.

        Args:
            tensors: the bucket, or its gradients one by one.

        Returns:
            What waits for its result and stores it in ``tensors``; ``None`` if these are not for
            the hook: which parameters were used is added up as it is.

        Raises:
            RuntimeError: it runs in a capture of a CUDA graph, or what it returns is no future.
        """
        flat = [as_it_lies(tensor, tensor.stride()).reshape(-1) for tensor in tensors]
        if not any(piece.numel() for piece in flat):
            return lambda: None
        refuse_capture(flat[0])
        index, item, is_last = self._next()
        if item.divided != "hook":
            return None
        ddp = self.ddp()
        assert ddp is not None, "its gradients are reduced"
        numbered = parameters_of(ddp)
        parameters = [numbered[number] for number in item.parameters]
        buffer = flat[0] if len(flat) == 1 else torch.cat(flat)
        assert buffer.numel() == sum(map(numel_in_bucket, parameters)), "it is what was announced"
        bucket = GradBucket(index, buffer, parameters, is_last)
        # What a hook does in callbacks of its future (PowerSGD launches collectives there) must
        # come in one order on all ranks. A GPU's futures are complete at once.
        if self._previous is not None and not self._previous.done():
            self._previous.wait()
        call = _Call(self, bucket, buffer, flat)
        self._previous = call.future
        return call.finish

    def _next(self) -> tuple[int, Collective, bool]:
        """The bucket that is launched next: its number in the round, what it is, and whether it is
        the last."""
        now, number = participants[self.module], self._counter.next()
        ddp = self.ddp()
        assert ddp is not None, "its gradients are reduced"
        parameters = parameters_of(ddp)
        lists = [
            [item for item in launches.collectives if _has_elements(item, parameters)]
            for launches in now.agreed[: now.position]
        ]
        item = lists[-1][number]
        sent = {n for items in lists for each in items for n in each.parameters}
        trained = {n for n, p in enumerate(parameters) if p.requires_grad and p.numel()}
        left = any(each.divided == "hook" for each in lists[-1][number + 1 :])
        before = [*itertools.chain(*lists[:-1]), *lists[-1][:number]]
        index = sum(each.divided == "hook" for each in before)
        return index, item, not left and trained <= sent


def _has_elements(item: Collective, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a collective sends any: it is not called a hook for, if it is one of gradients."""
    return item.divided != "hook" or any(parameters[n].numel() for n in item.parameters)


class _Call:
    """A call of a hook, with the future that it has returned."""

    def __init__(
        self, caller: HookCaller, bucket: GradBucket, buffer: Tensor, pieces: list[Tensor]
    ) -> None:
        self._caller, self._bucket = caller, bucket
        self._buffer, self._pieces = buffer, pieces
        self._versions = [version_of_tensor(parameter) for parameter in bucket.parameters()]
        with torch.no_grad(), seen_by_autograd():
            self.future: AnyFuture[Any] = caller.hook(caller.state, bucket)
        if not isinstance(self.future, AnyFuture):
            raise RuntimeError(
                "A communication hook must return a torch.futures.Future of a tensor, and "
                f"{name_of_hook(caller.hook)} returned {type(self.future).__name__}."
            )

    def finish(self) -> None:
        """Wait for the result, and store it in the bucket.

        Raises:
            RuntimeError: the result has another size, or the hook has changed parameters.
        """
        value = self.future.wait()
        result: Tensor = value[0] if isinstance(value, list | tuple) else value
        self._check(result)
        with torch.no_grad():
            buffer = self._buffer
            if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
                buffer.copy_(result.reshape(-1))
            if len(self._pieces) > 1:
                sizes = [piece.numel() for piece in self._pieces]
                torch._foreach_copy_(self._pieces, list(buffer.split(sizes)))
        self._bucket.take_back()

    def _check(self, result: object) -> None:
        name, size = name_of_hook(self._caller.hook), self._buffer.numel()
        if not isinstance(result, Tensor) or result.numel() != size:
            what = (
                f"{result.numel()} elements" if isinstance(result, Tensor) else repr(type(result))
            )
            raise RuntimeError(
                f"The future of communication hook {name} must give a tensor of the bucket's "
                f"{size} elements, and gave {what}."
            )
        parameters = self._bucket.parameters()
        versions = [version_of_tensor(parameter) for parameter in parameters]
        if versions != self._versions:
            raise RuntimeError(
                f"Communication hook {name} has changed parameters. A compiled backward may still "
                "have to read them. Change them after the backward, or set ddp_fusion = None "
                "before the module is constructed."
            )
