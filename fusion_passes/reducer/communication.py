"""Sends buckets: launches an all-reduce that averages them, in their own dtype or a smaller one, or
calls a communication hook instead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from fusion_passes.config import ReduceDtype, ScalingOption
from fusion_passes.layout.layout import Bucket, BucketIndex, ParameterNumber
from fusion_passes.torch_private.autograd import version_of_tensor
from fusion_passes.torch_private.ddp import BuiltinCommHookType
from fusion_passes.torch_private.process_groups import (
    AnyFuture,
    begin_all_reduce,
    begin_all_reduce_coalesced,
    seen_by_autograd,
)
from fusion_passes.torch_private.profiling import range_in_profile

Wait: TypeAlias = Callable[[], None]
"""Waits for a launched bucket. When the call returns, the bucket's memory holds the average."""


class Communication(ABC):
    """How the buckets of a module are sent.

    Attributes:
        elsewhere: parameters whose average other ranks keep: their ``.grad`` becomes ``None``.
    """

    elsewhere: frozenset[ParameterNumber] = frozenset()

    @abstractmethod
    def launch(self, bucket: Bucket, memory: Tensor, name: str = "") -> Wait:
        """Send a bucket, and return the function that waits for it. The gradients lie in
        ``memory``, ``[bucket.numel]``, one behind the other, and their averages lie there after the
        wait. A profiler records the launch under ``name``."""

    @abstractmethod
    def scaling(self, dtype: torch.dtype) -> str:
        """Where gradients of a dtype are divided by the number of ranks: a key of
        :data:`fusion_passes.reporting.table.SCALED`."""

    @abstractmethod
    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a dtype are sent, as far as it is known."""

    def note_local(self, number: ParameterNumber) -> None:  # noqa: B027 - optional
        """Handle a gradient that was accumulated in ``.grad`` and is not averaged now."""

    def end_iteration(self) -> None:  # noqa: B027 - optional
        """Handle the end of an iteration: ``.grad`` holds averages."""


@dataclass
class AllReduce(Communication):
    """Averages each bucket by an all-reduce.

    Attributes:
        is_coalesced: whether a bucket is sent as a list of its gradients.
        dtype: dtype in which wider floating-point gradients are sent; ``None``: their own.
        scaling_option: where gradients are divided, as far as the user has a choice.
        count_ranks: with ``join``: function that returns the divisor of gradients in this backward;
            ``None``: the divisor is the number of all ranks.
    """

    group: Any
    backend: str
    is_coalesced: bool = False
    dtype: torch.dtype | None = None
    scaling_option: ScalingOption = "auto"
    count_ranks: Callable[[], float] | None = None

    def launch(self, bucket: Bucket, memory: Tensor, name: str = "") -> Wait:
        divisor = self.divisor()
        if self.sent_dtype(memory.dtype) != memory.dtype.to_real():
            return self._launch_smaller(bucket, memory, divisor, name)
        is_averaged = self.count_ranks is None and self.averages(memory.dtype)
        if not is_averaged and self.group.size() > 1:
            _real(memory).div_(divisor)
        operation = dist.ReduceOp.AVG if is_averaged else dist.ReduceOp.SUM
        return self._begin(bucket, memory, operation, name)

    def _begin(self, bucket: Bucket, memory: Tensor, operation: Any, name: str) -> Wait:
        if self.group.size() == 1:
            return nothing
        # On a GPU, a range in a profile spans the kernels launched in it: the collective alone.
        with range_in_profile(f"{name} launch"):
            if self.is_coalesced:
                ends = [*bucket.offsets[1:], bucket.numel]
                gradients = [memory[a:b] for a, b in zip(bucket.offsets, ends, strict=True)]
                parts = [_real(gradient) for gradient in gradients]
                return begin_all_reduce_coalesced(self.group, parts, operation)
            return begin_all_reduce(self.group, _real(memory), operation)

    def divisor(self) -> float:
        """The divisor of the gradients in this backward."""
        return self.group.size() if self.count_ranks is None else self.count_ranks()

    def scaling(self, dtype: torch.dtype) -> str:
        if self.group.size() == 1:
            return "none"
        if self.sent_dtype(dtype) != dtype.to_real():
            return "bucket" if self.dtype == torch.float16 else "result"
        return "collective" if self.averages(dtype) else "bucket"

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None or not dtype.is_floating_point:
            return dtype.to_real()
        return self.dtype if dtype.itemsize > self.dtype.itemsize else dtype

    def averages(self, dtype: torch.dtype) -> bool:
        """Whether the collective averages gradients of this dtype, if all ranks have inputs;
        otherwise it sums them."""
        sent = self.sent_dtype(dtype)
        return sent == dtype.to_real() and collective_averages(
            self.backend, sent, self.group.size(), self.scaling_option
        )

    def _launch_smaller(self, bucket: Bucket, memory: Tensor, divisor: float, name: str) -> Wait:
        """Launch the all-reduce of a copy in the smaller dtype. Divide before the sum in fp16,
        which has a small range, otherwise after it, in the bucket's wider dtype."""
        is_divided_first = self.dtype == torch.float16
        if is_divided_first:
            memory.div_(divisor)
        sent = memory.to(self.dtype)
        wait_for_sent = self._begin(bucket, sent, dist.ReduceOp.SUM, name)

        def wait() -> None:
            wait_for_sent()
            memory.copy_(sent)
            if sent.device.type != "cpu":  # The copy was allocated on the stream of the launch.
                sent.record_stream(torch.accelerator.current_stream(sent.device))
            if not is_divided_first:
                memory.div_(divisor)

        return wait


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def nothing() -> None:
    """Wait for nothing."""


