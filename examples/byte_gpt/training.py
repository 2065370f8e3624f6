"""One rank of the example: a reference in eager DDP, then the same training fused."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusion_passes
from byte_gpt.corpus import Corpus, standard_library
from byte_gpt.gradient_check import (
    TOLERANCE,
    GradientDifference,
    compare_gradients,
    copy_gradients,
    worst_over_ranks,
)
from byte_gpt.model import GPT
from byte_gpt.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from byte_gpt.options import Options

CHECKED_STEPS: Final = 3
"""Number of first steps whose gradients are compared with eager DDP's: the third one comes after
two updates of the parameters, so it is wrong if an earlier reduction was."""

LEARNING_RATE: Final = 1e-3

HELD_OUT_BATCH: Final = 16
"""Sequences of held-out text on which the loss is measured before and after."""

Backward: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""Runs forward and backward on inputs and targets, and returns the loss."""


@dataclass(frozen=True)
class Rank:
    """The place of this process among the others."""

    index: int
    world_size: int
    device: torch.device

    def say(self, text: str = "") -> None:
        """Print on the first rank only."""
        if self.index == 0:
            print(text, flush=True)


def train(options: Options) -> int:
    """Train as ``options`` say; the process's exit code, the same on every rank."""
    rank = _join()
    try:
        return _train(options, rank)
    finally:
        dist.destroy_process_group()


def _train(options: Options, rank: Rank) -> int:
    try:
        corpus = standard_library(context=options.context)
    except ValueError as error:
        rank.say(str(error))
        return 2
    torch.manual_seed(options.seed)
    model = GPT(
        layers=options.layers, width=options.width, heads=options.heads, context=options.context
    ).to(rank.device)
    _describe(options, rank, corpus, model)

    before = _held_out_loss(model, options, corpus, rank)
    expected = _eager_gradients(copy.deepcopy(model), options, corpus, rank)
    differences = _fused_training(model, expected, options, corpus, rank)
    after = _held_out_loss(model, options, corpus, rank)

    _show_report(options, rank)
    _show_check(differences, rank)
    rank.say(f"Loss on held-out text: {before:.3f} before, {after:.3f} after {options.steps} steps")
    problems = failures(differences, before, after)
    for problem in problems:
        rank.say(f"FAILED: {problem}")
    return 1 if problems else 0


def failures(differences: list[GradientDifference], before: float, after: float) -> list[str]:
    """A sentence for each reason why the run is a failure.

    Args:
        differences: differences of the compared steps, each from the rank where it is largest.
        before: loss on held-out text before training, in nats per byte.
        after: the same loss after training.
    """
    sentences = [
        f"In step {difference.step} the gradient of {difference.parameter} is not eager DDP's: its "
        f"relative error is {difference.max_relative_error:.1e}, and {TOLERANCE:.0e} is allowed."
        for difference in differences
        if not difference.ok
    ]
    if not after < before:
        sentences.append(f"The loss did not fall: it was {before:.3f} and is {after:.3f}.")
    return sentences


