"""A training step of torch, DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed and zfun's stages.

    python benchmarks/step.py --preset small --rounds 8
    python benchmarks/step.py --preset medium --rounds 3 --in-turn    # one contender at a time
    python benchmarks/step.py --preset many --ranks 1 --only "one process" functional zfun-3
    python benchmarks/step.py --no-shared-memory --dtype bf16
    python benchmarks/step.py --rounds 60 --write    # the table into benchmarks/results/step.md

Every contender runs in separate processes with the same weights, data and AdamW, on two ranks with
one thread each (``one process`` has all threads and the whole batch). In each round every contender
takes a few steps, in turn, so that a slow moment of the machine hits all. The medians are compared
as ratios; the loss curves must agree, or the script fails: with each other, and in bfloat16 with
one process in float32.

peak: the largest growth of a rank's resident set since the weights exist (libraries are loaded and
kernels compiled before), shared memory included. wire: the bytes on the loopback interface in a
step, for all ranks together, in units of the bytes of all float32 parameters, counted in a separate
network namespace where the system allows one; zfun's ranks use the wire with ``--no-shared-memory``
only. us/tensor: with one rank, the time of a contender's step beyond the step of one process, for
each tensor.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zfun as zf
from zfun.collectives import Workers, barrier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages
from benchmarks.contenders import (
    ALONE,
    CONTENDERS,
    DEFAULT,
    ONE_PROCESS,
    Setting,
    Step,
    has_deepspeed,
    model_of,
)
from tests import loopback
from zfun.demo._memory import forget_peak, peak_bytes

WARM_STEPS = 2


@dataclass(frozen=True)
class Job:
    """The task of the ranks of a contender."""

    name: str
    preset: str
    half: bool
    threads: int


@dataclass
class Steps:
    """The measurements of some steps on one rank."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0


@dataclass
class Held:
    """The state of a rank between the calls of :func:`prepare` and :func:`take`."""

    step: Step
    data: Any
    baseline: int


_held: list[Held] = []


def hold(group: zf.Group, make: Callable[[], Step], data: Any) -> Steps:
    """Make the step of a contender, and take the first ones; the weights exist before."""
    resident = resident_bytes()
    gc.collect()
    forget_peak()
    _held[:] = [Held(make(), data, resident)]
    return take(group, WARM_STEPS)


