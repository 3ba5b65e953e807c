"""Steps with the state in a store, beside the same steps in memory and the disk's own speed.

    python benchmarks/io_steps.py /local_nvme
    python benchmarks/io_steps.py /local_nvme --write    # into benchmarks/results/io.md

One rank trains a chain of square matrices with AdamW in float32. The contenders take a step each in
turn, round after round, because a shared machine changes speed; each round also writes and reads a
file with plain direct transfers. A step with the state on the disk needs at least the time of its
bytes at the best of these speeds, and the time of the step in memory; the bar of the project is
1.25 x the larger of the two.

No program reaches that bound where transfers take memory bandwidth, or cores, from the step. So
one contender takes the step in memory while plain loops transfer as many bytes, which depend on
nothing. With everything in host memory, which on a CPU is where everything is, the bar is 1.05 x
the step without stores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
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


class Beside(Contender):
    """A training run in memory, with plain transfers beside each step."""

    def __init__(self, num_layers: int, start: Callable[[], Callable[[], None]]) -> None:
        super().__init__(num_layers, None)
        self.start = start

    def step(self, batch: torch.Tensor) -> float:
        begin = time.perf_counter()
        wait = self.start()
        loss = super().step(batch)
        wait()
        self.times[-1] = time.perf_counter() - begin
        return loss


MEMORY, MEMORY_LAST, BESIDE, HOST, DISK = (
    "in memory",
    "in memory, made last",
    "in memory, plain transfers beside",
    "all in host memory",
    "state on the disk",
)


def run(path: Path, num_layers: int, rows: int, seconds: float) -> list[tuple[str, ...]]:
    """Return the rows of the table for one size of the batch."""
    disk: Any = zf.stores.nvme(path)
    host: Any = zf.stores.host()
    batch = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    rates: list[tuple[float, float]] = []
    state_bytes = 8 * num_layers * WIDTH**2
    order = random.Random(0)
    with direct.both_ways(path, 2 * state_bytes) as start:
        contenders = {
            MEMORY: Contender(num_layers, None),
            BESIDE: Beside(num_layers, start),
            HOST: Contender(num_layers, zf.stores.Offload(host, host, host)),
            DISK: Contender(num_layers, zf.stores.Offload(optimizer=disk)),
            # The first run in a process finds the best memory, so the last one is a step in memory
            # too, and ratios are to the mean of both.
            MEMORY_LAST: Contender(num_layers, None),
        }
        for _ in range(2):
            losses = {one.step(batch) for one in contenders.values()}
            assert len(losses) == 1, "a store changed a bit"
        before = {kind: disk.bytes_moved(kind, "state") for kind in ("put", "get")}
        for one in contenders.values():
            one.times.clear()
        begin = time.monotonic()
        while time.monotonic() - begin < seconds or len(rates) < 3:
            writes, reads = zip(
                *(direct.rates(path, 256 * MIB, threads=threads, span=MIB) for threads in (2, 4)),
                strict=True,
            )
            rates.append((max(writes), max(reads)))
            # In another order each round, because a step finds the memory that the last one left.
            losses = {
                one.step(batch) for one in order.sample([*contenders.values()], len(contenders))
            }
            assert len(losses) == 1, "a store changed a bit"
    moved = {x: (disk.bytes_moved(x, "state") - before[x]) / len(rates) for x in before}
    assert moved == {"put": state_bytes, "get": state_bytes}
    disk.close()
    write, read = (statistics.median(column) for column in zip(*rates, strict=True))
    disk_s = state_bytes / write / 1e9 + state_bytes / read / 1e9
    print(
        f"{rows} rows, {len(rates)} rounds: plain writes {write:.2f}, reads {read:.2f} GB/s, "
        f"the bytes of a step {disk_s * 1e3:.0f} ms"
    )
    times = {name: one.times for name, one in contenders.items()}
    in_memory = [*map(statistics.mean, zip(times[MEMORY], times[MEMORY_LAST], strict=True))]

    def ratio(name: str, of: list[float], least: float = 0.0) -> str:
        pairs = zip(times[name], of, strict=True)
        return f"{statistics.median(x / max(y, least) for x, y in pairs):.2f}"

    of_bound = {name: ratio(name, in_memory, disk_s * (name in (BESIDE, DISK))) for name in times}
    return [
        (
            str(rows),
            name,
            f"{statistics.median(times[name]) * 1e3:.0f}",
            of_bound[name],
            ratio(DISK, times[BESIDE]) if name == DISK else "",
        )
        for name in times
    ]


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
    header = ("rows", "step", "ms", "of the bound", "of plain transfers beside")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in table]
    numel = options.layers * WIDTH**2
    about = (
        f"{numel / 1e6:.0f} million parameters in float32, AdamW, one rank, medians; the state is "
        f"{8 * numel / 1e6:.0f} MB, read and written in each step. The bound is the step in "
        "memory, or the time of these bytes at the best speed of plain direct transfers, if "
        "longer; medians of the ratios in each round."
    )
    print(about, *lines, sep="\n")
    if options.write:
        where = f"{pages.environment()} {about}"
        print(pages.write_section("io.md", "Steps over stores", where, "\n".join(lines)))


if __name__ == "__main__":
    main()
