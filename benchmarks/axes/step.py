"""A step over two axes: tensor with ZeRO-3, and pipeline with data, beside torch's own.

    python benchmarks/axes/step.py                        # small, shared memory
    python benchmarks/axes/step.py --no-shared-memory     # zfun over gloo, as torch is
    python benchmarks/axes/step.py --only "tp fsdp2" "tp zfun-3" --rounds 20 --write

The method is that of ``benchmarks/step.py``: 2 x 2 processes with one thread each for every
contender, the same Llama of ``transformers``, the same batches and AdamW; in each round every
contender takes a few steps, in turn. Loss curves must agree, or the script fails.

``tp``: 2 data x 2 tensor ranks with the plan that the model names for itself. ``fsdp2`` is
``parallelize_module`` with ``fully_shard``. ``pp``: 2 stages x 2 data ranks, 1F1B. ``torch`` is
``torch.distributed.pipelining`` with stages under DDP. The peak is that of the
rank with the largest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import pages
from benchmarks.axes.contenders import CONTENDERS, PRESETS, Task, data_ranks
from benchmarks.step import Contender, Steps, hold, interval

RANKS = 4
BASES = {"tp": "tp fsdp2", "pp": "pp torch"}
ALLOWED = 1e-4


@dataclass(frozen=True)
class AxesJob:
    """The task of the ranks of a contender."""

    name: str
    task: Task


def prepare(group: zf.Group, job: AxesJob) -> Steps:
    """Make a contender, and take the first steps."""
    torch.set_num_threads(1)
    # A tiny model loads libraries, so that the measured memory is that of training.
    tiny = PRESETS["tiny"]
    warm = CONTENDERS[job.name](group, Task("tiny", job.task.num_micro_batches), tiny.build())
    warm(next(tiny.batches(*data_ranks(job.name))))
    del warm
    preset = PRESETS[job.task.preset]
    models = [preset.build()]  # emptied, so that no frame keeps the whole weights
    return hold(
        group,
        lambda: CONTENDERS[job.name](group, job.task, models.pop()),
        preset.batches(*data_ranks(job.name)),
    )


def measure(args: argparse.Namespace) -> dict[str, Contender]:
    shared = False if args.no_shared_memory else None
    task = Task(args.preset, args.micro_batches)
    # One process imports the libraries for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.axes.contenders"])
    found = {
        name: Contender(AxesJob(name, task), RANKS, shared, prepare, context) for name in args.only
    }
    try:
        for _ in range(args.rounds):
            for contender in found.values():
                contender.round(args.steps, keep=not args.in_turn)
    finally:
        for contender in found.values():
            contender.close()
    return found


def table(found: dict[str, Contender]) -> str:
    lines = [
        "| | ms | CPU ms | peak MB | time / torch | peak / torch |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        base = found.get(BASES[name[:2]], one)
        own, theirs = (statistics.median(map(max, x.seconds)) for x in (one, base))
        cpu = statistics.median(map(sum, one.cpu_seconds))
        lines.append(
            f"| {name} | {1e3 * own:.1f} | {1e3 * cpu:.1f} | {one.peak / 1e6:.1f} "
            f"| {own / theirs:.3f}{interval(one, base)} | {one.peak / base.peak:.2f} |"
        )
    return "\n".join(lines)


def spread_of(found: dict[str, Contender]) -> float:
    """The largest distance of two loss curves of one mesh's data."""
    curves = [one.losses for one in found.values()]
    return max(abs(a - b) for curve in curves for a, b in zip(curve, curves[0], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small", choices=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="of each contender in each round")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--no-shared-memory", action="store_true", help="zfun over gloo")
    parser.add_argument("--in-turn", action="store_true", help="one contender at a time")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/axes.md")
    args = parser.parse_args()
    found = measure(args)
    preset, spread = PRESETS[args.preset], spread_of(found)
    head = (
        f"Llama of width {preset.width}, {preset.num_layers} layers, {preset.rows} rows of "
        f"{preset.length} tokens for each data rank; 2 x 2 ranks, {args.rounds} rounds of "
        f"{args.steps} steps, {args.micro_batches} micro-batches in pipelines; medians; loss "
        f"curves differ by at most {spread:.1e}"
    )
    print(head)
    print(table(found))
    if args.write:
        title = f"{args.preset}, {'gloo' if args.no_shared_memory else 'shared memory'}"
        print(pages.write_section("axes.md", title, f"{pages.environment()} {head}.", table(found)))
    if not spread <= ALLOWED:
        sys.exit(f"the loss curves do not agree: they differ by {spread:.1e}")


if __name__ == "__main__":
    main()
