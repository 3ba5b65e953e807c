"""Steps with the state in a store, beside the same steps in memory and the disk's own speed.

    python benchmarks/io_steps.py /local_nvme
    python benchmarks/io_steps.py /local_nvme --write    # into benchmarks/results/io.md

One rank trains a chain of square matrices with AdamW in float32. The contenders take a step each in
turn, round after round, because a shared machine changes speed; each round also writes and reads a
file with plain direct transfers. A step with the state on the disk needs at least the time of its
bytes at the best of these speeds, and the time of the step in memory; the bar of the project is
1.25 x the larger of the two. The best speed is that of a loop over one block of 1 MiB, which stays
in the cache of the processor. Bytes of a step come from memory and go there, so the table has the
ratio to plain transfers from memory too. With everything in host memory, which on a CPU is where
everything is, the bar is 1.05 x the step without stores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zfun as zf
from benchmarks import direct, pages
from benchmarks.direct import MIB
from zfun.collectives import single_group

WIDTH = 1024


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


class Contender:
    """A training run under some stores."""

    def __init__(self, num_layers: int, offload: zf.stores.Offload | None) -> None:
        self.zero = zf.zero(3, loss_fn, zf.optim.adamw(1e-3), single_group(), offload=offload)
        generator = torch.Generator().manual_seed(0)
        layers = [
            torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(num_layers)
        ]
        self.state = self.zero.init(layers)
        self.times: list[float] = []

    def step(self, batch: torch.Tensor) -> float:
        begin = time.perf_counter()
        self.state, info = self.zero.step(self.state, batch)
        float(info.loss)
        self.times.append(time.perf_counter() - begin)
        return float(info.loss)


def run(path: Path, num_layers: int, rows: int, seconds: float) -> list[tuple[str, ...]]:
    """Return the rows of the table for one size of the batch."""
    disk: Any = zf.stores.nvme(path)
    host: Any = zf.stores.host()
    contenders = {
        "in memory": Contender(num_layers, None),
        "all in host memory": Contender(num_layers, zf.stores.Offload(host, host, host)),
        "state on the disk": Contender(num_layers, zf.stores.Offload(optimizer=disk)),
    }
    batch = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        losses = {one.step(batch) for one in contenders.values()}
        assert len(losses) == 1, "a store changed a bit"
    before = {kind: disk.bytes_moved(kind, "state") for kind in ("put", "get")}
    for one in contenders.values():
        one.times.clear()
    rates: list[tuple[float, float, float]] = []
    begin = time.monotonic()
    while time.monotonic() - begin < seconds or len(rates) < 3:
        writes, reads = zip(
            *(direct.rates(path, 256 * MIB, threads=threads, span=MIB) for threads in (2, 4)),
            strict=True,
        )
        rates.append((max(writes), max(reads), direct.mixed(path, 256 * MIB)))
        losses = {one.step(batch) for one in contenders.values()}
        assert len(losses) == 1, "a store changed a bit"
    moved = {x: (disk.bytes_moved(x, "state") - before[x]) / len(rates) for x in before}
    disk.close()
    write, read, both = (statistics.median(column) for column in zip(*rates, strict=True))
    disk_s = moved["put"] / write / 1e9 + moved["get"] / read / 1e9
    both_s = sum(moved.values()) / both / 1e9
    print(
        f"{rows} rows, {len(rates)} rounds: plain writes {write:.2f}, reads {read:.2f}, both at "
        f"once {both:.2f} GB/s, the bytes of a step {disk_s * 1e3:.0f} or {both_s * 1e3:.0f} ms"
    )
    plain = contenders["in memory"].times
    table: list[tuple[str, ...]] = []
    for name, one in contenders.items():
        bounds = (disk_s, both_s) if name == "state on the disk" else (0.0,)
        ratios = [
            statistics.median(x / max(y, least) for x, y in zip(one.times, plain, strict=True))
            for least in bounds
        ]
        table.append(
            (
                str(rows),
                name,
                f"{statistics.median(one.times) * 1e3:.0f}",
                "; ".join(f"{least * 1e3:.0f}" for least in bounds if least),
                "; ".join(f"{ratio:.2f}" for ratio in ratios),
            )
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=25.0, help="for each number of rows")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/io.md")
    options = parser.parse_args()
    table = [
        row
        for rows in options.rows
        for row in run(options.path, options.layers, rows, options.seconds)
    ]
    header = ("rows", "step", "ms", "ms of its bytes", "of the bound")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in table]
    numel = options.layers * WIDTH**2
    about = (
        f"{numel / 1e6:.0f} million parameters in float32, AdamW, one rank, medians; the state is "
        f"{8 * numel / 1e6:.0f} MB. The time of its bytes is that at the speed of plain direct "
        "writes and reads of 1 MiB that stays in the cache of the processor, and, second, of "
        "writes and reads at once from 64 MiB of memory. The bound is the step in memory, or "
        "the time of its bytes if longer, by the first and by the second of these times; medians "
        "of the ratios in each round."
    )
    print(about, *lines, sep="\n")
    if options.write:
        where = f"{pages.environment()} {about}"
        print(pages.write_section("io.md", "Steps over stores", where, "\n".join(lines)))


if __name__ == "__main__":
    main()
