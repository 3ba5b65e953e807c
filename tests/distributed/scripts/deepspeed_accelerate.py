"""A script for accelerate with a file for DeepSpeed; rank 0 prints the losses."""

import sys

import torch
from accelerate import Accelerator

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(
    model, optimizer, torch.utils.data.DataLoader(data, batch_size=2)
)
for (x,) in loader:
    loss = model(x).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    total = accelerator.gather(loss.detach().reshape(1)).mean()
    if accelerator.is_main_process:
        kind = accelerator.distributed_type.value
        sys.stdout.write(f"{kind} {accelerator.num_processes} {total.item()}\n")