def prepare(group: zf.Group, job: Job) -> Steps:
    """Make a contender, and take the first steps."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    # A tiny model loads libraries and compiles kernels, so that the measured memory is that of
    # training.
    tiny = model_of("tiny")
    warm = CONTENDERS[job.name](Setting(tiny, tiny.build(), group, job.half))
    warm(next(tiny.batches(group.rank, group.size)))
    del warm
    model = model_of(job.preset)
    modules = [model.build()]  # emptied, so that no frame keeps the whole weights
    return hold(
        group,
        lambda: CONTENDERS[job.name](Setting(model, modules.pop(), group, job.half)),
        model.batches(group.rank, group.size),
    )


def take(group: zf.Group, count: int) -> Steps:
    """Take some steps."""
    held, found = _held[0], Steps()
    barrier(group)
    for _ in range(count):
        batch = next(held.data)
        cpu, began = cpu_seconds(), time.perf_counter()
        loss = held.step(batch)
        found.seconds.append(time.perf_counter() - began)
        found.cpu_seconds.append(cpu_seconds() - cpu)
        found.losses.append(float(loss))
    found.peak = max(0, peak_bytes() - held.baseline)
    return found


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass
class Contender:
    """Processes of one contender, with all measurements so far, by step and rank.

    Attributes:
        job: what the ranks do.
        ranks: how many there are.
        shared_memory: see :class:`Workers`.
        prepare: makes the contender from its job.
        context: the start method of the processes.
    """

    job: Any
    ranks: int
    shared_memory: bool | None
    prepare: Callable[[zf.Group, Any], Steps] = prepare
    context: Any = None
    workers: Workers | None = None
    seconds: list[list[float]] = field(default_factory=list)
    cpu_seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)
    peak: int = 0

    def round(self, count: int, *, keep: bool) -> None:
        if self.workers is None:
            self.workers = Workers(
                self.ranks,
                timeout_s=1800.0,
                collective_timeout_s=300.0,
                shared_memory=self.shared_memory,
                context=self.context,
            )
            self._add(self.workers.run(self.prepare, self.job), timed=False)
        before, began = loopback.received_bytes(), time.perf_counter()
        found = self.workers.run(take, count)
        idle = IDLE_BYTES_PER_S[0] * (time.perf_counter() - began)
        self.wire.append(max(0.0, loopback.received_bytes() - before - idle) / count)
        self._add(found, timed=True)
        if not keep:
            self.close()

    def _add(self, ranks: list[Steps], *, timed: bool) -> None:
        if timed:
            self.seconds += [
                list(times) for times in zip(*(rank.seconds for rank in ranks), strict=True)
            ]
            self.cpu_seconds += [
                list(times) for times in zip(*(rank.cpu_seconds for rank in ranks), strict=True)
            ]
        # zfun reports the loss over all ranks, others that of a rank, and a stage of theirs none.
        self.losses += [
            statistics.fmean(loss for loss in losses if not math.isnan(loss))
            for losses in zip(*(rank.losses for rank in ranks), strict=True)
        ]
        self.peak = max(self.peak, *(rank.peak for rank in ranks))

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
            self.workers = None


IDLE_BYTES_PER_S = [0.0]


def measure(args: argparse.Namespace) -> dict[str, Contender]:
    found = {}
    for name in args.only:
        alone = name in ALONE
        job = Job(name, args.preset, args.dtype == "bf16", args.ranks if alone else 1)
        found[name] = Contender(
            job, 1 if alone else args.ranks, False if args.no_shared_memory else None
        )
    try:
        for _ in range(args.rounds):
            for contender in found.values():
                contender.round(args.steps, keep=not args.in_turn)
    finally:
        for contender in found.values():
            contender.close()
    return found


def spread_of(found: dict[str, Contender], args: argparse.Namespace) -> tuple[float, float]:
    """The largest distance of the loss curves, and the limit."""
    curves = [contender.losses for contender in found.values()]
    allowed = 1e-4
    if args.dtype == "bf16":
        allowed = 1e-2
        reference = Contender(Job(ONE_PROCESS, args.preset, False, args.ranks), 1, None)
        for index in range(args.rounds):
            reference.round(args.steps, keep=not args.in_turn and index < args.rounds - 1)
        curves = [reference.losses, *curves]
    return max(
        abs(a - b) for curve in curves for a, b in zip(curve, curves[0], strict=True)
    ), allowed


def rows_of(found: dict[str, Contender], num_bytes: int) -> dict[str, dict[str, float]]:
    return {
        name: {
            "ms": 1e3 * statistics.median(max(times) for times in contender.seconds),
            "cpu_ms": 1e3 * statistics.median(sum(times) for times in contender.cpu_seconds),
            "peak_mb": contender.peak / 1e6,
            "wire": statistics.median(contender.wire) / num_bytes,
        }
        for name, contender in found.items()
    }


def table(rows: dict[str, dict[str, float]], num_tensors: int, ranks: int) -> str:
    bases = [base for base in ("ddp", "fsdp2", ONE_PROCESS) if base in rows]
    overhead = ranks == 1 and ONE_PROCESS in rows
    lines = [
        f"{'':14}{'ms':>9}{'CPU ms':>9}{'peak MB':>9}{'wire':>8}"
        + "".join(f"{'/ ' + base:>14}" for base in bases)
        + ("   us/tensor" if overhead else "")
    ]
    for name, row in rows.items():
        line = (
            f"{name:14}{row['ms']:9.1f}{row['cpu_ms']:9.1f}{row['peak_mb']:9.0f}{row['wire']:7.2f}P"
        )
        line += "".join(f"{row['ms'] / rows[base]['ms']:14.2f}" for base in bases)
        lines.append(
            line
            + (
                f"{1e3 * (row['ms'] - rows[ONE_PROCESS]['ms']) / num_tensors:12.1f}"
                if overhead
                else ""
            )
        )
    return "\n".join(lines)


def interval(mine: Contender, base: Contender) -> str:
    """The 95 % interval of a ratio of medians, from runs resampled in blocks of ten steps."""
    pairs = list(
        zip(
            (max(times) for times in mine.seconds),
            (max(times) for times in base.seconds),
            strict=True,
        )
    )
    blocks = [pairs[start : start + 10] for start in range(0, len(pairs), 10)]
    if len(blocks) < 4:
        return ""
    draw = random.Random(0)
    ratios = []
    for _ in range(1000):
        a, b = zip(
            *(pair for block in draw.choices(blocks, k=len(blocks)) for pair in block), strict=True
        )
        ratios.append(statistics.median(a) / statistics.median(b))
    low, *_, high = statistics.quantiles(ratios, n=40)
    return f" ({low:.3f}–{high:.3f})"


def section(
    found: dict[str, Contender],
    rows: dict[str, dict[str, float]],
    args: argparse.Namespace,
    num_tensors: int,
) -> tuple[str, str]:
    """The title and the table of this run's section of the page."""
    bases = [base for base in ("ddp", "fsdp2", ONE_PROCESS) if base in rows]
    overhead = args.ranks == 1 and ONE_PROCESS in rows
    head = [
        "",
        "ms",
        "CPU ms",
        "peak MB",
        "wire",
        *(f"/ {base}" for base in bases),
        *(["us for each tensor"] if overhead else []),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        cells = [
            name,
            f"{row['ms']:.1f}",
            f"{row['cpu_ms']:.1f}",
            f"{row['peak_mb']:.0f}",
            f"{row['wire']:.2f} P",
        ]
        cells += [
            "1"
            if name == base
            else f"{row['ms'] / rows[base]['ms']:.3f}{interval(found[name], found[base])}"
            for base in bases
        ]
        if overhead:
            own = zip(found[name].seconds, found[ONE_PROCESS].seconds, strict=True)
            extra_s = statistics.median(max(mine) - max(plain) for mine, plain in own)
            cells.append(f"{1e6 * extra_s / num_tensors:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    transport = "gloo" if args.no_shared_memory else "shared memory"
    ranks = "one rank" if args.ranks == 1 else f"{args.ranks} ranks, {transport}"
    beside = ", with DeepSpeed" if any(name.startswith("deepspeed") for name in rows) else ""
    return f"{args.preset}, {args.dtype}, {ranks}{beside}", "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", default="small", choices=["tiny", "demo", "small", "medium", "many"]
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--steps", type=int, default=2, help="steps of each contender in each round"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--only",
        nargs="*",
        default=DEFAULT,
        choices=list(CONTENDERS),
        metavar="CONTENDER",
        help=", ".join(CONTENDERS),
    )
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument(
        "--no-shared-memory",
        action="store_true",
        help="zfun's ranks talk over gloo, as the others do",
    )
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="end a contender's processes after its turn, start them anew in the next",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/step.md"
    )
    args = parser.parse_args()
    if any(name.startswith("deepspeed") for name in args.only) and not has_deepspeed():
        parser.error(
            "DeepSpeed is not installed here; `make bench-deepspeed` makes an environment with it"
        )
    return args


