"""Save and load beside plain transfers of the same bytes, and steps during a save.

    python benchmarks/checkpoint.py /local_nvme
    python benchmarks/checkpoint.py /local_nvme --write    # into benchmarks/results/checkpoint.md

The plain transfers are those of ``benchmarks/direct.py`` into a new file, by two and four threads
from buffers of 64 MiB each, and buffered writes; all with ``fsync``. The loops transfer as many
bytes as the checkpoint has, and hash nothing. The best plain form is the disk's own bandwidth.
Rounds take all contenders in turn, because a shared disk changes speed. The growth of the resident
set is the median, because the first save of a process also loads the compiled hash.

The steps are those of a network of 25 million parameters at stage 3, on two ranks with one thread
each.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import zfun as zf
from benchmarks import direct, pages
from benchmarks.direct import MIB
from zfun.collectives import Workers, barrier
from zfun.demo._memory import forget_peak, peak_bytes

# Rows and columns of the matrices of a state for transfers.
WIDTH = 1024


def buffered(path: Path, num_bytes: int) -> float:
    """Write a file through the memory of the system, and sync; GB/s."""
    file = path / f"buffered-{os.getpid()}"
    data = memoryview(os.urandom(MIB) * 64)
    try:
        begin = time.perf_counter()
        fd = os.open(file, os.O_RDWR | os.O_CREAT)
        for at in range(0, num_bytes, len(data)):
            os.pwrite(fd, data[: num_bytes - at], at)
        os.fsync(fd)
        os.close(fd)
        return num_bytes / (time.perf_counter() - begin) / 1e9
    finally:
        file.unlink()


def transfers(group: zf.Group, path: str, num_matrices: int) -> dict[str, float]:
    """Save and load a state of stage 3; seconds, and the growth of the resident set in bytes."""
    torch.set_num_threads(1)
    params = {f"w{i}": torch.full((WIDTH, WIDTH), float(i)) for i in range(num_matrices)}
    state = {"params": zf.shard(params, group)}
    state |= {name: zf.shard(params, group) for name in ("mu", "nu")}
    del params
    found: dict[str, float] = {}
    for name in ("save", "load"):
        barrier(group)
        forget_peak()
        before = peak_bytes()
        begin = time.perf_counter()
        if name == "save":
            zf.save(path, state, step=1)
        else:
            state = zf.load(path, state).state
        barrier(group)
        found[name] = time.perf_counter() - begin
        found[f"{name} bytes"] = peak_bytes() - before
    assert all(float(zf.unshard(flat)["w1"][0, 0]) == 1.0 for flat in state.values())
    return found


def model(width: int = 512, blocks: int = 8) -> tuple[Any, Any]:
    """A network of 25 million parameters, and its loss."""
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g) * 0.02
    params = {
        "h": [
            {
                "up": draw(width, 4 * width),
                "down": draw(4 * width, width),
                "mix": draw(width, 2 * width),
            }
            for _ in range(blocks)
        ]
    }

    def loss(params: Any, x: Any) -> Any:
        for layer in params["h"]:
            a, b = (x @ layer["mix"]).chunk(2, -1)
            x = x + torch.tanh(a) * b + torch.relu(x @ layer["up"]) @ layer["down"]
        return x.pow(2).mean()

    return params, loss


def around(group: zf.Group, path: str, rounds: int) -> dict[str, list[float]]:
    """Time steps with and without a save in the background, in turn; seconds."""
    torch.set_num_threads(1)
    params, loss = model()
    z = zf.zero(3, loss, zf.optim.adamw(1e-3), group)
    state = z.init(params)
    batch = torch.randn(256, 512)
    found: dict[str, list[float]] = {"alone": [], "during": [], "call": [], "save": []}

    def step(name: str) -> None:
        nonlocal state
        begin = time.perf_counter()
        state, _ = z.step(state, batch)
        found[name].append(time.perf_counter() - begin)

    for _ in range(3):
        step("alone")
    found["alone"].clear()
    for number in range(rounds):
        for _ in range(6):
            step("alone")
        barrier(group)
        begin = time.perf_counter()
        saving = zf.save(path, state, step=number, keep=1, background=True)
        found["call"].append(time.perf_counter() - begin)
        # The ranks see the end of the save at different steps, and take as many steps.
        for _ in range(6):
            step("during" if not saving.done else "alone")
        saving.wait()
        found["save"].append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--mib", type=int, default=768, help="of each state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()
    num_matrices = max(2, options.mib // (3 * WIDTH * WIDTH * 4 // MIB))
    num_bytes = num_matrices * 3 * WIDTH * WIDTH * 4
    rates: dict[str, list[tuple[float, float]]] = {}
    growth: dict[str, list[tuple[float, float]]] = {}
    alone, two = Workers(1), Workers(2)
    try:
        for _ in range(options.rounds):
            for threads in (2, 4):
                rates.setdefault(f"plain, direct, {threads} threads", []).append(
                    direct.rates(options.path, num_bytes, threads=threads, fresh=True)
                )
            rates.setdefault("plain, buffered and fsync", []).append(
                (buffered(options.path, num_bytes), float("nan"))
            )
            for name, workers in (("one rank", alone), ("two ranks", two)):
                path = tempfile.mkdtemp(dir=options.path)
                try:
                    found = workers.run(transfers, path, num_matrices)[0]
                finally:
                    shutil.rmtree(path)
                rates.setdefault(name, []).append(
                    (num_bytes / found["save"] / 1e9, num_bytes / found["load"] / 1e9)
                )
                growth.setdefault(name, []).append((found["save bytes"], found["load bytes"]))
        path = tempfile.mkdtemp(dir=options.path)
        try:
            times = two.run(around, path, 2 * options.rounds)[0]
        finally:
            shutil.rmtree(path)
    finally:
        alone.close()
        two.close()
    medians = {
        name: tuple(statistics.median(column) for column in zip(*found, strict=True))
        for name, found in rates.items()
    }
    best = [
        max(x[way] for name, x in medians.items() if "plain" in name and x[way] == x[way])
        for way in (0, 1)
    ]
    lines = ["| | save GB/s | of best plain | load GB/s | of best plain |", "|---|---|---|---|---|"]
    for name, (write, read) in medians.items():
        shown = f"{read:.2f} | {read / best[1]:.2f}" if read == read else "– | –"
        lines.append(f"| {name} | {write:.2f} | {write / best[0]:.2f} | {shown} |")
    most = {
        name: [statistics.median(column) / MIB for column in zip(*x, strict=True)]
        for name, x in growth.items()
    }
    median = {name: statistics.median(values) for name, values in times.items()}
    notes = [
        f"{options.rounds} rounds of {num_bytes // MIB} MiB, medians.",
        "Growth of the resident set of rank 0 while saving and loading: "
        + "; ".join(f"{name} {x[0]:.0f} and {x[1]:.0f} MiB" for name, x in most.items())
        + ".",
        (
            f"A step of two ranks takes {median['alone'] * 1e3:.0f} ms alone, and "
            f"{median['during'] * 1e3:.0f} ms during a save in the background "
            f"({median['during'] / median['alone']:.3f} of it; {len(times['during'])} steps). "
            f"`save(background=True)` returns after {median['call'] * 1e3:.0f} ms, in which the "
            f"values are copied, and the save ends after {median['save'] * 1e3:.0f} ms."
        ),
    ]
    print(*notes, *lines, sep="\n")
    if options.write:
        print(
            pages.write_section(
                "checkpoint.md",
                "Two cores and a virtual disk",
                f"{pages.environment()} {notes[0]}",
                "\n".join(lines),
                *notes[1:],
            )
        )


if __name__ == "__main__":
    main()
