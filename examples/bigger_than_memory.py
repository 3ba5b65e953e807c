"""Train a GPT whose state is many times larger than the memory of the process.

    python examples/bigger_than_memory.py --path /local_nvme                # 5.5 GB of state
    python examples/bigger_than_memory.py --path /local_nvme --blocks 192   # 21.8 GB of state
    torchrun --nproc-per-node 2 examples/bigger_than_memory.py --path /local_nvme

Parameters, gradients and the state of AdamW (16 bytes for each parameter) lie on the disk, and so
do the activations between the blocks. A step holds a few buckets, however deep the model is, and
the disk needs room for the old and the new state. The system enforces the limit: a process gets no
private memory beyond ``RLIMIT_DATA``, Python, torch and the stacks of threads included.
"""

from __future__ import annotations

import argparse
import resource
import time
import zlib

import torch
from gpt import GPT, GPTConfig, make_loss
from limits import limit_memory, run_alone
from text import batches, stdlib_bytes
from torch import Tensor
from tqdm import tqdm

import zfun as zf

STATE_BYTES = 16  # of each parameter: the value, the gradient, and two moments in float32


def parse_args() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--path", default=".", help="a directory on a disk (default: here)")
    parser.add_argument("--blocks", type=int, default=48, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--limit-mib", type=int, default=640, help="0: none (default: %(default)s)")
    return parser.parse_args()


def make_model(config: GPTConfig, store: zf.stores.Store) -> GPT:
    """Return a model without values, whose blocks keep the activations between them in a store."""
    with torch.device("meta"):
        model = GPT(config)
    for block in model.blocks:
        block.forward = zf.remat(block.forward, store=store)
    return model


def first_value(path: str, leaf: Tensor) -> Tensor:
    """Make the first value of one leaf, the same on every rank."""
    if leaf.ndim == 1:  # a bias, or the factor of a LayerNorm
        return torch.zeros(leaf.shape) if path.endswith("bias") else torch.ones(leaf.shape)
    generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    return torch.empty(leaf.shape).normal_(0.0, 0.02, generator=generator)


def train(group: zf.Group, config: GPTConfig, path: str, num_steps: int) -> tuple[list[float], int]:
    """Return the losses and the number of parameters."""
    disk = zf.stores.nvme(path, buffer_count=2)
    model = make_model(config, disk)
    rate = zf.optim.warmup_cosine(2e-4, num_warmup=4, num_steps=100, start=5e-5)
    stored = zf.stores.Offload(params=disk, grads=disk, optimizer=disk)
    optimizer = zf.optim.adamw(rate)
    zero = zf.zero(3, make_loss(model), optimizer, group, offload=stored, bucket_bytes=2**22)
    params = zf.sources.initialised(dict(model.named_parameters()), first_value)
    state, losses = zero.init(params), list[float]()  # leaf by leaf, straight to the disk
    size = config.batch_size * group.size
    data = batches(stdlib_bytes(), size, config.length, group.rank, group.size)
    with tqdm(range(num_steps), disable=group.rank > 0, unit="step") as steps:
        for _ in steps:
            began = time.perf_counter()
            state, info = zero.step(state, next(data))
            losses.append(float(info.loss))
            steps.set_postfix(
                loss=f"{losses[-1]:.3f}",
                read=f"{disk.bytes_moved('get') / 1e9:.1f} GB",
                written=f"{disk.bytes_moved('put') / 1e9:.1f} GB",
                step=f"{time.perf_counter() - began:.1f} s",
            )
    return losses, sum(leaf.numel() for leaf in params.values())


def main() -> None:
    args = parse_args()
    if args.limit_mib:
        # Another process compiles the kernels, because the compiler keeps more than 100 MB.
        tiny = ["--blocks", "1", "--width", "64", "--steps", "1", "--limit-mib", "0"]
        run_alone([__file__, "--path", args.path, *tiny])
        limit_memory(args.limit_mib * 2**20)
    config = GPTConfig(args.width, args.blocks, args.width // 64, length=64, batch_size=2)
    group = zf.process_group()
    losses, num_params = train(group, config, args.path, args.steps)
    if group.rank == 0 and args.limit_mib:
        limit, state = args.limit_mib * 2**20, STATE_BYTES * num_params
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; state {state / 1e9:.2f} GB, "
            f"{state / limit:.1f} times the limit of {limit / 1e9:.2f} GB; "
            f"peak resident {peak / 1e9:.3f} GB"
        )


if __name__ == "__main__":
    main()