def average_sparse(group: Any, gradient: Tensor, divisor: float, name: str = "") -> Tensor:
    """Average a sparse gradient, ``[rows, ...]``, over the ranks as DDP does, by one all-reduce of
    its rows. The gradient of this rank may be dense, if a compiled forward returns it so or another
    layer reads the table too; the average has the same layout."""
    is_dense = gradient.layout is torch.strided
    # Divide first: the average is then bitwise that of eager DDP.
    rows = ((gradient.to_sparse(1) if is_dense else gradient) / divisor).coalesce()
    if group.size() > 1:
        with range_in_profile(f"{name} launch"):
            wait = begin_all_reduce(group, rows, dist.ReduceOp.SUM)
        wait()
    return rows.to_dense() if is_dense else rows


# --- Dtypes and scaling --------------------------------------------------------------------------

REDUCE_DTYPE_OF: Final[Mapping[ReduceDtype | None, torch.dtype | None]] = MappingProxyType(
    {
        None: None,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
)
"""The dtype for each value of the option ``reduce_dtype``; ``None``: the gradients' own."""

_WIDE_RANGE: Final = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes in which a sum over all ranks is far from overflow. In fp16 it is not, so fp16 gradients
are divided before they are summed, as in eager DDP."""

_AVERAGING: Final = ("nccl", "gloo")
"""Backends whose all-reduce averages, so that the package launches no kernel for it. NCCL
multiplies by 1/n, rounded to the gradients' dtype, while it reads the gradients, which costs
nothing (``hostToDevRedOp``, read in 2.27.3 to 2.30.7). Gloo divides after the sum, in its own
thread. That takes about as long as a pass over the bucket before the launch (docs/buckets.md), but
does not delay the launch."""


def collective_averages(
    backend: str, dtype: torch.dtype, world_size: int, scaling: ScalingOption
) -> bool:
    """Whether the collective itself averages gradients that are sent in this (real) dtype. If the
    number of ranks is no power of two, NCCL averages bf16 only if the user asks for it: 1/n has no
    more than 8 bits there, so all averages are off by one common factor, up to 0.2 %."""
    if scaling == "bucket" or backend not in _AVERAGING or dtype not in _WIDE_RANGE:
        return False
    is_exact = world_size.bit_count() == 1
    return scaling == "collective" or backend != "nccl" or dtype != torch.bfloat16 or is_exact


# --- Communication hooks -------------------------------------------------------------------------

SENT_AS: Final[Mapping[object, torch.dtype | None]] = MappingProxyType(
    {
        default_hooks.allreduce_hook: None,
        default_hooks.bf16_compress_hook: torch.bfloat16,
        default_hooks.fp16_compress_hook: torch.float16,
        BuiltinCommHookType.ALLREDUCE: None,
        BuiltinCommHookType.FP16_COMPRESS: torch.float16,
    }
)
"""Communication hooks that only average: the dtype in which each sends gradients; ``None``: their
own."""


class GradBucket:
    """The bucket that a communication hook gets, in place of DDP's ``GradBucket``, which cannot be
    constructed from Python. ``index`` counts the calls of the hook in an iteration. ``buffer``,
    ``[n]``, holds the gradients of this rank, not divided, one behind the other; a complex gradient
    as its real and imaginary parts."""

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
        """The flat buffer, or the tensor that was given to :meth:`set_buffer`.

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
        """Split the buffer into views with the shapes of the parameters, in their order."""
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in self._parameters]
        parts = self.buffer().split(sizes)
        return [_shaped(*pair) for pair in zip(parts, self._parameters, strict=True)]

    def take_back(self) -> None:
        """Drop the buffer: the hook's future is complete, and the hook may not read it any more."""
        self._buffer = None


