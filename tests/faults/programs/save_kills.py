"""Kill one rank of two at each system call of its save, and look at the other and at the disk.

    python -m tests.faults.programs.save_kills FIRST STRIDE [background] [RANK]

kills at the calls FIRST, FIRST + STRIDE, ... The survivor must end within ``TIMEOUT_S`` + 5 s by an
error of zfun, the newest checkpoint must load bit by bit, and the next job must be able to save.
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zfun as zf
from tests.distributed import fork_server
from tests.faults.programs import tracer
from zfun.checkpoint._remove import stale
from zfun.collectives import process_group
from zfun.testing import same_bits

TIMEOUT_S, GRACE_S = 5.0, 5.0


def values_of(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(3000.0) + step, "b": torch.full((7,), float(step))}


def _save(group: zf.Group, path: Path, step: int, *, background: bool = False) -> Any:
    state = {"params": zf.shard(values_of(step), group, bucket_bytes=4096), "rate": 0.5}
    saved = zf.save(path, state, step=step, background=background, chunk_bytes=4096, keep=2)
    return saved.wait()


def loaded(path: Path) -> int:
    """Load the newest checkpoint, and return its step, or -1 if the bits are others."""
    group = zf.collectives.single_group()
    like = {"params": zf.shard(values_of(-1), group, bucket_bytes=4096), "rate": 0.0}
    found = zf.load(path, like)
    right = same_bits(zf.unshard(found.state["params"]), values_of(found.step))
    return found.step if right else -1


def _rank(rank: int, port: int, path: Path, lost: int, background: bool, end: Connection) -> None:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    names |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    try:
        with process_group(timeout_s=TIMEOUT_S) as group:
            # Compiling, importing and connecting happen once, and are no part of a save.
            _save(group, path / "warm", 1, background=background)
            if rank == lost:
                end.send(threading.get_native_id())
                end.recv()
            tracer.mark()
            _save(group, path / "run", 2, background=background)
            tracer.mark()
            while True:
                zf.unshard(zf.shard(values_of(1), group))
                if rank == lost:
                    return
    except zf.ZfunError as error:
        end.send((time.monotonic(), f"{type(error).__name__}: {error}"))
    except Exception as error:  # noqa: BLE001, reported
        end.send((time.monotonic(), f"raw {type(error).__name__}: {error}"))


@dataclass(frozen=True)
class Kill:
    """One kill: ``count`` calls were made, ``took_s`` to the end of the survivor."""

    at: int | None
    count: int
    is_killed: bool
    step: int
    took_s: float
    error: str
    broken: tuple[str, ...]


def run(at: int | None, lost: int, *, background: bool) -> Kill:
    """Kill a rank at one system call of its save."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_server()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        zf.simulate(2, _save, path / "run", 1)
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=_rank, args=(rank, store.port, path, lost, background, pipe[1]))
            for rank, pipe in enumerate(pipes)
        ]
        for rank, pipe in zip(ranks, pipes, strict=True):
            rank.start()
            pipe[1].close()
        try:
            ours, other = pipes[lost][0], pipes[1 - lost][0]
            came = ours.recv() if ours.poll(60.0) else None
            if not isinstance(came, int):
                raise RuntimeError(f"the ranks did not come to the save: {came}")
            tracer.attach(came)
            ours.send("go")
            count, is_killed = tracer.kill_at(ranks[lost].pid, at)
            begin = time.monotonic()
            limit = TIMEOUT_S + GRACE_S
            end, error = (begin + 99.0, "never ended")
            if other.poll(limit + 20.0):
                end, error = other.recv()
            ranks[1 - lost].join(max(1.0, begin + limit - time.monotonic()))
            broken = [] if ranks[1 - lost].exitcode is not None else ["the survivor stays"]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
            for pipe in pipes:
                pipe[0].close()
        took = end - begin
        broken += [f"late, {took:.1f} s"] if took > limit else []
        broken += ["no error of zfun"] if error.startswith(("raw", "never")) else []
        step = loaded(path / "run")
        broken += ["other bits"] if step not in (1, 2) else []
        zf.simulate(2, _save, path / "run", 3)
        broken += ["the next save does not load"] if loaded(path / "run") != 3 else []
        broken += ["rubbish stays"] if stale(path / "run") else []
    return Kill(at, count, is_killed, step, took, error[:200], tuple(broken))


def sweep(first: int, stride: int, lost: int, *, background: bool) -> Iterator[Kill]:
    """Kill at every ``stride``-th call, until a save ends before its kill."""
    at = first
    while True:
        try:
            done = run(at, lost, background=background)
        except RuntimeError as error:
            # On a busy machine the ranks may not meet in time.
            print(error, flush=True)
            continue
        yield done
        if not done.is_killed:
            return
        at += stride


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    first, stride, lost = int(words[0]), int(words[1]), int(words[-1])
    background, begin = "background" in words, time.monotonic()
    counts: collections.Counter[int] = collections.Counter()
    broken, longest = 0, 0.0
    for done in sweep(first, stride, lost, background=background):
        counts[done.step] += done.is_killed
        longest = max(longest, done.took_s if done.is_killed else 0.0)
        broken += bool(done.broken)
        if done.broken:
            print(done, flush=True)
    print(
        f"{'background' if background else 'blocking'}, rank {lost}: {sum(counts.values())} kills, "
        f"newest step {dict(counts)}, the survivor ends after at most {longest:.1f} s, "
        f"{broken} broken; {time.monotonic() - begin:.0f} s"
    )
    return broken


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
