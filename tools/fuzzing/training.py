"""Trains a case on a rank, and records everything that is compared."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fuzzing.blocks import TOKENS, WIDTH
from fuzzing.case import Case
from fuzzing.models import build
from testing.threads import run_at_once

Kind = Literal["eager", "fused", "control", "undivided"]
"""With eager DDP; under the flag; compiled in the same way without the flag; and compiled without
DDPOptimizer dividing the graphs, which fails for some caps."""


@dataclass
class Record:
    """The record of a training on a rank.

    Attributes:
        gradients: gradients by name, after each backward or each compiled step.
        losses: losses after each.
        parameters: final parameters.
        buffers: final buffers.
        warnings: warnings of this package.
        averaged: number of backwards that reducers averaged, and number of gradients that each
            copied.
        local: names of the parameters of modules under ``no_sync``, after each backward.
        elsewhere: names of the parameters that other ranks own (``shard_optimizer``).
    """

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    averaged: list[tuple[int, int]] = field(default_factory=list)
    local: list[set[str]] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)


class StageError(RuntimeError):
    """An error in a training, with its place."""

    def __init__(self, stage: tuple[int, ...]) -> None:
        super().__init__(f"fuzz stage {list(stage)}")


def train(case: Case, kind: Kind) -> Record:
    """Train a case; a job for a pool of ranks.

    Raises:
        StageError: an exception of the training.
    """
    torch.manual_seed(case.seed)
    # Eager DDP leaves a module there whose forward ran while another thread's did (torch 2.13), and
    # what is compiled later in the process is split as if it were that module's.
    DistributedDataParallel._active_ddp_module = None
    record = Record()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # As in mode="lite", which compiles faster. With reordering, ranks with different graphs
        # would launch such collectives in different orders.
        kernels = torch._inductor.config.patch(
            fallback_by_default=not case.loop.kernels, reorder_for_peak_memory=case.loop.kernels
        )
        divided = kind != "undivided" and torch._dynamo.config.optimize_ddp
        graphs = torch._dynamo.config.patch(optimize_ddp=divided)
        with _flag(case, kind), kernels, graphs:
            if kind != "fused":  # A forward of DDP itself is never one graph.
                case = replace(case, loop=replace(case.loop, fullgraph=False))
            training = Training(case, record, compiled=kind != "eager")
            try:
                training.run()
            except Exception as error:
                raise StageError(training.stage) from error
            if kind == "fused":
                record.averaged = _averaged()
    record.warnings = [
        str(item.message) for item in caught if item.category.__name__ == "FusionWarning"
    ]
    return record


@contextlib.contextmanager
def _flag(case: Case, kind: Kind) -> Iterator[None]:
    if kind != "fused":
        yield
        return
    # Eager DDP is trained without the package, as long as these ranks have had no case.
    import fusion_passes

    options = case.flag
    flag = fusion_passes.FusionConfig(**options) if isinstance(options, dict) else options
    with torch._inductor.config.patch(ddp_fusion=flag):
        yield


def _averaged() -> list[tuple[int, int]]:
    """Number of backwards that reducers averaged, and number of gradients that each copied."""
    import fusion_passes

    return [(item.count, item.copied) for item in fusion_passes.report().backwards]


def _parameters_elsewhere(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that other ranks own."""
    if "fusion_passes" not in sys.modules:
        return []
    from fusion_passes.reducer.reducer import REDUCER

    reducer: Any = getattr(ddp, REDUCER, None)
    if reducer is None:
        return []
    return [reducer.parameters.all[number] for number in reducer.queue.communication.elsewhere]


