"""Every kernel that has a form for GPUs, beside a copy of as many bytes, and beside the operations
of torch that do the same.

    python benchmarks/gpu/kernels.py --numel 32000000
    python benchmarks/gpu/kernels.py --device cpu --numel 100000    # the same program in small

``of limit``: the time of a copy that moves the same number of bytes, by that of the kernel; 1 is
the memory's speed. The two run in turn. Torch has no exact norm and no sums of codes: where a
kernel has no counterpart, the column is empty.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zfun import ops

Run = Callable[[], object]
BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A kernel.

    Attributes:
        name: of the kernel.
        nbytes: the bytes that the kernel reads and writes.
        ours: runs the kernel.
        torchs: runs torch's operations, by name.
    """

    name: str
    nbytes: int
    ours: Run
    torchs: dict[str, Run]


def step_cases(numel: int, device: str) -> Iterator[Case]:
    p, g, m, v = (torch.randn(numel, device=device).mul_(1e-2) for _ in range(4))
    v.square_()
    half = g.to(BF16)
    weight = torch.nn.Parameter(p.clone())
    weight.grad = g.clone()

    def torchs(make: Callable[..., torch.optim.Optimizer], **options: Any) -> dict[str, Run]:
        made = {
            form: make([weight], lr=1e-6, **{form: True}, **options)
            for form in ("fused", "foreach")
        }
        return {f"{form} {make.__name__}": optimizer.step for form, optimizer in made.items()}

    adam = ops.AdamRule(b1=0.9, b2=0.999, step_size=1e-6, eps=1e-8, decay=1e-7, correction=0.9)
    yield Case(
        "adamw",
        28 * numel,
        lambda: adam(p, g, m, v, None),
        torchs(torch.optim.AdamW),
    )
    yield Case(
        "adamw, bfloat16 gradient",
        26 * numel,
        lambda: adam(p, half, m, v, None),
        {},
    )
    sgd = ops.SgdRule(learning_rate=1e-6, momentum=0.9)
    yield Case(
        "sgd, momentum",
        20 * numel,
        lambda: sgd(p, g, m, None),
        torchs(torch.optim.SGD, momentum=0.9),
    )
    lion = ops.LionRule(b1=0.9, b2=0.99, learning_rate=1e-6, decay=1e-7)
    yield Case("lion", 20 * numel, lambda: lion(p, g, m, None), {})
    adagrad = ops.AdagradRule(learning_rate=1e-6, eps=1e-10)
    foreach = torch.optim.Adagrad([weight], lr=1e-6, foreach=True)
    yield Case(
        "adagrad",
        20 * numel,
        lambda: adagrad(p, g, v, None),
        {"foreach Adagrad": foreach.step},
    )


def ravel_cases(numel: int, device: str) -> Iterator[Case]:
    """Tensors like those of a transformer, and 500 tiny ones."""
    width = max(8, int((numel / 24) ** 0.5))
    shapes = {
        "a block's tensors": [
            (3 * width, width),
            (width, width),
            (4 * width, width),
            (width, 4 * width),
            (width,),
            (width,),
        ]
        * 2
    }
    for name, sizes in {**shapes, "500 x 64": [(64,)] * 500}.items():
        leaves = [torch.randn(shape, device=device) for shape in sizes]
        offsets = list(itertools.accumulate((-(-x.numel() // 32) * 32 for x in leaves), initial=0))
        for dtype in (FP32, BF16):
            out = torch.zeros(offsets[-1], dtype=dtype, device=device)
            views = [
                out[start : start + x.numel()].view(x.shape)
                for x, start in zip(leaves, offsets, strict=False)
            ]
            nbytes = sum(x.numel() for x in leaves) * (4 + dtype.itemsize)
            yield Case(
                f"ravel {name}, float32 to {str(dtype).removeprefix('torch.')}",
                nbytes,
                lambda out=out, leaves=leaves, offsets=offsets: ops.ravel_into(
                    out, leaves, offsets[:-1], scale=0.5
                ),
                {
                    "foreach copy, mul": lambda out=out, views=views, leaves=leaves: (
                        torch._foreach_copy_(views, leaves),
                        out.mul_(0.5),
                    ),
                    "cat, mul": lambda leaves=leaves, dtype=dtype: (
                        torch.cat([x.view(-1) for x in leaves]).mul_(0.5).to(dtype)
                    ),
                },
            )


def code_cases(numel: int, device: str) -> Iterator[Case]:
    x = torch.randn(numel, device=device)
    yield Case(
        "exact squares of a norm",
        4 * numel,
        lambda: ops.squares_in_bins(x),
        {"vector_norm": lambda: torch.linalg.vector_norm(x)},
    )
    packed = ops.pack_signs(x)
    yield Case("pack signs", 4 * numel + numel // 8, lambda: ops.pack_signs(x), {})
    yield Case("unpack signs", 4 * numel + numel // 8, lambda: ops.unpack_signs(packed, numel), {})
    rows = x[: numel // 4 * 4].view(4, -1)
    for bits in (8, 4):
        options = {"bits": bits, "block": 256}
        messages = ops.quantise(rows, **options)
        nbytes = rows.nbytes + messages.nbytes
        yield Case(
            f"quantise to {bits} bits",
            nbytes,
            lambda options=options: ops.quantise(rows, **options),
            {},
        )
        back = lambda options=options, messages=messages: ops.dequantise(
            messages, rows.shape[1], **options
        )
        yield Case(f"dequantise from {bits} bits", nbytes, back, {})
        add = lambda options=options, messages=messages: ops.sum_dequantised(
            messages, rows.shape[1], **options
        )
        yield Case(f"sum of 4 in {bits} bits", messages.nbytes + rows.nbytes // 4, add, {})


def timed(run: Run, device: str) -> float:
    """Seconds of one call, by the clock of the device."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(case: Case, device: str, rounds: int) -> dict[str, Any]:
    source = torch.zeros(max(1, case.nbytes // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    runs: dict[str, Run] = {"limit": lambda: target.copy_(source), "ours": case.ours, **case.torchs}
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device))
    found = {name: statistics.median(values) for name, values in times.items()}
    theirs = min(((found[name], name) for name in case.torchs), default=None)
    return {
        "kernel": case.name,
        "us": 1e6 * found["ours"],
        "gb_per_s": case.nbytes / found["ours"] / 1e9,
        "of_limit": found["limit"] / found["ours"],
        "torch_us": None if theirs is None else 1e6 * theirs[0],
        "torch": None if theirs is None else theirs[1],
    }


def line_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['kernel']} | {row['error']} | | | |"
    theirs = "" if row["torch"] is None else f"{row['torch_us']:.0f} ({row['torch']})"
    return (
        f"| {row['kernel']} | {row['us']:.0f} | {row['gb_per_s']:.0f} | {row['of_limit']:.2f} "
        f"| {theirs} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--numel", type=int, default=32_000_000, help="elements of a buffer")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--json", type=Path, help="also write the figures to this file, after each kernel"
    )
    args = parser.parse_args()
    print("| kernel | us | GB/s | of limit | torch, us |\n|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for make in (step_cases, ravel_cases, code_cases):
        for case in make(args.numel, args.device):
            try:
                row = measure(case, args.device, args.rounds)
            except Exception as error:  # noqa: BLE001, a kernel that fails must not hide the others
                row = {
                    "kernel": case.name,
                    "error": f"{type(error).__name__}: {str(error).splitlines()[0]}",
                }
            rows.append(row)
            print(line_of(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows))
    failed = [row["kernel"] for row in rows if "error" in row]
    if failed:
        sys.exit(f"these kernels failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
