"""The loss of one real run: a GPT on source text, in plain PyTorch and under compositions.

    python benchmarks/training/convergence.py
    python benchmarks/training/convergence.py --steps 200
    python benchmarks/training/convergence.py --write    # into benchmarks/results/convergence.md

Each contender starts from the same parameters and takes the same batches of the source of Python's
standard library, with AdamW, clipping, and a warm-up before half a cosine. Plain PyTorch runs in
one process on the whole batch; zfun runs in two processes, each with half of it. A row of the table
is the mean loss of an interval of steps; the last row is the loss on text that nobody trained on.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from zfun.collectives import Workers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPTConfig, init
from text import batches, stdlib_bytes

from benchmarks import pages

CONFIG = GPTConfig(width=192, num_blocks=4, num_heads=6, length=128, batch_size=16)
PEAK, DECAY, CLIP, BETAS = 2e-3, 0.1, 1.0, (0.9, 0.95)
NUM_ROWS, NUM_HELD_OUT = 20, 16


def texts() -> tuple[Tensor, Tensor]:
    """Text to train on, and text that is held out."""
    text = stdlib_bytes()
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def rate(num_steps: int) -> Callable[[Any], Any]:
    return zf.optim.warmup_cosine(PEAK, num_steps // 10, num_steps, PEAK / 10)


def held_out(loss: Callable[[Any], Tensor]) -> float:
    """The mean loss of batches of the held-out text."""
    drawn = batches(texts()[1], CONFIG.batch_size, CONFIG.length)
    with torch.no_grad():
        losses = [loss(batch) for batch, _ in zip(drawn, range(NUM_HELD_OUT), strict=False)]
    return float(torch.stack(losses).mean())


def own_batches(group: zf.Group | None) -> Iterator[tuple[Tensor, Tensor]]:
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    return batches(texts()[0], CONFIG.batch_size, CONFIG.length, rank, size)


def plain(num_steps: int) -> list[float]:
    """The losses of the steps in plain PyTorch, and the held-out loss."""
    loss_fn, first = init(CONFIG)
    params = {name: x.clone().requires_grad_() for name, x in first.items()}
    optimizer = torch.optim.AdamW(params.values(), PEAK, BETAS, weight_decay=DECAY)
    schedule = rate(num_steps)
    losses = list[float]()
    for step, batch in zip(range(num_steps), own_batches(None), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = float(schedule(step))
        loss = loss_fn(params, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params.values(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, held_out(functools.partial(loss_fn, params))]


def sharded(group: zf.Group, num_steps: int, name: str) -> list[float]:
    """The same of ``zf.zero``, on two ranks."""
    torch.set_num_threads(1)
    stage, options = contenders()[name]
    loss_fn, first = init(CONFIG)
    rule = zf.optim.adamw(rate(num_steps), b1=BETAS[0], b2=BETAS[1], weight_decay=DECAY)
    optimizer = zf.optim.chain(zf.optim.clip_by_global_norm(CLIP), rule)
    zero = zf.zero(stage, loss_fn, optimizer, group, **options)
    state, losses = zero.init(first), list[float]()
    for _, batch in zip(range(num_steps), own_batches(group), strict=False):
        state, info = zero.step(state, batch)
        losses.append(float(info.loss))
    params = zero.params(state)
    return [*losses, held_out(functools.partial(loss_fn, params))]


def contenders() -> dict[str, tuple[int, dict[str, Any]]]:
    """Stage and options of each contender of two ranks."""
    feedback = zf.compression.error_feedback()
    int4 = zf.compression.Compression(
        params=zf.compression.int8(), grads=zf.compression.int4(feedback=feedback)
    )
    return {
        "zfun-1": (1, {}),
        "zfun-3": (3, {}),
        "zfun-3, bf16": (3, {"precision": torch.bfloat16}),
        "zfun-3, int8 params, int4 grads": (3, {"compression": int4}),
    }


def table(found: Mapping[str, list[float]], num_steps: int) -> list[str]:
    """A column for each contender, a row for each interval."""
    width = max(1, num_steps // NUM_ROWS)
    lines = ["| steps | " + " | ".join(found) + " |", "|---" * (1 + len(found)) + "|"]
    for start in range(0, num_steps, width):
        end = min(start + width, num_steps)
        cells = [f"{sum(losses[start:end]) / (end - start):.4f}" for losses in found.values()]
        lines.append(f"| {end} | " + " | ".join(cells) + " |")
    held = [f"{losses[-1]:.4f}" for losses in found.values()]
    return [*lines, "| held out | " + " | ".join(held) + " |"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = {"torch, one process": plain(options.steps)}
    for name in contenders():
        print(f"{name} ...", file=sys.stderr)
        with Workers(2, timeout_s=7200.0) as workers:
            found[name] = workers.run(sharded, options.steps, name)[0]
    lines = table(found, options.steps)
    print("\n".join(lines))
    if options.write:
        first = init(CONFIG)[1]
        count = sum(x.numel() for x in first.values()) / 1e6
        pages.write_section(
            "convergence.md",
            f"A GPT on source text, {options.steps} steps",
            f"{pages.environment()} {count:.1f} M parameters, {CONFIG.batch_size} sequences of "
            f"{CONFIG.length} bytes in a step. Mean loss in nats of the steps up to each row.",
            "\n".join(lines),
        )


if __name__ == "__main__":
    main()