class Training:
    """The training of a case on this rank.

    Attributes:
        stage: current step, part and micro-batch; ``(-1,)`` while models are built.
        first: number of its first DDP module in the case: a thread has one of several modules.
    """

    def __init__(self, case: Case, record: Record, *, compiled: bool) -> None:
        self.case = case
        self.loop = case.loop
        self.record = record
        self.compiled = compiled
        self.stage: tuple[int, ...] = (-1,)
        self.first = 0

    def run(self) -> None:
        """Train and record."""
        self.ddps = build(self.case, compiled=self.compiled)
        if self.case.joined == "threads":
            self._train_in_threads()
        else:
            self._train()
        for ddp in self.ddps:
            ddp.state_dict()  # Waits for parameters that are on their way.
        for name, parameter in self._named("named_parameters"):
            self.record.parameters[name] = parameter.detach().clone()
        for name, buffer in self._named("named_buffers"):
            self.record.buffers[name] = buffer.detach().clone()
        elsewhere = (p for ddp in self.ddps for p in _parameters_elsewhere(ddp))
        self.record.elsewhere = self._names_of(elsewhere)

    def _train_in_threads(self) -> None:
        sides = [Training(self.case, Record(), compiled=self.compiled) for _ in self.ddps]
        for number, side in enumerate(sides):
            side.first, side.ddps = number, [self.ddps[number]]
        # A different order on each rank.
        order = sides if dist.get_rank() % 2 == 0 else sides[::-1]
        run_at_once([functools.partial(self._train_side, side) for side in order])
        for side in sides:
            self.record.gradients += side.record.gradients
            self.record.losses += side.record.losses
            self.record.local += side.record.local

    def _train_side(self, side: Training) -> None:
        try:
            side._train()
        except Exception:
            self.stage = side.stage
            raise

    def _train(self) -> None:
        together = self.case.joined != "turns"
        teams = [self.ddps] if together else [[ddp] for ddp in self.ddps]
        trainers = [Trainer(self, team) for team in teams]
        for step in range(self.case.steps):
            for number, trainer in enumerate(trainers):
                self.stage = (step, number)
                trainer.step(step)
        self.stage = (self.case.steps,)

    def note(self, loss: Tensor) -> None:
        """Record the current gradients."""
        self.record.losses.append(loss.detach().clone())
        unsynced = [ddp for ddp in self.ddps if not ddp.require_backward_grad_sync]
        self.record.local.append(self._names_of(p for ddp in unsynced for p in ddp.parameters()))
        self.record.gradients.append(
            {
                name: None if parameter.grad is None else parameter.grad.detach().clone()
                for name, parameter in self._named("named_parameters")
            }
        )

    def batch(self, step: int, number: int) -> tuple[Tensor, Tensor]:
        """Rows and tokens of a micro-batch of this rank."""
        rank = dist.get_rank()
        size = self.loop.batches[step][rank][number]
        seed = (self.case.seed % 10000) * 10000 + step * 1000 + number * 100 + rank
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(size, WIDTH, generator=generator)
        return rows, torch.randint(0, TOKENS, (size,), generator=generator)

    def _names_of(self, parameters: Iterable[nn.Parameter]) -> set[str]:
        ids = set(map(id, parameters))
        return {name for name, p in self._named("named_parameters") if id(p) in ids}

    def _named(self, method: str) -> Iterator[tuple[str, Any]]:
        for number, ddp in enumerate(self.ddps, self.first):
            for name, value in getattr(ddp.module, method)():
                yield f"{number}.{name.replace('_orig_mod.', '')}", value


