"""Gradients of norms in sizes from which Inductor computes reductions over rows and over columns of
one tensor in one kernel (mix-order reductions), beside eager DDP's; and what their backward takes.

Each case has a process of its own, side by side; what is timed is timed when all others are done.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes.reporting.backwards import backwards
from gpu_checks.results import Row
from gpu_checks.sites import Note, Site
from testing.scenarios.entries import MODES
from testing.scenarios.run import DTYPES
from workloads.ways import PLAIN

ROWS: Final = 8192
WIDTH: Final = 768
"""At 5 * 2 ** 20 elements and more, orders are mixed."""

FLAGS: Final[Mapping[str, Any]] = MappingProxyType({mode: mode for mode in MODES})
"""By name, the value of ``ddp_fusion``."""

TOLERANCES: Final = {"fp32": 1e-3, "bf16": 2.0**-5, "fp16": 2.0**-5}
"""Of an element, over the largest of its gradient; one that is not written is wrong by far more."""

NAN_BYTES: Final = (*[2**30] * 2, *[2**18] * 64)
"""What memory that nobody writes then holds: of the device's cache, large blocks and small ones."""

TIMED: Final = ("layer_norm", "post-LN block")
REPEATS: Final = 10
SLEEP_CYCLES: Final = 2 * 10**8
"""Some 0.1 s, in which the host gets ahead: the kernels then follow each other."""


class HandNorm(nn.Module):
    """RMSNorm as in Llama's code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, True) + 1e-6).rsqrt()).to(x.dtype)


class Norms(nn.Module):
    """Layers around norms.

    Args:
        kind: of its layers: ``"post"``, ``"pre"``, or a norm between two linear layers.
        width: of all of them.
        norm: makes one.
        autocasts: whether its forward runs under bf16 autocast.
    """

    def __init__(
        self, kind: str, width: int, norm: Callable[[int], nn.Module], autocasts: bool
    ) -> None:
        super().__init__()
        self.kind, self.autocasts = kind, autocasts
        norms = 1 if kind == "between" else 2
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(norms + 1))
        self.norms = nn.ModuleList(norm(width) for _ in range(norms))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocasts):
            output = self._output(self.linears[0](x))
        return (output.float() * weights).sum() / 64

    def _output(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears[1:], self.norms, strict=True):
            if self.kind == "between":
                x = linear(norm(x))
            elif self.kind == "pre":
                x = x + F.gelu(linear(norm(x)))
            else:
                x = norm(x + F.gelu(linear(x)))
        return x


NORMS: Final[Mapping[str, tuple[str, Callable[[int], nn.Module], bool]]] = {
    "layer_norm": ("between", nn.LayerNorm, False),
    "rms_norm": ("between", nn.RMSNorm, False),
    "RMSNorm by hand": ("between", HandNorm, False),
    "post-LN block": ("post", nn.LayerNorm, False),
    "pre-LN block": ("pre", nn.LayerNorm, False),
    "layer_norm, autocast": ("between", nn.LayerNorm, True),
    "pre-LN block, autocast": ("pre", nn.LayerNorm, True),
}


@dataclass(frozen=True)
class Case:
    """A model in a dtype.

    Attributes:
        name: in :data:`NORMS`.
        dtype: of its parameters.
        device: kind of device.
        rows: of its input.
        width: of its input.
    """

    name: str
    dtype: str
    device: str
    rows: int = ROWS
    width: int = WIDTH

    @property
    def tolerance(self) -> float:
        return TOLERANCES["bf16" if self.name.endswith("autocast") else self.dtype]

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        kind, norm, autocasts = NORMS[self.name]
        return Norms(kind, self.width, norm, autocasts).to(self.device, DTYPES[self.dtype])

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, weights = (torch.randn(self.rows, self.width, generator=generator) for _ in range(2))
        return x.to(self.device, DTYPES[self.dtype]), weights.to(self.device)


def cases_on(site: Site) -> list[Case]:
    """All; without a GPU two, tiny."""
    if site.is_small:
        return [Case(TIMED[0], dtype, site.device, 64, 32) for dtype in ("fp32", "bf16")]
    return [
        Case(name, dtype, site.device)
        for name in NORMS
        for dtype in (DTYPES if not name.endswith("autocast") else ("fp32",))
    ]


def measure(site: Site, note: Note) -> None:
    """Compare all cases, then time those that are."""
    spawned = multiprocessing.get_context("spawn")
    cases = cases_on(site)
    pools = {case: ProcessPoolExecutor(1, mp_context=spawned) for case in cases}
    found: dict[Future[list[Row]], Case] = {
        pools[case].submit(compare, case, site.backend): case for case in cases
    }
    for done in concurrent.futures.as_completed(found):
        for row in _rows_of(done, found[done]):
            note(row)
    for case in cases:
        if case.name in TIMED and case.dtype == "fp32":
            for row in _rows_of(pools[case].submit(timed, case), case):
                note(row)
    for pool in pools.values():
        # They end with the part: NCCL may take long to go.
        pool.shutdown(wait=False)


def _rows_of(future: Future[list[Row]], case: Case) -> list[Row]:
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the case's result.
        return [Row(f"{case.name}, {case.dtype}", False, f"{type(error).__name__}: {error}")]


# --- In the process of a case ------------------------------------------------------------------

_rows: dict[str, Row] = {}
"""By mode: what was found of it."""


def compare(case: Case, backend: str) -> list[Row]:
    """Two steps in each mode beside eager DDP's."""
    if case.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    batch = case.batch()
    eager = DistributedDataParallel(case.build())
    eager(*batch).backward()
    expected = _gradients(eager.module)
    for mode in FLAGS:
        wrong = ""
        backwards.reset()
        model, forward = _trained(case, mode)
        for _ in range(2):
            _fill_with_nan(case.device)
            model.zero_grad()
            forward(*batch).backward()
            wrong = wrong or _difference(_gradients(model), expected, case.tolerance)
        if {one.reduced_in for one in backwards.reports()} != {"reducer"}:
            wrong = wrong or "nothing is fused"
        _rows[mode] = Row(f"{case.name}, {case.dtype}, `{mode}`", not wrong, wrong)
    return list(_rows.values())