@dataclass
class HookCall(Communication):
    """Calls a communication hook with its state and each bucket. ``order`` returns the indices of
    the buckets that the hook is called with, in launch order."""

    hook: Callable[..., Any]
    state: object
    parameters: Sequence[nn.Parameter]
    order: Callable[[], Sequence[BucketIndex]]
    _previous: Any = None

    def launch(self, bucket: Bucket, memory: Tensor, name: str = "") -> Wait:
        """Call the hook with a bucket, and return the function that waits for the hook's future and
        copies its value into the bucket."""
        _refuse_capture(memory)
        parameters = [self.parameters[number] for number in bucket.numbers]
        buffer = torch.view_as_real(memory).flatten() if memory.is_complex() else memory
        order = self.order()
        index, is_last = order.index(bucket.index), bucket.index == order[-1]
        given = GradBucket(index, buffer, parameters, is_last)
        versions = [version_of_tensor(parameter) for parameter in parameters]
        # Callbacks of a hook's future (PowerSGD launches collectives there) must run in one order
        # on all ranks: wait for the previous future. A future on a GPU is complete at once.
        if self._previous is not None and not self._previous.done():
            self._previous.wait()
        with torch.no_grad(), seen_by_autograd(), range_in_profile(f"{name} launch"):
            future = self.hook(self.state, given)
        if not isinstance(future, AnyFuture):
            raise RuntimeError(
                "A communication hook must return a torch.futures.Future of a tensor, and "
                f"{name_of_hook(self.hook)} returned {type(future).__name__}."
            )
        self._previous = future

        def wait() -> None:
            value = future.wait()
            result = value[0] if isinstance(value, list | tuple) else value
            self._check(result, buffer, parameters, versions)
            if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
                with torch.no_grad():
                    buffer.copy_(result.reshape(-1))
            given.take_back()
            self._previous = None  # The future keeps the bucket's memory.

        return wait

    def scaling(self, dtype: torch.dtype) -> str:
        del dtype
        return "hook"

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # Only the hook knows in which dtype it sends gradients.

    def _check(
        self,
        result: object,
        buffer: Tensor,
        parameters: Sequence[nn.Parameter],
        versions: Sequence[int],
    ) -> None:
        name, size = name_of_hook(self.hook), buffer.numel()
        if not isinstance(result, Tensor) or result.numel() != size:
            what = (
                f"{result.numel()} elements" if isinstance(result, Tensor) else repr(type(result))
            )
            raise RuntimeError(
                f"The future of communication hook {name} must give a tensor of the bucket's "
                f"{size} elements, and gave {what}."
            )
        if [version_of_tensor(parameter) for parameter in parameters] != list(versions):
            raise RuntimeError(
                f"Communication hook {name} has changed parameters. A compiled backward may still "
                "have to read them. Change them after the backward, or set ddp_fusion = None "
                "before the module is constructed."
            )


def name_of_hook(hook: object) -> str:
    """The name of a communication hook, for messages."""
    return str(getattr(hook, "__qualname__", hook))


def _shaped(part: Tensor, parameter: nn.Parameter) -> Tensor:
    if parameter.is_complex() and not part.is_complex():
        return torch.view_as_complex(part.view(*parameter.shape, 2))
    return part.view(parameter.shape)


def _refuse_capture(tensor: Tensor) -> None:
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A communication hook cannot run in a CUDA graph, which would call it once and replay "
            "what it launched. Compile without CUDA graphs (mode='reduce-overhead'), or set "
            "ddp_fusion = None before the module is constructed."
        )
