"""Runs of the facade of DeepSpeed and of plain torch, for the tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed

WIDTH, BATCH, MICRO_BATCHES = 8, 4, 2


class Net(nn.Module):
    """Layers, a norm, a tie and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, WIDTH)
        )
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)) * self.scale.sum())


class Row(NamedTuple):
    """The numbers of a micro-batch."""

    loss: float
    lr: float
    norm: float | None


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def ranks(group: zf.Group) -> Any:
    """The ranks in the form of an ``mpu``, as a script with a group of its own passes them."""
    return SimpleNamespace(get_data_parallel_group=lambda: group)


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, size * BATCH, WIDTH, generator=generator)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    return x[mine], y[mine]


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        **more,
    }


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
}


def trained(engine: Any, group: zf.Group, first: int, steps: int) -> list[Row]:
    """Train as a script of DeepSpeed does."""
    rows = []
    for step in range(first * MICRO_BATCHES, (first + steps) * MICRO_BATCHES):
        x, y = batch(step, group.rank, group.size)
        loss = (engine(x) - y).square().mean()
        engine.backward(loss)
        rate, is_boundary = engine.get_lr()[0], engine.is_gradient_accumulation_boundary()
        engine.step()
        rows.append(
            Row(float(loss.detach()), rate, engine.get_global_grad_norm() if is_boundary else None)
        )
    return rows


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def run(group: zf.Group, stage: int, steps: int) -> tuple[list[Row], dict[str, Tensor]]:
    made = config(stage, optimizer=ADAMW, scheduler=WARMUP)
    engine, *_ = deepspeed.initialize(model=net(), config=made, mpu=ranks(group))
    return trained(engine, group, 0, steps), weights(engine)


def plain(size: int, steps: int) -> tuple[list[list[Row]], dict[str, Tensor]]:
    """The same in plain torch, on the batches of all ranks; rows by rank."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rows: list[list[Row]] = [[] for _ in range(size)]
    for step in range(steps):
        # Adam's first steps of the warm-up have the rate 0, as DeepSpeed's schedule has.
        rate = 1e-2 * min(1.0, max(0, step - 1) / 4)
        for micro in range(step * MICRO_BATCHES, (step + 1) * MICRO_BATCHES):
            for rank in range(size):
                x, y = batch(micro, rank, size)
                loss = (model(x) - y).square().mean()
                (loss / (size * MICRO_BATCHES)).backward()
                rows[rank].append(Row(float(loss.detach()), rate, None))
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for of_rank in rows:
            of_rank[-1] = of_rank[-1]._replace(norm=norm)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return rows, {name: value.detach() for name, value in model.state_dict().items()}