def _trained(case: Case, mode: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """A model, and its compiled forward in DDP; in mode ``"no DDP"`` without."""
    torch._dynamo.reset()
    model = case.build()
    torch._inductor.config.ddp_fusion = FLAGS.get(mode)
    return model, torch.compile(model if mode == PLAIN else DistributedDataParallel(model))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None
    }


def _difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], most: float) -> str:
    """Which gradients differ and by how much; empty if none does."""
    if found.keys() != expected.keys():
        return f"gradients of {', '.join(sorted(found.keys() ^ expected.keys()))} are missing"
    off = {
        name: ((found[name] - value).abs().max() / value.abs().max()).item()
        for name, value in expected.items()
    }
    wrong = [f"{name} by {error:.2g}" for name, error in off.items() if not error <= most]
    return f"off, of the largest element: {', '.join(wrong)}" if wrong else ""


def _fill_with_nan(device: str) -> None:
    """Have memory that is taken next hold NaN, where the device keeps it."""
    if device == "cuda":
        torch.cuda.empty_cache()
        blocks = [torch.full([size // 4], torch.nan, device=device) for size in NAN_BYTES]
        del blocks


def timed(case: Case) -> list[Row]:
    """The rows of a case with what their backward takes."""
    seconds: dict[str, float] = {}
    for mode in (PLAIN, *FLAGS):
        model, forward = _trained(case, mode)
        seconds[mode] = _backward_s(model, forward, case)
    base = seconds[PLAIN]
    return [
        Row(
            row.title,
            row.is_right,
            row.words,
            {"backward ms": 1000 * seconds[mode], "over no DDP": seconds[mode] / base},
        )
        for mode, row in _rows.items()
    ]


def _backward_s(model: nn.Module, forward: Callable[..., Tensor], case: Case) -> float:
    batch = case.batch()
    for _ in range(3):
        forward(*batch).backward()
    on_gpu = case.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
    marks: list[tuple[Any, Any]] = []
    for _ in range(REPEATS):
        model.zero_grad()
        loss = forward(*batch)
        begin = _now(on_gpu)
        loss.backward()
        marks.append((begin, _now(on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
    taken: list[float] = [
        begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in marks
    ]
    return statistics.median(taken)


def _now(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
