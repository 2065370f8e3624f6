"""Lightning's ``ddp`` strategy, which wraps the module and compiles it again."""

import os

import lightning
import torch
import torch.distributed as dist
from common import BATCH, RATE, STEPS, Texts, new_model, save
from torch import Tensor
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """BERT and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = new_model()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """``int64[batch, 32]`` tokens and ``int64[batch]`` labels to the loss."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), RATE)


module = Classifier()
trainer = lightning.Trainer(
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # As many as torchrun starts.
    strategy="ddp",
    max_steps=STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
compiled: lightning.LightningModule = torch.compile(module)  # type: ignore[assignment]
trainer.fit(compiled, DataLoader(Texts(), BATCH))
save(module.model)
dist.destroy_process_group()
