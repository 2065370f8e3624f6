"""Whether all parts could run, asked without a GPU: ``python -m gpu_checks.plan``.

Each flag is accepted, each model is built and gets as far as DDP, and each kind of kernel is
generated for an H100 and compiled to PTX, if this torch and Triton can.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusion_passes import FusionConfig
from gpu_checks import subjects
from gpu_checks.copies import KERNELS, Packing, Widening
from gpu_checks.parts import PARTS, PROBE, Check, Part
from testing.cuda_backwards import block_inputs, step_into_grads, step_on_cards
from testing.cuda_codegen import CardCompiler, why_not
from testing.graphs import tensor
from testing.scenarios.both_ways import target_of
from testing.scenarios.run import DTYPES, Run
from workloads.models import users_subject

T = TypeVar("T")


def main() -> int:
    """Print a line for each part and kernel; 1 if one is broken."""
    broken = 0
    for name, error in [*check_parts(), *check_kernels()]:
        print(f"{'BROKEN' if error else 'ok':8}{name}{f': {error}' if error else ''}", flush=True)
        broken += bool(error)
    return int(bool(broken))


def check_parts() -> Iterator[tuple[str, str]]:
    """Each part with what is wrong with it; empty if nothing."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for part in (PROBE, *PARTS):
        yield f"{part.name}: {_words(part)}", _problem(check_part, part)
    for factory in (subjects.gpt2, subjects.resnet50, subjects.gpt):
        name = f"{subjects.__name__}:{factory.__name__}"
        yield name, _problem(_build_subject, name)


def check_part(part: Part) -> None:
    """Go as far as a part goes without its device.

    Raises:
        Exception: whatever is wrong.
    """
    for check in part.checks:
        FusionConfig(**check.flag)
        if build(check) is None:
            raise ValueError(f"{check.title} makes no DDP module")
    if part.measure:
        module, _, function = part.measure.partition(":")
        getattr(importlib.import_module(module), function)


class _Built(Exception):  # noqa: N818
    """The model got as far as DDP."""


class _OnlyBuilt(Run):
    """A run that ends where DDP would be constructed."""

    def __init__(self, check: Check) -> None:
        super().__init__("eager", DTYPES[check.dtype], torch.device("cpu"))
        self.model: nn.Module | None = None

    def ddp(self, module: nn.Module, **_: Any) -> Any:
        self.model = module
        raise _Built

    def manage(self, module: DistributedDataParallel) -> None:
        self.model = module
        raise _Built


def build(check: Check) -> nn.Module | None:
    """The model of a check, on the CPU; ``None`` if it has none."""
    run = _OnlyBuilt(check)
    with contextlib.suppress(_Built):
        target_of(check.scenario)(run)
    return run.model


def _build_subject(name: str) -> None:
    with torch.device("meta"):
        made = users_subject(name)
        parameters = sum(value.numel() for value in made.build().parameters())
    if not parameters or not made.batch(0):
        raise ValueError("it has no parameters, or no batch")


def check_kernels() -> Iterator[tuple[str, str]]:
    """Each graph whose kernels were compiled, with what is wrong; one line if none can be."""
    reason = why_not()
    if reason is not None:
        yield f"no kernel was compiled for sm_90: {reason}", ""
        return
    gradients = [(64, 64), (7,), (33, 5), (64, 64)]
    with CardCompiler() as compiler:
        for dtype in DTYPES:
            inputs = block_inputs(DTYPES[dtype])
            step = (step_on_cards, inputs, True)
            yield f"a fused step, {dtype}, for sm_90", _compiled(compiler, *step)
        into = [*block_inputs(), *block_inputs()[1:]]
        yield "existing gradients, for sm_90", _compiled(compiler, step_into_grads, into, True)
        for kernel in KERNELS:
            kind = DTYPES[kernel.dtype]
            inputs = [tensor(*shape, dtype=kind) for shape in gradients]
            bucket = tensor(sum(spec.fake().numel() for spec in inputs), dtype=kind)
            if not isinstance(kernel, Packing):
                inputs = [bucket] if isinstance(kernel, Widening) else [bucket, *inputs]
            yield f"{kernel.title}, for sm_90", _compiled(compiler, kernel, inputs, False)


def _compiled(compiler: CardCompiler, function: Any, inputs: Any, fused: bool) -> str:
    try:
        generated = compiler.generate(function, inputs, fused=fused)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the answer.
        return f"{type(error).__name__}: {error}"
    wrong = [name for name, ptx in generated.ptx.items() if ".target sm_90" not in ptx]
    if not generated.ptx:
        return "no kernel was generated"
    return f"not for sm_90: {wrong}" if wrong else ""


def _problem(call: Callable[[T], None], argument: T) -> str:
    try:
        call(argument)
    except Exception as error:  # noqa: BLE001  Whatever it is, it is the answer.
        return f"{type(error).__name__}: {error}"
    return ""


def _words(part: Part) -> str:
    return part.measure or f"{len(part.checks)} trainings, ranks: {part.ranks}"


if __name__ == "__main__":
    sys.exit(main())
