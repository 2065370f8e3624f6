"""Unusual parameters, and models that change."""

from __future__ import annotations

import torch

from nightly_matrix.features.buffers import sgd
from nightly_matrix.run import Run
from nightly_matrix.training import Loop, train
from testing import models
from testing.models import Batch


def layouts(run: Run) -> None:
    """Weights that are not contiguous; gradients must have their strides."""
    train(run, run.ddp(models.Layouts()))


def scalars(run: Run) -> None:
    """A scalar and an empty parameter."""
    train(run, run.ddp(models.Shapes()))


def complex_numbers(run: Run) -> None:
    """Complex parameters beside real ones."""
    train(run, run.ddp(models.Complex()))


def transformer(run: Run) -> None:
    """Two layers of GPT-2."""
    loop = Loop(loss=models.language_loss, draw=models.tokens, optimizer=sgd(0.1, momentum=0.9))
    train(run, run.ddp(models.gpt2()), loop)


def recompiled(run: Run) -> None:
    """The model computes something else from the third step on."""
    model = models.Switched()

    def switch(step: int) -> None:
        model.negative = step >= 2

    train(run, run.ddp(model), Loop(steps=4, before_step=switch))


def marked_dynamic(run: Run) -> None:
    """``mark_dynamic`` on the batch."""

    def draw(generator: torch.Generator, size: int) -> Batch:
        batch = models.whole_rows(generator, size)
        for tensor in batch:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return batch

    train(run, run.ddp(run.mlp()), Loop(steps=4, sizes=(2, 4, 3, 5), draw=draw))
