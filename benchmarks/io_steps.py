"""Steps with the state in a store, beside the same steps in memory and the disk's own speed.

    python benchmarks/io_steps.py /local_nvme
    python benchmarks/io_steps.py /local_nvme --write    # into benchmarks/results/io.md

One rank trains a chain of square matrices with AdamW in float32. Each contender is a separate
process, as a training run is, so that none finds the memory that another has freed. The contenders
take a step each in turn, round after round, because a shared machine changes speed; each round also
writes and reads a file with plain direct transfers. A step with the state on the disk needs at
least the time of the state's bytes at the best of these speeds, and the time of the step in memory;
the bar of the project is 1.25 x the larger of the two.

No program reaches that bound where transfers take memory bandwidth, or cores, from the step. So
one contender takes the step in memory while plain loops transfer as many bytes, which depend on
nothing. With everything in host memory, which on a CPU is where everything is, the bar is 1.05 x
the step without stores.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import statistics
import sys
import time
from multiprocessing.connection import Connection
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


MEMORY, BESIDE, HOST, DISK = NAMES = (
    "in memory",
    "in memory, plain transfers beside",
    "all in host memory",
    "state on the disk",
)


def contend(pipe: Connection, name: str, path: Path, num_layers: int, rows: int) -> None:
    """Train in a separate process: a step for each message, until the message is False.

    Answers with seconds and the loss, and in the end with the bytes of the state that were put and
    got in all steps.
    """
    disk: Any = zf.stores.nvme(path)
    host: Any = zf.stores.host()
    offload = {
        HOST: zf.stores.Offload(host, host, host),
        DISK: zf.stores.Offload(optimizer=disk),
    }.get(name)
    z = zf.zero(3, loss_fn, zf.optim.adamw(1e-3), single_group(), offload=offload)
    generator = torch.Generator().manual_seed(0)
    layers = [
        torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(num_layers)
    ]
    state = z.init(layers)
    del layers
    batch = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    put = disk.bytes_moved("put", "state")
    with contextlib.ExitStack() as stack:
        start: Any = lambda: lambda: None
        if name == BESIDE:
            start = stack.enter_context(direct.both_ways(path, 2 * state_bytes(num_layers)))
        while pipe.recv():
            begin = time.perf_counter()
            wait = start()
            state, info = z.step(state, batch)
            loss = float(info.loss)
            wait()
            pipe.send((time.perf_counter() - begin, loss))
    pipe.send((disk.bytes_moved("put", "state") - put, disk.bytes_moved("get", "state")))
    disk.close()


def state_bytes(num_layers: int) -> int:
    """Return the bytes of the two moments of all layers."""
    return 8 * num_layers * WIDTH**2


class Contender:
    """A contender, seen from outside."""

    def __init__(self, name: str, path: Path, num_layers: int, rows: int) -> None:
        spawning = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawning.Pipe()
        self.process = spawning.Process(
            target=contend, args=(theirs, name, path, num_layers, rows), daemon=True
        )
        self.process.start()
        theirs.close()
        self.times: list[float] = []

    def step(self) -> float:
        """Take a step; return the loss."""
        self.pipe.send(True)
        seconds, loss = self.pipe.recv()
        self.times.append(seconds)
        # OpenMP's threads keep the cores busy for some milliseconds after a step.
        time.sleep(0.02)
        return loss

    def end(self) -> tuple[int, int]:
        """End the process; return the bytes that were put and got."""
        self.pipe.send(False)
        moved = self.pipe.recv()
        self.process.join()
        return moved


def run(path: Path, num_layers: int, rows: int, seconds: float) -> list[tuple[str, ...]]:
    """Return the rows of the table for one size of the batch."""
    rates: list[tuple[float, float]] = []
    order = random.Random(0)
    contenders = {name: Contender(name, path, num_layers, rows) for name in NAMES}
    num_first = 3
    for _ in range(num_first):
        losses = {one.step() for one in contenders.values()}
        assert len(losses) == 1, "a store changed a bit"
    for one in contenders.values():
        one.times.clear()
    begin = time.monotonic()
    while time.monotonic() - begin < seconds or len(rates) < 3:
        writes, reads = zip(
            *(direct.rates(path, 256 * MIB, threads=threads, span=MIB) for threads in (2, 4)),
            strict=True,
        )
        rates.append((max(writes), max(reads)))
        losses = {one.step() for one in order.sample([*contenders.values()], len(contenders))}
        assert len(losses) == 1, "a store changed a bit"
    moved = {name: one.end() for name, one in contenders.items()}
    in_all = state_bytes(num_layers) * (num_first + len(rates))
    assert moved[DISK] == (in_all, in_all)
    write, read = (statistics.median(column) for column in zip(*rates, strict=True))
    disk_s = state_bytes(num_layers) * (1 / write + 1 / read) / 1e9
    print(
        f"{rows} rows, {len(rates)} rounds: plain writes {write:.2f}, reads {read:.2f} GB/s, "
        f"the bytes of a step {disk_s * 1e3:.0f} ms"
    )
    times = {name: one.times for name, one in contenders.items()}

    def ratio(name: str, of: str, least: float = 0.0) -> str:
        pairs = zip(times[name], times[of], strict=True)
        return f"{statistics.median(x / max(y, least) for x, y in pairs):.2f}"

    of_bound = {name: ratio(name, MEMORY, disk_s * (name in (BESIDE, DISK))) for name in times}
    return [
        (
            str(rows),
            name,
            f"{statistics.median(times[name]) * 1e3:.0f}",
            of_bound[name],
            ratio(DISK, BESIDE) if name == DISK else "",
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
