"""Runs that are killed and started again at random, for as long as asked.

    python -m tests.faults.programs.kills MINUTES SEED

Each run is examples/train.py with few steps. Ranks are killed, or told to end, at random times:
while they meet, train, save or load. Every second run has a constant number of ranks, and ends with
the bits of the run that nothing disturbed. The others change that number at each start, and end
with the bits of a simulation that changes it at the same steps. The command prints one line for
each run, and fails if the bits differ, or if a process or a file is left behind.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.faults.programs.runs import PARTS, Plan, Ranks, log_of, result_of, steps_in, unbroken
from zfun.demo._examples import load_example
from zfun.testing import same_bits

MAX_STARTS = 12
# A launcher tells the other ranks to end when one has died, and kills those that do not.
PATIENCE_S = 3.0


@dataclass
class Tally:
    """The figures of all runs.

    Attributes:
        runs: finished runs.
        starts: starts of all ranks.
        disturbed: starts in which a rank was killed or told to end, by kind.
        broken: promises that were not kept.
    """

    runs: int = 0
    starts: int = 0
    disturbed: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)


def disturb(ranks: Ranks, chance: random.Random, longest_s: float) -> str:
    """Wait for a random time, disturb ranks, and return the kind of disturbance."""
    deadline = time.monotonic() + chance.uniform(0.0, longest_s)
    while time.monotonic() < deadline:
        if all(process.exitcode is not None for process in ranks.processes):
            return ""
        time.sleep(0.005)
    kind = chance.choice(["one killed", "one killed", "all killed", "told to end"])
    number = signal.SIGTERM if kind == "told to end" else signal.SIGKILL
    hit = [chance.choice(ranks.processes)] if kind == "one killed" else ranks.processes
    for process in hit:
        if process.exitcode is None:
            os.kill(process.pid, number)
    if kind == "one killed":
        hit[0].join()
        for process in ranks.processes:
            if process.exitcode is None:
                process.terminate()
    return kind


def run(number: int, seed: int, tally: Tally) -> str:
    """Finish one run, and compare its end with the undisturbed one."""
    chance = random.Random(f"{seed}/{number}")
    constant = chance.choice([2, 3]) if number % 2 == 0 else None
    shard = PARTS[: chance.randrange(4)]
    plan = Plan(steps=60, save_every=chance.randrange(2, 12), shard=shard)
    segments: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as place:
        folder, starts, last = Path(place), 0, 0
        while last < plan.steps:
            size = constant or chance.randrange(1, 4)
            starts += 1
            with Ranks(plan, size, folder) as ranks:
                kind = disturb(ranks, chance, 2.5) if starts < MAX_STARTS else ""
                ranks.wait(PATIENCE_S if kind else 90.0)
            tally.disturbed[kind] = tally.disturbed.get(kind, 0) + bool(kind)
            before, last = last, max(steps_in(folder), default=0)
            if last < before or (not kind and last < plan.steps):
                tally.broken.append(f"run {number} is at step {last}: {log_of(folder)}")
                return tally.broken[-1]
            if last > before:
                segments.append((size, last))
        names = [path.name for path in (folder / "checkpoints").iterdir()]
        left = [name for name in names if name != ".lock" and not name.startswith("step-")]
        found = result_of(folder)
        if constant:
            expected = unbroken([(constant, plan.steps)], folder / "whole")
        else:
            expected = unbroken(segments, folder / "whole")
    tally.runs += 1
    tally.starts += starts
    losses = [loss_of(result).hex() for result in (found, expected)]
    if not same_bits(found, expected) or losses[0] != losses[1]:
        tally.broken.append(f"run {number} ends elsewhere: losses {losses}, {segments}")
    if left:
        tally.broken.append(f"run {number} leaves {left}")
    sizes = [size for size, _ in segments]
    return f"run {number}: {starts} starts, ranks {sizes}, shard {shard}, loss {losses[0]}"


def loss_of(result: Any) -> float:
    """Return the loss of parameters on one fixed batch."""
    gpt, text = load_example("gpt"), load_example("text")
    loss_fn, _ = gpt.init(gpt.PRESETS["tiny"])
    batch = next(text.batches(text.stdlib_bytes(limit=50_000), 8, 16, seed=1))
    return float(loss_fn(result[1], batch))


def main(minutes: float, seed: int) -> int:
    torch.set_num_threads(1)
    tally, end, number = Tally(), time.monotonic() + 60 * minutes, 0
    shared = sorted(path.name for path in Path("/dev/shm").iterdir())
    while time.monotonic() < end:
        print(run(number, seed, tally), flush=True)
        number += 1
    left = {path.name for path in Path("/dev/shm").iterdir()} - set(shared)
    tally.broken += [f"/dev/shm/{name} is left" for name in left if "zfun" in name]
    print(
        f"{tally.runs} runs, {tally.starts} starts, disturbed: "
        f"{ ({kind: count for kind, count in tally.disturbed.items() if kind}) }"
    )
    print(*tally.broken, sep="\n")
    return len(tally.broken)


if __name__ == "__main__":
    sys.exit(min(1, main(float(sys.argv[1]), int(sys.argv[2]))))