def main() -> None:
    args = parsed()
    if os.environ.get("ZFUN_OWN_NETWORK"):
        loopback.switch_on()
    elif loopback.can_have_own_network():
        # torch would warn that the namespace has no name service.
        environment = {**os.environ, "ZFUN_OWN_NETWORK": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        os.execvpe(
            loopback.OWN_NETWORK[0], [*loopback.OWN_NETWORK, sys.executable, *sys.argv], environment
        )
    IDLE_BYTES_PER_S[0] = loopback.idle_bytes_per_s()
    weights = [weight.numel() for weight in model_of(args.preset).build().parameters()]
    found = measure(args)
    spread, allowed = spread_of(found, args)
    rows = rows_of(found, 4 * sum(weights))
    head = (
        f"{args.preset} ({sum(weights) / 1e6:.1f}M in {len(weights)} tensors), {args.dtype}: "
        f"{args.ranks} ranks, {args.rounds} rounds of {args.steps} steps; medians; loss curves "
        f"differ by at most {spread:.1e}"
    )
    print(head)
    print(table(rows, len(weights), args.ranks))
    if args.json:
        raw = {
            name: {
                "seconds": c.seconds,
                "cpu_seconds": c.cpu_seconds,
                "losses": c.losses,
                "wire": c.wire,
            }
            for name, c in found.items()
        }
        hardware = {
            "machine": platform.machine(),
            "processor": platform.processor(),
            "torch": torch.__version__,
        }
        options = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(
            json.dumps(
                {
                    "options": options,
                    "spread": spread,
                    "rows": rows,
                    "hardware": hardware,
                    "raw": raw,
                }
            )
        )
    if args.write:
        title, figures = section(found, rows, args, len(weights))
        print(
            "written: "
            f"{pages.write_section('step.md', title, f'{pages.environment()} {head}.', figures)}"
        )
    if not spread <= allowed:
        sys.exit(
            f"the loss curves do not agree: they differ by {spread:.1e}, and may by {allowed:.0e}"
        )


if __name__ == "__main__":
    main()
