"""A training step of one rank on a CUDA GPU: plain torch, DDP, FSDP2 and zfun's stages.

    python benchmarks/gpu/step.py --preset small --rounds 8
    python benchmarks/gpu/step.py --preset many --trace traces    # profiles, for chrome://tracing
    python benchmarks/gpu/step.py --device cpu --preset tiny --rounds 1    # to see that it runs

The contenders take their steps in interleaved rounds. One rank sends nothing, so the time that a
contender takes beyond plain torch's, for the same arithmetic, is overhead of the contender: ``own
us`` for each step, and for each tensor. ``issue us`` is how long the host is busy with a step until
the host could issue the next, without waiting for the device at the end. Each contender has the
same weights, data and AdamW; the loss curves must agree, or the script fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import zfun as zf

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.contenders import CONTENDERS, ONE_PROCESS, Setting, Step, model_of

NAMES = [ONE_PROCESS, "functional", "ddp", "fsdp2", "zfun-0", "zfun-1", "zfun-2", "zfun-3"]
# The largest distance of losses whose sums are taken in another order.
ALLOWED = {"fp32": 1e-3, "bf16": 2e-2}


@dataclass
class Contender:
    """One contender with the measurements."""

    step: Step
    data: Iterator[Any]
    device: str
    held_bytes: int
    step_us: list[float] = field(default_factory=list)
    issue_us: list[float] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    peak_bytes: int = 0

    def take(self, count: int, *, timed: bool) -> None:
        """Take some steps: the batches are on the device before the clock starts."""
        batches = [placed(next(self.data), self.device) for _ in range(count)]
        synchronize(self.device)
        # The memory of the other contenders is allocated all the time, so only the growth counts.
        before = allocated(self.device)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for batch in batches:
            self.losses.append(self.step(batch))
        issued = time.perf_counter()
        synchronize(self.device)
        if timed:
            self.step_us.append(1e6 * (time.perf_counter() - began) / count)
            self.issue_us.append(1e6 * (issued - began) / count)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else 0
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + peak - before)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def placed(batch: Any, device: str) -> Any:
    return tuple(x.to(device) for x in batch) if isinstance(batch, tuple) else batch.to(device)


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[zf.Group]:
    """Give DDP and FSDP2 a process group of one rank; zfun's group of one rank sends nothing."""
    backend: dict[str, Any] = (
        {"backend": "nccl", "device_id": torch.device("cuda", 0)}
        if device == "cuda"
        else {"backend": "gloo"}
    )
    dist.init_process_group(**backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield zf.collectives.single_group()
    finally:
        dist.destroy_process_group()


def make(name: str, args: argparse.Namespace, group: zf.Group) -> Contender:
    model = model_of(args.preset)
    before = allocated(args.device)
    step = CONTENDERS[name](
        Setting(model, model.build().to(args.device), group, args.dtype == "bf16", args.device)
    )
    contender = Contender(step, iter(model.batches(0, 1)), args.device, 0)
    contender.take(args.warm_steps, timed=False)
    # Optimizers make the state in the first step.
    contender.held_bytes = allocated(args.device) - before
    contender.peak_bytes = 0
    return contender


def trace(name: str, contender: Contender, folder: Path) -> Path:
    """Profile three steps, each named on the time line."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = [placed(next(contender.data), contender.device) for _ in range(3)]
    synchronize(contender.device)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True
    ) as profiled:
        for index, batch in enumerate(batches):
            with record_function(f"{name}: step {index}"):
                contender.step(batch)
        synchronize(contender.device)
    path = folder / f"{name.replace(' ', '-')}.json"
    profiled.export_chrome_trace(str(path))
    return path


def rows_of(found: dict[str, Contender], num_tensors: int) -> dict[str, dict[str, float]]:
    rows = {}
    base = statistics.median(found[ONE_PROCESS].step_us)
    for name, contender in found.items():
        median = statistics.median(contender.step_us)
        rows[name] = {
            "us": median,
            "issue_us": statistics.median(contender.issue_us),
            "own_us": median - base,
            "own_us_per_tensor": (median - base) / num_tensors,
            "peak_mb": contender.peak_bytes / 1e6,
        }
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--preset", default="small", choices=["tiny", "demo", "small", "medium", "many"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=5, help="steps of each contender in each round"
    )
    parser.add_argument("--warm-steps", type=int, default=5, help="steps before the first round")
    parser.add_argument(
        "--only",
        nargs="*",
        default=NAMES,
        choices=NAMES,
        metavar="CONTENDER",
        help=", ".join(NAMES),
    )
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument(
        "--trace", type=Path, help="folder for a profile of three steps of each contender"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2,
            f"benchmarks/gpu/step.py measures on a CUDA GPU; torch {torch.__version__} finds none "
            "here; on CPUs use benchmarks/step.py\n",
        )
    if ONE_PROCESS not in args.only:
        args.only = [ONE_PROCESS, *args.only]
    return args


def main() -> None:
    args = parsed()
    with one_rank(args.device) as group:
        found = {name: make(name, args, group) for name in args.only}
        for _ in range(args.rounds):
            for contender in found.values():
                contender.take(args.steps, timed=True)
        traces = (
            [trace(name, contender, args.trace) for name, contender in found.items()]
            if args.trace
            else []
        )
    weights = [weight.numel() for weight in model_of(args.preset).build().parameters()]
    curves = {name: [float(loss) for loss in contender.losses] for name, contender in found.items()}
    spread = max(
        abs(a - b)
        for curve in curves.values()
        for a, b in zip(curve, curves[ONE_PROCESS], strict=True)
    )
    rows = rows_of(found, len(weights))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    print(
        f"{args.preset} ({sum(weights) / 1e6:.1f}M in {len(weights)} tensors), {args.dtype}: one "
        f"rank on {device}, torch {torch.__version__}, {args.rounds} rounds of {args.steps} "
        f"steps; medians; loss curves differ by at most {spread:.1e}"
    )
    print(
        f"{'':14}{'us':>10}{'issue us':>10}{'own us':>10}{'/ tensor':>10}"
        f"{'peak MB':>10}{'/ plain':>9}"
    )
    for name, row in rows.items():
        figures = (
            f"{row['us']:10.0f}{row['issue_us']:10.0f}{row['own_us']:10.0f}"
            f"{row['own_us_per_tensor']:10.2f}{row['peak_mb']:10.0f}"
        )
        print(f"{name:14}{figures}{row['us'] / rows[ONE_PROCESS]['us']:9.2f}")
    for path in traces:
        print(f"profile: {path}")
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "device": device,
                    "torch": torch.__version__,
                    "spread": spread,
                    "rows": rows,
                    "losses": curves,
                }
            )
        )
    if not spread <= ALLOWED[args.dtype]:
        sys.exit(
            f"the loss curves do not agree: they differ by {spread:.1e}, and may by "
            f"{ALLOWED[args.dtype]:.0e}"
        )


if __name__ == "__main__":
    main()
