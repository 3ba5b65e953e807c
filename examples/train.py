"""A custom training loop over zfun's transforms.

    python examples/train.py                                  # one rank
    torchrun --nproc-per-node 2 examples/train.py             # two ranks, on GPUs if present
    torchrun --nproc-per-node 2 examples/train.py --shard optimizer grads --offload
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train.py --checkpoints runs/gpt

You may leave out any of the four transforms, and the loop gives the same numbers. With
``--checkpoints`` the loop goes on from the newest checkpoint, on any number of ranks: after a rank
was killed, or after SIGTERM, on which all ranks save at the end of the step and exit.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from typing import Any

import torch
from gpt import PRESETS, init
from text import batches, stdlib_bytes

import zfun as zf

PARTS = ("optimizer", "grads", "params")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="demo", help="size of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="training steps (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=4e-4, help="learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--shard",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        help="what to shard (default: all three, which is ZeRO-3)",
    )
    parser.add_argument(
        "--offload", action="store_true", help="keep the optimizer state in host memory"
    )
    parser.add_argument("--checkpoints", help="directory of checkpoints (default: none are saved)")
    parser.add_argument(
        "--save-every",
        type=int,
        default=20,
        help="steps between checkpoints (default: %(default)s)",
    )
    return parser.parse_args()


def local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def any_rank(flag: bool, group: zf.Group, device: torch.device) -> bool:
    flags = torch.tensor([int(flag)], device=device)
    return bool(zf.collectives.gather_values(flags, group, "flags").any())


def main() -> None:
    args = parse_args()
    terminated = threading.Event()
    if args.checkpoints:
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    device = local_device()
    group = zf.process_group()  # torchrun's ranks; one rank where there is no launcher

    config = PRESETS[args.preset]
    loss_fn, weights = init(config)  # loss_fn(params, batch) is pure, plain PyTorch
    params: Any = {name: weight.to(device) for name, weight in weights.items()}
    optimizer = zf.optim.adamw(args.lr)

    if "params" in args.shard:  # ZeRO-3: gather at use, free, gather again
        loss_fn = zf.shard_params(loss_fn, group)
        params = zf.shard(params, group)
    # gradients are partial sums over the ranks
    vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
    if "grads" in args.shard:  # ZeRO-2: reduce-scatter inside backward
        vg = zf.shard_grads(vg, group)
    if "optimizer" in args.shard:  # ZeRO-1: state and work on the shard
        optimizer = zf.shard_optimizer(optimizer, group)
    if args.offload:  # ZeRO-Offload
        optimizer = zf.offload(optimizer, zf.stores.host())

    opt_state, first = optimizer.init(params), 1
    if args.checkpoints and zf.checkpoint.latest(args.checkpoints):
        (params, opt_state), step, *_ = zf.load(args.checkpoints, (params, opt_state), group=group)
        first = step + 1

    # a batch depends on the seed and the step only, so the step is the position in the data
    data = batches(
        stdlib_bytes(),
        config.batch_size * group.size,
        config.length,
        group.rank,
        group.size,
        first=first,
    )
    began = time.perf_counter()
    for step in range(first, args.steps + 1):
        tokens, targets = next(data)
        loss, grads = vg(params, (tokens.to(device), targets.to(device)))
        params, opt_state = zf.apply(optimizer, grads, opt_state, params)
        if group.rank == 0 and (step % 10 == 0 or step in (1, args.steps)):
            print(
                f"step {step:4d}  loss {float(loss):.6f}  "
                f"{(time.perf_counter() - began) / (step - first + 1):.3f} s a step",
                flush=True,
            )
        if not args.checkpoints:
            continue
        # SIGTERM reaches the ranks in different steps, and all ranks must end after the same one
        end = step == args.steps or any_rank(terminated.is_set(), group, device)
        if end or step % args.save_every == 0:
            zf.save(args.checkpoints, (params, opt_state), step=step, group=group, keep=2)
        if end:
            break


if __name__ == "__main__":
    main()
