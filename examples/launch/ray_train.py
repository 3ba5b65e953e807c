"""Train under Ray Train: ``python examples/launch/ray_train.py --ranks 16 --checkpoints DIR``.

Ray starts one worker for each rank and initialises ``torch.distributed``, so
``zf.process_group()`` finds the ranks. After a fault Ray starts the workers again, and the loop
goes on from the newest checkpoint, which lies on a file system that all hosts share.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import Tensor

import zfun as zf


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (torch.tanh(x @ params["w1"]) @ params["w2"] - y).pow(2).mean()


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the share of a rank in the batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 16, generator=generator)
    return x, x[:, :1].tanh()


def train(config: dict[str, Any]) -> None:
    """Run on every worker."""
    group = zf.process_group()
    zero = zf.zero(3, loss_fn, zf.optim.adamw(1e-2), group)
    generator = torch.Generator().manual_seed(0)
    params = {
        "w1": torch.randn(16, 64, generator=generator) / 4,
        "w2": torch.randn(64, 1, generator=generator) / 8,
    }
    state = zero.init(params)
    if zf.checkpoint.latest(config["checkpoints"]):
        state = zf.load(config["checkpoints"], state).state
    while state.step < config["steps"]:
        state, info = zero.step(state, make_batch(state.step, group.rank))
        if state.step % config["save_every"] == 0 or state.step == config["steps"]:
            zf.save(config["checkpoints"], state, keep=2)
            ray.train.report({"step": state.step, "loss": float(info.loss)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", required=True, help="a directory that all hosts share")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "save_every": 20, "checkpoints": args.checkpoints},
        scaling_config=ray.train.ScalingConfig(
            num_workers=args.ranks, use_gpu=torch.cuda.is_available()
        ),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
