"""The package's kernels that only move gradients, compared with a plain copy of the same memory.

A kernel that packs, casts, scales or writes gradients only reads and writes them, so its limit is
the device's bandwidth, which a large copy in the same round measures.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benches.results import Row
from fusion_passes.graph.custom_ops import PACK, WIDEN
from fusion_passes.traced.pack import register_lowerings
from gpu_checks.sites import Note, Site
from testing.scenarios.run import DTYPES

MIB: Final = 256
"""Total size of the gradients, in MiB: several times the largest cache of a GPU. On the CPU, all
shapes once."""

ROUNDS: Final = 9
REPEATS: Final = 20
"""Number of calls of a kernel in a round."""

Shapes = tuple[tuple[int, ...], ...]

SHAPES: Final[Shapes] = ((1024, 1024), (1024,), (4096, 1024), (4096,), (1024, 4096), (1024,))
"""Shapes of gradients, repeated: half of a transformer block."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that only moves gradients.

    Attributes:
        title: title of its row.
        run: compiled function, called with the tensors that it moves.
        moved_bytes: bytes read and written per element of a gradient.
        dtype: dtype of the gradients.
        inputs: the tensors that are moved: the gradients, a bucket of their size, or the bucket and
            then the gradients, which are written.
    """

    title: str
    run: Callable[..., Any]
    moved_bytes: int
    dtype: str = "fp32"
    inputs: Literal["gradients", "bucket", "both"] = "gradients"


def packing(sent: str, divisor: float = 1.0, in_bucket: bool = False) -> Callable[..., Any]:
    """The kernel that packs gradients into a bucket, as in ``"concat"``.

    Args:
        sent: dtype of the bucket.
        divisor: number that they are divided by.
        in_bucket: whether the division is a separate pass.
    """

    def pack(*gradients: Tensor) -> Any:
        offsets = [0, *itertools.accumulate(gradient.numel() for gradient in gradients)][:-1]
        strides = [stride for gradient in gradients for stride in gradient.stride()]
        return PACK(list(gradients), offsets, strides, DTYPES[sent], divisor, in_bucket, "measured")

    return pack


def widen(bucket: Tensor) -> Any:
    """Cast a bucket that was sent in a smaller dtype to its gradients' dtype."""
    return WIDEN(bucket, torch.float32, 1.0)


def write(bucket: Tensor, *gradients: Tensor) -> None:
    """Write the results of a bucket into existing gradients."""
    views = bucket.split([gradient.numel() for gradient in gradients])
    shaped = [view.view_as(grad) for view, grad in zip(views, gradients, strict=True)]
    torch._foreach_copy_(list(gradients), shaped)


KERNELS: Final = (
    Kernel("pack fp32", packing("fp32"), 4 + 4),
    Kernel("pack bf16", packing("bf16"), 2 + 2, "bf16"),
    Kernel("pack fp32, scaled by the stores", packing("fp32", 2.0), 4 + 4),
    Kernel("pack fp32, scaled in the bucket", packing("fp32", 2.0, in_bucket=True), 4 + 4 + 8),
    Kernel("pack fp32 into bf16", packing("bf16"), 4 + 2),
    Kernel("widen bf16 to fp32", widen, 2 + 4, "bf16", "bucket"),
    Kernel("write into existing gradients, fp32", write, 4 + 4, inputs="both"),
)


def measure(site: Site, note: Note) -> None:
    """Time all kernels in rounds, each with a plain copy."""
    register_lowerings(lambda _label, _copied: None)
    device = torch.device(site.device)
    once = sum(map(math.prod, SHAPES))
    times = 1 if site.is_small else round(MIB * 2**18 / once)
    source = torch.empty(times * once, device=device).normal_()
    target = torch.empty_like(source)
    calls = [Call(kernel, device, SHAPES * times) for kernel in KERNELS]
    wrong = [call.difference() for call in calls]
    plain = 2 * source.nbytes
    rates: list[list[float]] = [[] for _ in range(len(calls) + 1)]
    for _ in range(2 if site.is_small else ROUNDS):
        rates[-1].append(plain / _seconds(lambda: target.copy_(source)))
        for call, own in zip(calls, rates, strict=False):
            own.append(call.moved_bytes / _seconds(call.run))
    copy = rates.pop()
    note(Row("plain copy", figures=_figures(plain, copy, copy)))
    for call, own, words in zip(calls, rates, wrong, strict=True):
        note(Row(call.kernel.title, not words, words, _figures(call.moved_bytes, own, copy)))


def _figures(moved: int, rates: Sequence[float], copy: Sequence[float]) -> dict[str, float | None]:
    shares = [rate / plain for rate, plain in zip(rates, copy, strict=True)]
    return {
        "MiB moved": moved / 2**20,
        "GB/s": statistics.median(rates) / 1e9,
        "of the copy": statistics.median(shares),
    }


class Call:
    """A kernel with its tensors: gradients with these shapes."""

    def __init__(self, kernel: Kernel, device: torch.device, shapes: Shapes) -> None:
        self.kernel = kernel
        options: dict[str, Any] = {"dtype": DTYPES[kernel.dtype], "device": device}
        gradients = [torch.empty(shape, **options).normal_() for shape in shapes]
        count = sum(gradient.numel() for gradient in gradients)
        bucket = torch.empty(count, **options).normal_()
        self.written = gradients if kernel.inputs == "both" else []
        given = gradients if kernel.inputs == "gradients" else [bucket, *self.written]
        self.run = functools.partial(torch.compile(kernel.run, dynamic=False), *given)
        self.plain = functools.partial(kernel.run, *given)
        self.moved_bytes = kernel.moved_bytes * count

    def difference(self) -> str:
        """Difference between the compiled kernel and the same code in eager torch; empty if there
        is none."""
        found = []
        for run in (self.run, self.plain):
            for gradient in self.written:
                gradient.zero_()
            made = run()
            found.append([value.clone() for value in (self.written if made is None else [made])])
        pairs = zip(*found, strict=True)
        return "" if all(torch.equal(one, other) for one, other in pairs) else "values differ"


def _seconds(run: Callable[[], Any]) -> float:
    """Seconds per call of several consecutive calls, which are waited for."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.timeit(REPEATS).mean
