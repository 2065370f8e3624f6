"""The training of the examples: a small BERT that predicts whether a text contains one token more
often than another."""

import sys
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import fusion_passes  # Reads FUSION_PASSES_DDP_FUSION, which sets the flag.

STEPS: Final = 8
BATCH: Final = 8
"""Texts per step, on each process."""

RATE: Final = 0.05
"""Rate of SGD: an optimizer that divides by the gradient's size would amplify its rounding."""


def new_model() -> BertForSequenceClassification:
    """The model, the same on every process and without dropout, so that two runs can be
    compared."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


class Texts(Dataset[dict[str, Tensor]]):
    """``int64[32]`` tokens, and whether ones are more frequent than twos."""

    def __init__(self) -> None:
        self.tokens = torch.randint(64, (1024, 32), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": ((tokens == 1).sum() > (tokens == 2).sum()).long()}


def save(model: torch.nn.Module) -> None:
    """Write the weights and the report to the files that the command names."""
    if dist.get_rank() == 0:
        weights, report = map(Path, sys.argv[1:])
        torch.save(model.state_dict(), weights)
        report.write_text(fusion_passes.report().to_json())