def _join() -> Rank:
    """Join the process group that torchrun describes: NCCL with one GPU per rank, otherwise
    Gloo."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return Rank(dist.get_rank(), dist.get_world_size(), device)


def _describe(options: Options, rank: Rank, corpus: Corpus, model: nn.Module) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    where = torch.cuda.get_device_name() if rank.device.type == "cuda" else "CPU"
    rank.say(
        f"torch {torch.__version__}, {rank.world_size} processes over {dist.get_backend()}, "
        f"{where}, threads of each: {torch.get_num_threads()}\n"
        f"GPT with {count:,} parameters on {corpus.train.numel():,} bytes of Python's standard "
        f"library\nddp_fusion = {options.fusion!r}, loss.backward() {options.style} the compiled "
        "function"
    )


def _wrap(model: nn.Module, options: Options, rank: Rank) -> DistributedDataParallel:
    return DistributedDataParallel(
        model,
        device_ids=[rank.device.index] if rank.device.type == "cuda" else None,
        bucket_cap_mb=options.bucket_cap_mb,
    )


def _compiled_backward(ddp: DistributedDataParallel, style: str) -> Backward:
    """The two ways to write a compiled training step."""
    if style == "inside":

        def whole_step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = ddp(inputs, targets)
            loss.backward()
            return loss

        return torch.compile(whole_step)

    compiled_ddp = torch.compile(ddp)

    def backward_outside(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = compiled_ddp(inputs, targets)
        loss.backward()
        return loss

    return backward_outside


def _eager_backward(ddp: DistributedDataParallel) -> Backward:
    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = ddp(inputs, targets)
        loss.backward()
        return loss

    return backward


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _batch(options: Options, corpus: Corpus, rank: Rank, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = corpus.batch(
        seed=options.seed,
        step=step,
        rank=rank.index,
        world_size=rank.world_size,
        batch=options.batch,
        context=options.context,
    )
    return inputs.to(rank.device), targets.to(rank.device)


def _eager_gradients(
    model: nn.Module, options: Options, corpus: Corpus, rank: Rank
) -> list[dict[str, Tensor]]:
    """Gradients of the first steps in stock eager DDP, which never sees the flag."""
    gradients = []
    with inductor_config.patch(ddp_fusion=None):
        backward = _eager_backward(_wrap(model, options, rank))
        optimizer = _optimizer(model)
        for step in range(min(CHECKED_STEPS, options.steps)):
            optimizer.zero_grad()
            backward(*_batch(options, corpus, rank, step))
            gradients.append(copy_gradients(model))
            optimizer.step()
    return gradients


def _fused_training(
    model: nn.Module,
    expected: list[dict[str, Tensor]],
    options: Options,
    corpus: Corpus,
    rank: Rank,
) -> list[GradientDifference]:
    """Train the model and compare the gradients of the first ``len(expected)`` steps."""
    inductor_config.ddp_fusion = options.fusion
    backward = _compiled_backward(_wrap(model, options, rank), options.style)
    optimizer = _optimizer(model)
    differences = []
    step_tokens = options.batch * options.context * rank.world_size
    with Progress(options.steps, step_tokens, rank.index == 0) as progress:
        for step in range(options.steps):
            if step == len(expected) and options.fusion is not None:
                fusion_passes.record_steps(2, plain_steps=1)
            optimizer.zero_grad()
            loss = backward(*_batch(options, corpus, rank, step))
            if step < len(expected):
                difference = compare_gradients(step, copy_gradients(model), expected[step])
                differences.append(worst_over_ranks(difference))
            optimizer.step()
            progress.advance(loss.item())
    return differences


@torch.no_grad()
def _held_out_loss(model: nn.Module, options: Options, corpus: Corpus, rank: Rank) -> float:
    """Loss on text that no rank trains on, in nats per byte, without compiling."""
    inputs, targets = corpus.held_out_batch(batch=HELD_OUT_BATCH, context=options.context)
    loss: Tensor = model(inputs.to(rank.device), targets.to(rank.device))
    return loss.item()


def _show_report(options: Options, rank: Rank) -> None:
    """Print the report, and when each bucket was sent in some of the first steps."""
    if options.fusion is None:
        rank.say("\nNothing was fused: --fusion none leaves torch as it is.\n")
        return
    if rank.index == 0:
        report = fusion_passes.report()
        print(fusion_passes.format_report(report))
        if report.timeline is not None:
            report.write_timeline(options.timeline)
            rank.say(f"Timeline of {len(report.timeline.ranks)} ranks: {options.timeline}\n")


def _show_check(differences: list[GradientDifference], rank: Rank) -> None:
    rank.say("Gradients against eager DDP (worst rank and parameter)")
    rank.say(f"{'step':>4}  {'max abs error':>13}  {'max rel error':>13}  parameter")
    for difference in differences:
        rank.say(
            f"{difference.step:>4}  {difference.max_abs_error:>13.2e}  "
            f"{difference.max_relative_error:>13.2e}  {difference.parameter}"
        )
    rank.say(
        f"Tolerance: {TOLERANCE:.0e} of a gradient's largest element. Kernels that sum in another "
        "order differ\nby about 1e-5; a gradient that was not reduced differs by 0.1 and more."
    )
