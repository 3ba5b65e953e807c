"""Ranks that are killed, stopped or end at random points of a training run.

    python -m tests.faults.programs.losses FIRST COUNT

runs the cases FIRST, FIRST + 1, ... and prints the figures. A case is a seed: it chooses the number
of ranks, the transport, the place of the store, the stage, the rank that is lost, how, and where.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zfun as zf
from tests.distributed import fork_server
from zfun.collectives import process_group

KINDS = ("kill", "stop", "os._exit", "sys.exit", "raise")
# Long beside the time for which a busy machine may stop a process.
TIMEOUT_S = 8.0
# After the loss of a rank whose end the system tells, and after the timeout.
# A stopped rank may hold the lock of a kernel that it compiles, for which the others wait 5 s.
PROMPT_S, LATE_S = TIMEOUT_S - 0.5, TIMEOUT_S + 11.0
LAYERS = 4


@dataclass(frozen=True)
class Case:
    """Attributes: ``store_in_rank_0``: not in a process that outlives the ranks. ``step``: 0 stands
    for the making of the group. ``layer``: where in the loss. ``delay_s``: from there to the loss.
    """

    seed: int
    kind: str
    size: int
    shared_memory: bool
    store_in_rank_0: bool
    stage: int
    lost: int
    step: int
    layer: int
    delay_s: float

    @property
    def asynchronous(self) -> bool:
        return self.kind in ("kill", "stop", "os._exit")

    @property
    def told(self) -> bool:
        """Whether the end of the process tells the others at once."""
        return self.kind != "stop" and self.step > 0


def case_of(seed: int) -> Case:
    chance = random.Random(seed)
    kind, size = KINDS[seed % 5], 2 + seed // 5 % 2
    at = chance.choice([0, *range(1, 9)]) if kind in ("kill", "stop", "os._exit") else None
    return Case(
        seed,
        kind,
        size,
        shared_memory=bool(seed // 10 % 2),
        store_in_rank_0=bool(seed // 20 % 2),
        stage=chance.randrange(4),
        lost=chance.randrange(size),
        step=chance.randrange(1, 9) if at is None else at,
        layer=chance.randrange(LAYERS),
        delay_s=chance.uniform(0.0, 0.006),
    )


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: the time, and the error."""

    at: float
    kind: str
    text: str = ""
    rank: int | None = None
    step: int | None = None
    leaf: str | None = None


def run(case: Case) -> list[str]:
    """Run a case and return each broken promise."""
    store, port = None, 0
    with contextlib.ExitStack() as stack:
        if case.store_in_rank_0:
            port = _free_port()
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = store.port
        shm = set(_shared_files())
        connections: list[Connection] = []
        processes: list[Any] = []
        context = fork_server()
        for rank in range(case.size):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_rank, args=(case, rank, port, theirs)))
            processes[-1].start()
            theirs.close()
            stack.callback(ours.close)
            connections.append(ours)
        try:
            outcomes = _outcomes(connections)
            found = _broken(case, outcomes)
            for rank, process in enumerate(processes):
                if rank != case.lost:
                    process.join(5.0)
                    if process.exitcode is None:
                        found.append(f"rank {rank} raised, and its process did not end")
        finally:
            for process in processes:
                process.kill()
                process.join()
        ranks = {process.pid for process in processes}
        found += [f"process {pid} is left over" for pid in _processes_of(ranks)]
        found += [f"{name} is left over" for name in set(_shared_files()) - shm]
    return found


def _outcomes(connections: list[Connection]) -> dict[int, list[Outcome]]:
    """Return what each rank has sent, until all have ended or nothing has happened for long."""
    outcomes: dict[int, list[Outcome]] = {rank: [] for rank in range(len(connections))}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting:
        answered = wait(list(waiting), timeout=30.0)
        for connection in answered or list(waiting):
            rank = waiting[connection]  # type: ignore[index]
            try:
                if not answered:
                    raise EOFError
                outcomes[rank].append(connection.recv())  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                del waiting[connection]  # type: ignore[arg-type]
        # A stopped rank never closes the connection.
        if all(any(o.kind != "begin" for o in outcomes[rank]) for rank in outcomes):
            return outcomes
    return outcomes


