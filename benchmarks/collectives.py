"""Every collective against a copy of the same bytes, on each transport.

    python benchmarks/collectives.py --ranks 2 --rounds 7

``bytes`` are those of a rank's input or output, the larger of the two, in float32. In each round
every contender runs in turn on all ranks at once, so that a slow moment of the machine hits all
contenders. One of these is ``memcpy``: every rank copies the same number of bytes within private
memory. A time is that of the slowest rank. ``symmetric`` is shared memory with an input that
``group.allocate`` made, which is not copied. Results are compared with each other before anything
is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zfun as zf
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Group,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    allocate,
    barrier,
    gather_values,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import pages

Run = Callable[[], object]
CONTENDERS = ["memcpy", "symmetric", "shared", "direct", "torch"]
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def ops(size: int) -> dict[str, Op]:
    turn = Permute(tuple((rank + 1) % size for rank in range(size)))
    found: list[Op] = [
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        Broadcast(),
        Reduce(),
        AllToAll(),
        turn,
    ]
    return {op.kind: op for op in found}


def with_torch(op: Op, x: Tensor, out: Tensor, rank: int) -> None:
    match op:
        case AllGather():
            _all_gather(out, x)
        case ReduceScatter():
            _reduce_scatter(out, x)
        case AllReduce():
            dist.all_reduce(out.copy_(x))
        case Broadcast(root):
            dist.broadcast(out.copy_(x) if rank == root else out, root)
        case Reduce(root):
            dist.reduce(out.copy_(x), root)
        case AllToAll():
            dist.all_to_all_single(out, x)
        case Permute(destinations):
            works = [dist.isend(x, destinations[rank]), dist.irecv(out, op.sources[rank])]
            for work in works:
                if work is not None:
                    work.wait()


def contenders(op: Op, nbytes: int, shared: Group, direct: Group) -> dict[str, Run]:
    rank, size = shared.rank, shared.size
    numel = max(nbytes // 4 // size, 1) * size
    x = (
        torch.arange(numel // size if isinstance(op, AllGather) else numel, dtype=torch.float32)
        % 1000
        + rank
    )
    out = torch.empty(op.output_numel(x.numel(), size))
    symmetric = allocate(shared, x.numel(), x.dtype).copy_(x)
    source, target = torch.ones(numel), torch.ones(numel)
    call = Collective(op, "benchmark")
    runs: dict[str, Run] = {
        "memcpy": lambda: target.copy_(source),
        "symmetric": lambda: shared.start(call, symmetric, out).wait(),
        "shared": lambda: shared.start(call, x, out).wait(),
        "direct": lambda: direct.start(call, x, out).wait(),
        "torch": lambda: with_torch(op, x, out, rank),
    }
    expected = direct.start(call, x).wait()
    for name in ("symmetric", "shared", "torch"):
        runs[name]()
        if not (name == "torch" and isinstance(op, Reduce)) and not torch.equal(out, expected):
            raise AssertionError(f"{name} computes another {op.kind}")
    return runs


def time_of(run: Run, repeat: int, group: Group) -> float:
    barrier(group)
    began = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - began) / repeat


def measure(
    direct: Group, sizes: list[int], kinds: list[str], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every round by collective, bytes and contender, on this rank."""
    seconds: dict[str, list[float]] = {}
    with zf.process_group(dist.group.WORLD, shared_memory=True, timeout_s=60.0) as shared:
        for kind in kinds:
            for nbytes in sizes:
                runs = contenders(ops(direct.size)[kind], nbytes, shared, direct)
                # The first rounds warm up, and find how often a call must be repeated to take long
                # enough to measure; ranks must agree on that number.
                once = {
                    name: min(time_of(run, 1, shared) for _ in range(2))
                    for name, run in runs.items()
                }
                slowest = (
                    gather_values(torch.tensor(list(once.values())), shared, "times")
                    .amax(0)
                    .tolist()
                )
                repeats = dict(
                    zip(runs, [min(max(int(5e-3 / took), 1), 100) for took in slowest], strict=True)
                )
                for _ in range(rounds):
                    for name, run in runs.items():
                        seconds.setdefault(f"{kind} {nbytes} {name}", []).append(
                            time_of(run, repeats[name], shared)
                        )
    return seconds


def shown(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=[1 << 10, 1 << 20, 1 << 26], help="bytes"
    )
    parser.add_argument("--only", nargs="*", default=list(ops(2)), choices=list(ops(2)))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--write", action="store_true", help="put the table into benchmarks/results/collectives.md"
    )
    args = parser.parse_args()
    with zf.collectives.Workers(
        args.ranks, timeout_s=1800.0, collective_timeout_s=120.0, shared_memory=False
    ) as workers:
        reports = workers.run(measure, args.sizes, args.only, args.rounds)
    rounds = {
        key: [max(times) for times in zip(*(report[key] for report in reports), strict=True)]
        for key in reports[0]
    }
    rows: dict[str, dict[str, Any]] = {}
    lines = [
        f"{'':24}"
        + "".join(f"{name:>10}" for name in CONTENDERS)
        + f"{'shared/memcpy':>15}{'shared/direct':>15}{'shared/torch':>14}"
    ]
    for kind in args.only:
        for nbytes in args.sizes:
            medians = {
                name: statistics.median(rounds[f"{kind} {nbytes} {name}"]) for name in CONTENDERS
            }
            ratios = {
                name: medians["shared"] / medians[name] for name in ("memcpy", "direct", "torch")
            }
            rows[f"{kind} {nbytes}"] = {"seconds": medians, "ratios": ratios}
            times = "".join(f"{1e6 * medians[name]:10.0f}" for name in CONTENDERS)
            lines.append(
                f"{kind:16}{shown(nbytes):>8}{times}{ratios['memcpy']:15.2f}{ratios['direct']:15.2f}{ratios['torch']:14.2f}"
            )
    head = f"{args.ranks} ranks, median of {args.rounds} rounds in microseconds; ratios of medians"
    print("\n".join([head, *lines]))
    if args.write:
        print(f"written: {pages.write_table('collectives.md', f'{args.ranks} ranks', head, lines)}")
    if args.json:
        hardware = {
            "machine": platform.machine(),
            "processor": platform.processor(),
            "torch": torch.__version__,
            "python": sys.version,
        }
        args.json.write_text(
            json.dumps({"ranks": args.ranks, "rows": rows, "hardware": hardware, "raw": rounds})
        )


if __name__ == "__main__":
    main()
