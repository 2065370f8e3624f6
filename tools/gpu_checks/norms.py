"""Gradients of norms in sizes from which Inductor computes reductions over rows and over columns of
one tensor in one kernel (mix-order reductions), beside eager DDP's."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benches.gradients import compare, gradients_of
from benches.results import Row
from fusion_passes.reporting.backwards import backwards
from gpu_checks.sites import Note, Site
from testing.scenarios.entries import MODES
from testing.scenarios.run import DTYPES

ROWS: Final = 8192
WIDTH: Final = 768
"""At 5 * 2 ** 20 elements and more, orders are mixed."""

TOLERANCES: Final = {"fp32": 1e-3, "bf16": 2.0**-5, "fp16": 2.0**-5}
"""Of an element, over the largest of its gradient; one that is not written is wrong by far more."""

NAN_BYTES: Final = (*[2**30] * 2, *[2**18] * 64)
"""What memory that nobody writes then holds: of the device's cache, large blocks and small ones."""

PROCESSES: Final = 8
"""At a time: each takes up to 3 GiB of the GPU, and compiles on a core."""


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
        return [Case("layer_norm", dtype, site.device, 64, 32) for dtype in ("fp32", "bf16")]
    return [
        Case(name, dtype, site.device)
        for name in NORMS
        for dtype in (DTYPES if not name.endswith("autocast") else ("fp32",))
    ]


def measure(site: Site, note: Note) -> None:
    """Compare all cases side by side: a process has a few of them, one after the other."""
    cases = cases_on(site)
    spawned = multiprocessing.get_context("spawn")
    start = (site.backend, site.device)
    # They end with the part: NCCL may take long to go.
    pool = ProcessPoolExecutor(1 if site.is_small else PROCESSES, spawned, _join, start)
    found = {pool.submit(train, case): case for case in cases}
    for done in concurrent.futures.as_completed(found):
        for row in _rows_of(done, found[done]):
            note(row)
    pool.shutdown(wait=False)


def _rows_of(future: Future[list[Row]], case: Case) -> list[Row]:
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the case's result.
        return [Row(f"{case.name}, {case.dtype}", False, f"{type(error).__name__}: {error}")]


# --- In the process of a case ------------------------------------------------------------------


def _join(backend: str, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def train(case: Case) -> list[Row]:
    """Two steps in each mode beside eager DDP's."""
    batch = case.batch()
    eager = DistributedDataParallel(case.build())
    eager(*batch).backward()
    expected = gradients_of(eager.module)
    rows = []
    for mode in MODES:
        torch._dynamo.reset()
        backwards.reset()
        torch._inductor.config.ddp_fusion = mode
        model = case.build()
        forward = torch.compile(DistributedDataParallel(model))
        wrong = ""
        for _ in range(2):
            _fill_with_nan(case.device)
            model.zero_grad()
            forward(*batch).backward()
            wrong = wrong or compare(gradients_of(model), expected).in_words(case.tolerance)
        if {one.reduced_in for one in backwards.reports()} != {"reducer"}:
            wrong = wrong or "nothing is fused"
        rows.append(Row(f"{case.name}, {case.dtype}, `{mode}`", not wrong, wrong))
    return rows


def _fill_with_nan(device: str) -> None:
    """Have memory that is taken next hold NaN, where the device keeps it."""
    if device == "cuda":
        torch.cuda.empty_cache()
        blocks = [torch.full([size // 4], torch.nan, device=device) for size in NAN_BYTES]
        del blocks