def _broken(case: Case, outcomes: dict[int, list[Outcome]]) -> list[str]:
    if not outcomes[case.lost]:
        return [f"rank {case.lost} was never lost"]
    lost_at = outcomes[case.lost][0].at
    found = []
    for rank, sent in outcomes.items():
        if rank == case.lost:
            continue
        if not sent:
            found.append(f"rank {rank} never ended")
            continue
        (end,) = sent
        took, limit = end.at - lost_at, PROMPT_S if case.told else LATE_S
        told = f"rank {rank} after {took:.2f} s: {end}"
        if end.kind != "PeerLost":
            found.append(f"another error, {told}")
            continue
        named = set(re.findall(r"lost rank (\d+)", end.text))
        if named != {str(case.lost)}:
            found.append(f"names rank {named}, {told}")
        if took > limit:
            found.append(f"too late, {told}")
        if end.rank != rank:
            found.append(f"wrong rank, {told}")
        if case.step and end.step is None:
            found.append(f"no step, {told}")
        if "(bucket " in end.text and not (end.leaf or "").startswith("bucket "):
            found.append(f"no leaf, {told}")
        if case.kind == "raise" and "ValueError: out of data" not in end.text:
            found.append(f"does not quote the error, {told}")
    return found


def _rank(case: Case, rank: int, port: int, connection: Connection) -> None:
    os.setsid()
    names = {"RANK": rank, "WORLD_SIZE": case.size, "LOCAL_RANK": rank}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": not case.store_in_rank_0}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    try:
        _train(case, rank, connection)
    except (zf.ZfunError, ValueError, SystemExit) as error:
        if rank != case.lost:
            connection.send(_outcome(error))


def _outcome(error: BaseException) -> Outcome:
    now, kind = time.monotonic(), type(error).__name__
    if not isinstance(error, zf.ZfunError):
        return Outcome(now, kind, str(error))
    return Outcome(now, kind, str(error), error.rank, error.step, error.leaf)


def _train(case: Case, rank: int, connection: Connection) -> None:
    lose = _loss_of(case, connection)
    number = 0

    def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
        for layer, weight in enumerate(params):
            if rank == case.lost and number == case.step and layer == case.layer:
                lose()
            x = torch.tanh(x @ weight)
        return x.square().mean()

    if rank == case.lost and case.step == 0:
        lose()
    with process_group(timeout_s=TIMEOUT_S, shared_memory=case.shared_memory) as group:
        z = zf.zero(case.stage, loss_fn, zf.optim.adamw(1e-3), group, bucket_bytes=1 << 18)
        generator = torch.Generator().manual_seed(0)
        state = z.init([torch.randn(192, 192, generator=generator) for _ in range(LAYERS)])
        # A parent that is killed leaves no rank that trains on.
        while parent_process().is_alive():  # type: ignore[union-attr]
            number += 1
            state, _ = z.step(state, torch.ones(2, 192))


def _loss_of(case: Case, connection: Connection) -> Callable[[], None]:
    def lose() -> None:
        # The connection of a process that ends is closed; that of a stopped one is not.
        connection.send(Outcome(time.monotonic(), case.kind))
        match case.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "os._exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(3)
            case "raise":
                raise ValueError("out of data")

    if case.asynchronous:
        return lambda: threading.Timer(case.delay_s, lose).start()
    return lose


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _shared_files() -> list[str]:
    folder = Path("/dev/shm")
    return [path.name for path in folder.iterdir() if "zfun" in path.name]


def _processes_of(sessions: set[int]) -> list[int]:
    """Return the processes whose session began with one of these processes."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions:
                found.append(int(status.parent.name))
    return found


def run_all(seeds: Sequence[int]) -> Iterator[tuple[Case, list[str]]]:
    """Run cases, two at a time because most of a case is waiting; yield the broken promises."""
    cases = [case_of(seed) for seed in seeds]
    with ThreadPoolExecutor(2) as threads:
        yield from zip(cases, threads.map(run, cases), strict=True)


def main(first: int, count: int) -> int:
    started, failed = time.monotonic(), 0
    for case, broken in run_all(range(first, first + count)):
        failed += bool(broken)
        print(case, *broken, sep="\n        ", flush=True)
    took = time.monotonic() - started
    print(f"{count - failed} of {count} cases are as they should be; {took:.0f} s")
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
