"""A loop with accelerate, which wraps the model in DDP and compiles it."""

import torch
from accelerate import Accelerator
from common import BATCH, RATE, STEPS, Texts, new_model, save
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=not torch.cuda.is_available(), dynamo_backend="inductor")
model = new_model()
optimizer = torch.optim.SGD(model.parameters(), RATE)
prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Texts(), BATCH))
for _, batch in zip(range(2 * STEPS), loader, strict=False):
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
save(accelerator.unwrap_model(prepared, keep_torch_compile=False))
accelerator.end_training()
