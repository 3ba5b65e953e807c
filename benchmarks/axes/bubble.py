"""The share of a pipeline's step in which ranks wait, beside the formula of the schedule.

    python benchmarks/axes/bubble.py
    python benchmarks/axes/bubble.py --ranks 4 --micro-batches 8 --milliseconds 20 --write

Each stage sleeps in place of computing, as long in forward as in each half of backward. So ranks
need no core of their own, and a step takes as long as on a device that computes for this time: what
is measured is the order of the actions, and the time that messages and the host add. The formulas
are those of docs/guides/pipelines.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from zfun.collectives import Workers, barrier

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import pages

# The stages on each rank, and the share of waits of n ranks, m micro-batches and v stages.
SCHEDULES: dict[str, tuple[int, Callable[[int, int, int], float]]] = {
    "gpipe": (1, lambda n, m, v: (n - 1) / (m + n - 1)),
    "1f1b": (1, lambda n, m, v: (n - 1) / (m + n - 1)),
    "1f1b, 2 stages a rank": (2, lambda n, m, v: (n - 1) / (v * m + n - 1)),
    "zero_bubble": (1, lambda n, m, v: (n - 1) / (3 * m + n - 1)),
}


class Asleep(torch.autograd.Function):
    """The identity, which sleeps in forward and in backward."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, x: Tensor, there_s: float, back_s: float
    ) -> Tensor:
        ctx.back_s = back_s
        time.sleep(there_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        time.sleep(ctx.back_s)
        return grads[0], None, None


def stage(seconds: float, *, is_last: bool) -> Callable[[Any, Tensor], Tensor]:
    def run(params: Any, x: Tensor) -> Tensor:
        # The first stage sleeps for the gradient of its input too, as a stage amid the model does.
        x = Asleep.apply(x.requires_grad_(), seconds, seconds)
        out = x + Asleep.apply(params["w"], 0.0, seconds)
        return out.mean() if is_last else out

    return run


def steps(group: zf.Group, name: str, count: int, num_micro_batches: int, second: float) -> Any:
    """Return the seconds of each step of this rank."""
    torch.set_num_threads(1)
    per_rank = SCHEDULES[name][0]
    number = group.size * per_rank
    # Stages of a rank with several are shorter, so that a rank computes as long.
    fns = [stage(second / per_rank, is_last=k == number - 1) for k in range(number)]
    loss = zf.pipeline(
        fns, group, name.split(",", maxsplit=1)[0], num_micro_batches=num_micro_batches
    )
    zero = zf.zero(0, loss, zf.optim.sgd(0.1), zf.collectives.single_group())
    state = zero.init([{"w": torch.zeros(4)} for _ in fns])
    batch, found = torch.ones(num_micro_batches, 4), list[float]()
    for _ in range(count + 1):
        barrier(group)
        began = time.perf_counter()
        state, _ = zero.step(state, batch)
        found.append(time.perf_counter() - began)
    return found[1:]  # the first one connects the ranks


def waits(workers: Workers, name: str, args: argparse.Namespace) -> tuple[float, float]:
    """The measured share of waits and the one of the formula."""
    n, m, second = args.ranks, args.micro_batches, 1e-3 * args.milliseconds
    ranks = workers.run(steps, name, args.steps, m, second)
    took = statistics.median(max(times) for times in zip(*ranks, strict=True))
    per_rank, formula = SCHEDULES[name]
    return 1 - 3 * m * second / took, formula(n, m, per_rank)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a forward pass")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/axes.md")
    args = parser.parse_args()
    lines = ["| schedule | waits, measured | waits, formula | distance |", "|---|---|---|---|"]
    # One process imports the libraries for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zfun._names"])
    with Workers(args.ranks, context=context) as workers:
        for name in SCHEDULES:
            measured, formula = waits(workers, name, args)
            distance = 100 * (measured / formula - 1)
            lines.append(f"| {name} | {measured:.3f} | {formula:.3f} | {distance:+.1f} % |")
    head = (
        f"{args.ranks} processes, {args.micro_batches} micro-batches, "
        f"{args.milliseconds:g} ms for F, I and W each; "
        f"medians of {args.steps} steps"
    )
    print(head)
    print("\n".join(lines))
    if args.write:
        title = "The bubble of each schedule"
        print(
            pages.write_section(
                "axes.md", title, f"{pages.environment()} {head}.", "\n".join(lines)
            )
        )


if __name__ == "__main__":
    main()
