"""transformers.Trainer with its defaults, which ask DDP to find unused parameters."""

import tempfile

import torch
import torch.distributed as dist
from common import BATCH, RATE, STEPS, Texts, new_model, save
from transformers import Trainer, TrainingArguments

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        optim="sgd",
        learning_rate=RATE,
        torch_compile=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(new_model(), arguments, train_dataset=Texts())
    trainer.train()
    save(trainer.accelerator.unwrap_model(trainer.model))
dist.destroy_process_group()
