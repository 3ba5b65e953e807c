"""The gain of torch.compile for a block under a stage, with and without recomputation.

    python benchmarks/compile.py --preset small --stage 3 --rounds 6

One rank and one thread. Every contender has the same weights, data and optimizer; in each round
each takes a few steps in turn, so that a slow moment of the machine hits all contenders. The loss
curves must agree to rounding, or the script fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages


class Sizes(NamedTuple):
    """The sizes of a stack of blocks: width, number of blocks, examples, sequence length, heads."""

    width: int
    num_layers: int
    batch_size: int
    length: int
    heads: int


PRESETS = {
    "tiny": Sizes(64, 2, 2, 32, 4),
    "small": Sizes(512, 6, 2, 128, 8),
    "medium": Sizes(768, 8, 1, 256, 12),
}


def block(p: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    """A block of a GPT."""
    normal = F.layer_norm(x, x.shape[-1:], p["scale1"], p["shift1"])
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(-2, -3)
        for part in F.linear(normal, p["qkv"]).chunk(3, -1)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
    x = x + F.linear(mixed, p["out"])
    normal = F.layer_norm(x, x.shape[-1:], p["scale2"], p["shift2"])
    return x + F.linear(F.gelu(F.linear(normal, p["up"])), p["down"])


def make_params(sizes: Sizes) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    width = sizes.width
    shapes = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }

    def layer() -> dict[str, Tensor]:
        weights = {
            name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        scales = {name: torch.ones(width) for name in ("scale1", "scale2")}
        return weights | scales | {name: torch.zeros(width) for name in ("shift1", "shift2")}

    return [layer() for _ in range(sizes.num_layers)]


def contenders(sizes: Sizes) -> dict[str, Callable[[Any, Tensor], Tensor]]:
    plain = lambda layer, x: block(layer, x, sizes.heads)
    compiled = torch.compile(plain, fullgraph=True)
    gathered = lambda layer, x: compiled(zf.gather(layer), x)
    return {
        "eager": plain,
        "compiled": gathered,
        "remat, eager": zf.remat(plain),
        "remat, eager, matmuls kept": zf.remat(plain, policy=zf.policies.matmuls),
        "remat, compiled": zf.remat(gathered),
    }


class Trainer:
    """One contender with a training state."""

    def __init__(
        self, stage: int, run: Callable[[Any, Tensor], Tensor], sizes: Sizes, group: zf.Group
    ) -> None:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for layer in params:
                x = run(layer, x)
            return x.square().mean()

        self.zero = zf.zero(stage, loss_fn, zf.optim.adamw(1e-3), group)
        self.state = self.zero.init(make_params(sizes))
        self.losses: list[float] = []
        self.times_s: list[float] = []

    def step(self, x: Tensor) -> None:
        started = time.perf_counter()
        self.state, info = self.zero.step(self.state, x)
        self.losses.append(float(info.loss))
        self.times_s.append(time.perf_counter() - started)


def measure(preset: str, stage: int, rounds: int, steps: int) -> dict[str, Trainer]:
    sizes, group = PRESETS[preset], zf.process_group()
    x = torch.randn(
        sizes.batch_size, sizes.length, sizes.width, generator=torch.Generator().manual_seed(1)
    )
    trainers = {name: Trainer(stage, run, sizes, group) for name, run in contenders(sizes).items()}
    for trainer in trainers.values():
        for _ in range(2):
            trainer.step(x)
        trainer.times_s.clear()
    for _ in range(rounds):
        for trainer in trainers.values():
            for _ in range(steps):
                trainer.step(x)
    return trainers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(PRESETS), default="small")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/compile.md"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainers = measure(options.preset, options.stage, options.rounds, options.steps)
    first = trainers["eager"]
    for name, trainer in trainers.items():
        if any(
            abs(a - b) > 1e-3 * abs(b) for a, b in zip(trainer.losses, first.losses, strict=True)
        ):
            sys.exit(f"{name} computes another loss: {trainer.losses} and not {first.losses}")
    base = statistics.median(first.times_s)
    head = (
        f"Preset {options.preset}, stage {options.stage}, one rank, one thread, "
        f"{options.rounds} rounds of {options.steps} steps"
    )
    lines = [f"{'':28}{'median ms':>10}{'of eager':>10}{'least ms':>10}"]
    for name, trainer in trainers.items():
        median = statistics.median(trainer.times_s)
        lines.append(
            f"{name:28}{1e3 * median:10.1f}{median / base:10.2f}{1e3 * min(trainer.times_s):10.1f}"
        )
    print("\n".join([head, *lines]))
    if options.write:
        title = f"{options.preset}, stage {options.stage}"
        print(f"written: {pages.write_table('compile.md', title, head, lines)}")


if __name__ == "__main__":
    main()
