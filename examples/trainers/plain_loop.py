"""A plain training loop with DistributedDataParallel."""

import torch
import torch.distributed as dist
from common import BATCH, RATE, STEPS, Texts, new_model, save
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
data = Texts()
loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))
model = new_model()
compiled = torch.compile(DistributedDataParallel(model))
optimizer = torch.optim.SGD(model.parameters(), RATE)
for _, batch in zip(range(STEPS), loader, strict=False):
    compiled(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
save(model)
dist.destroy_process_group()
