"""What :mod:`benches.storage` trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import nn

from workloads.models import SMALL, subject
from workloads.ways import OURS, PLAIN, TRACED

TRAINED_ON: Final = 2 * 224
"""Tokens for images of 224 pixels, which ResNet-50 is trained on. Of smaller ones it keeps so
little for the backward that the gradients of its last layers make the peak."""

SUBJECTS = {
    "GPT-2": subject("gpt2", SMALL),
    "BERT": subject("bert", SMALL),
    "Llama": subject("llama", SMALL),
    "ResNet-50": subject("resnet", replace(SMALL, tokens=TRAINED_ON)),
    "ResNet-50, 64 px": subject("resnet", SMALL),
}

WAYS = (PLAIN, TRACED, *OURS, "torch concat", "torch coalesced")

BUCKETS = 20
"""As many as DDP's 25 MiB make of the 500 MB of gradients of the smallest GPT-2: these models are
smaller, and one bucket for all gradients would be allocated before the first of them exists."""


def cap_mb_of(model: nn.Module) -> float:
    """Cap in MiB that makes :data:`BUCKETS` of a model's gradients."""
    return sum(parameter.nbytes for parameter in model.parameters()) / BUCKETS / 2**20
