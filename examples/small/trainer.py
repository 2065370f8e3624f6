"""transformers.Trainer, which constructs DDP and compiles the model itself."""

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import fusion_passes

torch._inductor.config.ddp_fusion = "concat"


class Autoencoder(nn.Module):
    """Returns its loss, as the trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """``float[batch, 64]`` to the mean square of the reconstruction error."""
        return {"loss": (self.layers(inputs) - inputs).square().mean()}


class LogReport(TrainerCallback):
    """Adds the report's numbers to those that the trainer logs, here and in TensorBoard."""

    def on_log(self, *_: Any, **known: Any) -> None:
        """Add the numbers of a step."""
        known["logs"].update(fusion_passes.report().scalars())


data = [{"inputs": torch.randn(64)} for _ in range(512)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=12,
        per_device_train_batch_size=8,
        use_cpu=not torch.cuda.is_available(),
        torch_compile=True,
        logging_steps=6,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    Trainer(Autoencoder(), arguments, train_dataset=data, callbacks=[LogReport()]).train()
