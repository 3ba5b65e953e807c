"""A program for ``torchrun --max-restarts``, in which a rank dies in every other attempt.

    torchrun --nproc-per-node 2 --max-restarts 5 -m tests.distributed.programs.restarting DIR SEED

In attempts 0, 2, 4, ... a rank dies before, in or after the making of the group. Attempts 1, 3, 5,
... make groups, use the groups and leave a file for each rank; all but the last then fail as well.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch

from zfun.collectives import AllReduce, Collective, Group, barrier, process_group

POINTS = ("before", "in", "after", "in a later group")


def main(folder: Path, seed: int) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    last = int(os.environ["TORCHELASTIC_MAX_RESTARTS"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chance = random.Random(seed + attempt)
    dies, delay_s = chance.randrange(size) == rank, chance.uniform(0.0, 0.05)
    shared_memory = False if attempt % 4 > 1 else None
    if attempt % 2 == 0:
        point = POINTS[(attempt // 2 + seed) % len(POINTS)] if dies else ""
        if point == "before":
            _die()
        if point == "in":
            threading.Timer(delay_s, _die).start()
        group = process_group(timeout_s=10.0, shared_memory=shared_memory)
        if point == "after":
            _die()
        if point == "in a later group":
            threading.Timer(delay_s, _die).start()
        while True:
            _total(process_group(timeout_s=10.0, shared_memory=shared_memory))
            barrier(group)
    group = process_group(timeout_s=10.0, shared_memory=shared_memory)
    for made in (group, process_group(timeout_s=10.0, shared_memory=shared_memory)):
        assert _total(made) == size * (size + 1) / 2
    barrier(group)
    (folder / f"{attempt}.{rank}").touch()
    barrier(group)
    if attempt < last:
        _die()


def _total(group: Group) -> float:
    x = torch.tensor([1.0 + group.rank])
    return group.start(Collective(AllReduce()), x).wait().item()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
