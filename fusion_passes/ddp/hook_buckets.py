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
from fusion_passes.torch_private import disable_dynamo
from fusion_passes.torch_private.ddp import parameters_of, version_of
from fusion_passes.torch_private.stand_ins import AnyFuture, seen_by_autograd


class HookBucket:
    """What a communication hook is given: DDP's ``GradBucket``, which cannot be made from Python.

    Args:
        index: of the bucket in its step, in the order in which the hook is called.
        buffer: ``[n]``, the gradients of this rank, not divided, one after the other; of complex
            ones their real and imaginary parts, as in DDP.
        parameters: whose gradients they are.
        is_last: whether no other bucket of the step comes.
    """

    def __init__(
        self, index: int, buffer: Tensor, parameters: Sequence[nn.Parameter], is_last: bool
    ) -> None:
        self._index = index
        self._buffer: Tensor | None = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters)

    def buffer(self) -> Tensor:
        """The flat buffer, or what :meth:`set_buffer` was given.

        Raises:
            RuntimeError: the hook's future is complete.
        """
        if self._buffer is None:
            raise RuntimeError(
                "A communication hook has used its bucket after the future that it returned was "
                "complete: under ddp_fusion its memory is that of the gradients then. Clone what "
                "is needed later."
            )
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Split the buffer into views of it, of the parameters' shapes, in their order."""
        pieces = self.buffer().split([_numel(parameter) for parameter in self._parameters])
        return [_shaped(*pair) for pair in zip(pieces, self._parameters, strict=True)]

    def take_back(self) -> None:
        """The hook has given its result."""
        self._buffer = None


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
        _refuse_capture(flat[0])
        index, item, is_last = self._next()
        if item.divided != "hook":
            return None
        ddp = self.ddp()
        assert ddp is not None, "its gradients are reduced"
        numbered = parameters_of(ddp)
        parameters = [numbered[number] for number in item.parameters]
        buffer = flat[0] if len(flat) == 1 else torch.cat(flat)
        assert buffer.numel() == sum(map(_numel, parameters)), "it is what was announced"
        bucket = HookBucket(index, buffer, parameters, is_last)
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
        self, caller: HookCaller, bucket: HookBucket, buffer: Tensor, pieces: list[Tensor]
    ) -> None:
        self._caller, self._bucket = caller, bucket
        self._buffer, self._pieces = buffer, pieces
        self._versions = [version_of(parameter) for parameter in bucket.parameters()]
        with torch.no_grad(), seen_by_autograd():
            self.future: AnyFuture[Any] = caller.hook(caller.state, bucket)
        if not isinstance(self.future, AnyFuture):
            raise RuntimeError(
                "A communication hook must return a torch.futures.Future of a tensor, and "
                f"{_name(caller.hook)} returned {type(self.future).__name__}."
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
        name, size = _name(self._caller.hook), self._buffer.numel()
        if not isinstance(result, Tensor) or result.numel() != size:
            what = (
                f"{result.numel()} elements" if isinstance(result, Tensor) else repr(type(result))
            )
            raise RuntimeError(
                f"The future of communication hook {name} must give a tensor of the bucket's "
                f"{size} elements, and gave {what}."
            )
        parameters = self._bucket.parameters()
        versions = [version_of(parameter) for parameter in parameters]
        if versions != self._versions:
            raise RuntimeError(
                f"Communication hook {name} has changed parameters. A compiled backward may still "
                "have to read them. Change them after the backward, or set ddp_fusion = None "
                "before the module is constructed."
            )


def _numel(parameter: nn.Parameter) -> int:
    """Count the elements of its gradient in a bucket."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _shaped(piece: Tensor, parameter: nn.Parameter) -> Tensor:
    if parameter.is_complex() and not piece.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    return piece.view(parameter.shape)


def _name(hook: object) -> str:
    return str(getattr(hook, "__qualname__", hook))


def _refuse_capture(tensor: Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A communication hook cannot run in a CUDA graph, which would call it once and replay "
            "what it launched. Compile without CUDA graphs (mode='reduce-overhead'), or set "
            "ddp_fusion = None before the module is constructed."
        )
