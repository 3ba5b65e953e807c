"""A DeepSpeed script after one changed import: a GPT that learns the standard library.

    torchrun --nproc-per-node 2 examples/from_deepspeed.py --stage 3
    torchrun --nproc-per-node 2 examples/from_deepspeed.py --deepspeed_config ds_config.json

Before, the import was ``import deepspeed``; no other line differs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, PRESETS
from text import batches, stdlib_bytes
from torch.nn import functional as F

import zfun.interop.deepspeed as deepspeed

PRESET = PRESETS["tiny"]
SEQUENCES = 4  # of a micro-batch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--losses", help="a file for the losses of rank 0, as JSON")
    parser.add_argument("--checkpoints", help="a directory, saved in the middle and at the end")
    parser.add_argument("--local_rank", type=int, default=-1, help="from the launcher")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def default_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 5, "warmup_type": "linear"},
        },
        "zero_optimization": {"stage": stage},
    }


def main() -> None:
    args = parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT(PRESET)
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        config=None if args.deepspeed_config else default_config(args.stage),
    )
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    data = batches(stdlib_bytes(200_000), SEQUENCES * size, PRESET.length, rank, size)
    rows = []
    while engine.global_steps < args.steps:
        tokens, targets = (x.to(engine.device) for x in next(data))
        logits = engine(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        engine.backward(loss)
        is_boundary = engine.is_gradient_accumulation_boundary()
        rate = engine.get_lr()[0]
        engine.step()
        norm = engine.get_global_grad_norm() if is_boundary else None
        norm = None if norm is None else float(norm)
        rows.append({"loss": float(loss.detach()), "lr": rate, "norm": norm})
        if rank == 0 and is_boundary and engine.global_steps % 5 == 0:
            print(f"step {engine.global_steps:3d}  loss {float(loss.detach()):.4f}", flush=True)
        if args.checkpoints and is_boundary and engine.global_steps == args.steps // 2:
            engine.save_checkpoint(args.checkpoints, client_state={"rows": len(rows)})
    if args.losses and rank == 0:
        Path(args.losses).write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