class Trainer:
    """DDP modules with one optimizer for all of them."""

    def __init__(self, training: Training, ddps: list[DistributedDataParallel]) -> None:
        self.training = training
        self.loop = training.loop
        self.ddps = ddps
        self.serial = training.case.joined == "serial"
        self.step_number = 0
        self.parameters = [p for ddp in ddps for p in ddp.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.loop.optimizer, self.parameters)
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.loop.scaler, init_scale=64.0)
        self._compile()

    def _compile(self) -> None:
        """Replace functions by their compiled versions."""
        style = self.loop.style if self.training.compiled else "backward"
        options: dict[str, Any] = {"dynamic": self.loop.dynamic, "fullgraph": self.loop.fullgraph}
        self.models: list[Callable[..., Any]] = list(self.ddps)
        self.losses: Callable[..., list[Tensor]] = self._losses
        self.backward: Callable[..., Tensor] = self._backward
        if style == "outside":
            self.models = [torch.compile(ddp, **options) for ddp in self.ddps]
        elif style == "in place":
            for ddp in self.ddps:
                ddp.compile(**options)
        elif style == "loss":
            self.losses = torch.compile(self._losses, **options)
        elif style == "inside":
            self.backward = torch.compile(self._backward, **options)

    def step(self, step: int) -> None:
        """Run all micro-batches, then the optimizer."""
        self.step_number = step
        if self.loop.zero != "never":
            self.optimizer.zero_grad(set_to_none=self.loop.zero == "none")
        count = len(self.loop.batches[step][dist.get_rank()])
        batches = [self.training.batch(step, number) for number in range(count)]
        if self.loop.pattern in ("joint", "delayed"):
            self._run(batches)
        else:
            for number, batch in enumerate(batches):
                self.training.stage = (*self.training.stage[:2], number)
                # Ranks with fewer micro-batches run as many synchronized backwards: one.
                synced = number == count - 1 or not (self.loop.no_sync or self._uneven(step))
                with contextlib.nullcontext() if synced else self._no_sync():
                    self._run([batch])
        self._update()
        if self.loop.evaluates:
            self._evaluate(batches[0])

    def _uneven(self, step: int) -> bool:
        return len({len(sizes) for sizes in self.loop.batches[step]}) > 1

    def _run(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Run the forwards and backwards of a pattern."""
        self.training.note(self.backward(batches))

    def _backward(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        pattern = self.loop.pattern
        losses = [self._used(self._scaled(self.losses(*batch))) for batch in batches]
        total = torch.stack([loss for of_batch in losses for loss in of_batch]).sum()
        if pattern == "delayed":
            for of_batch in losses:
                torch.stack(of_batch).sum().backward()
        elif pattern == "twice":
            total.backward(retain_graph=True)
            total.backward()
        elif pattern == "heads" and not self._has_one_backward():
            for of_batch in losses:
                for loss in of_batch:
                    loss.backward()
        elif pattern == "named":
            total.backward(inputs=self.parameters)
        elif pattern == "together":
            torch.autograd.backward([loss for of_batch in losses for loss in of_batch])
        else:
            total.backward()
        return total.detach()

    def _has_one_backward(self) -> bool:
        """With this option, eager DDP's own node after all outputs requires a single backward."""
        return any("find_unused_parameters" in part.ddp for part in self.training.case.parts)

    def _used(self, losses: list[Tensor]) -> list[Tensor]:
        if not self.loop.some_outputs or len(losses) == 1:
            return losses
        left_out = (self.step_number + dist.get_rank()) % len(losses)
        return [*losses[:left_out], *losses[left_out + 1 :]]

    def _scaled(self, losses: list[Tensor]) -> list[Tensor]:
        return [self.scaler.scale(loss) for loss in losses] if self.loop.scaler else losses

    def _losses(self, rows: Tensor, tokens: Tensor) -> list[Tensor]:
        """A loss for each output."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.loop.autocast):
            outputs: list[Tensor] = []
            for model in self.models:
                made = tree_leaves(model(rows, tokens))
                if self.serial and len(self.models) > 1:
                    rows = made[0].float()
                outputs = [*([] if self.serial else outputs), *made]
        target = torch.linspace(-1, 1, WIDTH)
        return [
            (number + 1) * (output.float() - target).square().mean()
            for number, output in enumerate(outputs)
        ]

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for ddp in self.ddps:
                stack.enter_context(ddp.no_sync())
            yield

    def _update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.loop.clip == "norm":
            nn.utils.clip_grad_norm_(self.parameters, 0.5)
        elif self.loop.clip == "value":
            nn.utils.clip_grad_value_(self.parameters, 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _evaluate(self, batch: tuple[Tensor, Tensor]) -> None:
        """The loss of the model in eval mode, without gradients."""
        modes = [ddp.training for ddp in self.ddps]
        for ddp in self.ddps:
            ddp.eval()
        with torch.no_grad():
            losses = self.losses(*batch)
        self.training.record.losses.append(torch.stack(losses).sum())
        for ddp, mode in zip(self.ddps, modes, strict=True):
            ddp.train(mode)


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        # With the default eps, a gradient that consists of rounding errors would become a step of
        # full size.
        return torch.optim.AdamW(parameters, lr=0.01, eps=0.01)
    if name == "fused":
        return torch.optim.AdamW(parameters, lr=0.01, eps=0.01, fused=True)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.01, eps=0.01)
    if name == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=0.01, eps=0.01)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
    return torch.optim.SGD(parameters, lr=0.05, foreach=name == "foreach")
