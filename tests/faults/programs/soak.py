"""Two ranks that train and save while something goes wrong, and the law that holds for the ends.

    python -m tests.faults.programs.soak NAME FIRST COUNT

runs the cases FIRST, FIRST + 1, ... of one kind of fault: ``python -m tests.faults.programs.soak``
lists the kinds. A case is a seed. The law: each rank ends in time with a named error, or with the
bits of a run that nothing disturbed, and the newest checkpoint loads with the bits of its step.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zfun as zf
from tests.distributed import fork_server
from tests.faults.programs import strangers
from zfun.collectives import process_group

WIDTH, LAYERS, RANKS = 96, 3, 2

Fault = Callable[[int, str, int], None]


@dataclass(frozen=True)
class Job:
    """A training run of two ranks.

    Attributes:
        path: the directory of checkpoints.
        steps: the steps of the run, with a save after every fifth.
        timeout_s: of the group.
        shared_memory: the transport; gloo without.
        seed: of the parameters.
        fault: called on each rank before each part, with the rank, the part, which is ``"init"``,
            ``"step"`` or ``"save"``, and the step.
    """

    path: Path
    steps: int = 20
    timeout_s: float = 6.0
    shared_memory: bool = True
    seed: int = 0
    fault: Fault | None = None


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: the time, ``"done"`` or the class of the error, and a hash or a message."""

    at: float
    kind: str
    text: str


def _params(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(WIDTH, WIDTH, generator=g) / WIDTH for _ in range(LAYERS)]


def _loss(params: list[Tensor], x: Tensor) -> Tensor:
    for weight in params:
        x = torch.tanh(x @ weight)
    return x.square().mean()


def _loop(group: zf.Group) -> Any:
    return zf.zero(3, _loss, zf.optim.adamw(1e-2), group, bucket_bytes=1 << 15)


def _digest(params: Any) -> str:
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in params)).hexdigest()[:16]


def _batch(group: zf.Group, step: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * step + group.rank)
    return torch.randn(4, WIDTH, generator=g)


def train(group: zf.Group, job: Job) -> str:
    """Train to the end, and return a hash of the parameters."""
    fault = job.fault or (lambda rank, part, step: None)
    fault(group.rank, "init", 0)
    z = _loop(group)
    state = z.init(_params(job.seed))
    for step in range(1, job.steps + 1):
        fault(group.rank, "step", step)
        state, _ = z.step(state, _batch(group, step))
        if step % 5 == 0:
            fault(group.rank, "save", step)
            zf.save(job.path, state, background=step % 2 == 0, keep=2)
    zf.checkpoint.check_saves(group)
    zf.save(job.path, state).wait()
    return _digest(z.params(state))


@functools.cache
def expected(steps: int, seed: int) -> dict[int, str]:
    """Return the hash of the parameters after each step of a run that nothing disturbs."""

    def main(group: zf.Group) -> dict[int, str]:
        z = _loop(group)
        state, found = z.init(_params(seed)), dict[int, str]()
        for step in range(1, steps + 1):
            state, _ = z.step(state, _batch(group, step))
            found[step] = _digest(z.params(state))
        return found

    return zf.simulate(RANKS, main)[0]


def wrong_checkpoints(path: Path, steps: int, seeds: tuple[int, ...] = (0,)) -> list[str]:
    """Load every checkpoint, and return those with other bits than runs of these seeds have."""
    wrong = []
    z = _loop(zf.collectives.single_group())
    for step, place in zf.checkpoint.steps(path):
        state = zf.load(place, z.init(_params(1000)), rng=False).state
        found = _digest(z.params(state))
        if found not in [expected(steps, seed)[step] for seed in seeds]:
            wrong.append(f"{place} has other bits")
    return wrong


def _rank(job: Job, rank: int, port: int, end: Connection) -> None:
    names = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
    names |= {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    try:
        with process_group(timeout_s=job.timeout_s, shared_memory=job.shared_memory) as group:
            found = train(group, job)
    except Exception as error:  # noqa: BLE001, the kind of error is looked at
        kind = "ZfunError" if isinstance(error, zf.ZfunError) else type(error).__name__
        end.send(Outcome(time.monotonic(), kind, f"{type(error).__name__}: {error}"))
    else:
        end.send(Outcome(time.monotonic(), "done", found))


@contextlib.contextmanager
def running(job: Job) -> Iterator[tuple[list[Any], list[Connection], int]]:
    """Start the ranks of a job; yields the processes, their connections and the store's port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [fork_server().Pipe() for _ in range(RANKS)]
    ranks = [
        fork_server().Process(target=_rank, args=(job, rank, store.port, pipe[1]))
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for rank, pipe in zip(ranks, pipes, strict=True):
            rank.start()
            pipe[1].close()
        yield ranks, [pipe[0] for pipe in pipes], store.port
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        for pipe in pipes:
            pipe[0].close()


def ends(ranks: list[Any], pipes: list[Connection], limit_s: float) -> list[Outcome | None]:
    """Return the end of each rank; ``None`` for one that sent none."""
    deadline, found = time.monotonic() + limit_s, []
    for rank, pipe in zip(ranks, pipes, strict=True):
        outcome = None
        with contextlib.suppress(EOFError, ConnectionError):
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                outcome = pipe.recv()
        rank.join(5.0)
        found.append(outcome)
    return found


def broken(
    job: Job, found: list[Outcome | None], ranks: list[Any], hit: int | None = None
) -> list[str]:
    """Return each broken promise; the rank that the fault has ``hit`` promises nothing."""
    wrong = []
    for number, (outcome, rank) in enumerate(zip(found, ranks, strict=True)):
        if number == hit:
            continue
        if rank.exitcode is None:
            wrong.append(f"rank {number} does not end")
        elif outcome is None and rank.exitcode != -signal.SIGTERM:
            wrong.append(f"rank {number} ended with code {rank.exitcode} and no error")
        elif outcome is not None and outcome.kind == "done":
            right = outcome.text == expected(job.steps, job.seed)[job.steps]
            wrong += [] if right else [f"rank {number} has other bits"]
        elif outcome is not None and outcome.kind != "ZfunError":
            wrong.append(f"rank {number}: {outcome.text}")
    return wrong + wrong_checkpoints(job.path, job.steps, (job.seed,))


def told(found: list[Outcome | None]) -> str:
    return " | ".join("no word" if x is None else f"{x.kind}: {x.text[:110]}" for x in found)


# The kinds of faults. Each takes a seed and a folder, and returns a line and the broken promises.

Result = tuple[str, list[str]]


def _signalled(seed: int, folder: Path, kind: str, pause_s: float, timeout_s: float) -> Result:
    """Signal one rank at a random time, and let a stopped one go on after ``pause_s``."""
    chance = random.Random(seed)
    job = Job(folder, 4000, timeout_s, bool(seed % 2)) if kind == "term" else None
    job = job or Job(folder, 40, timeout_s, bool(seed % 2), fault=functools.partial(_nap, 0.02))
    with running(job) as (ranks, pipes, _):
        _await_step(folder, 5)
        time.sleep(chance.uniform(0.0, 0.3))
        hit = ranks[chance.randrange(RANKS)]
        if kind == "term":
            hit.terminate()
        else:
            os.kill(hit.pid, signal.SIGSTOP)
            time.sleep(pause_s)
            os.kill(hit.pid, signal.SIGCONT)
        found = ends(ranks, pipes, timeout_s + 15.0)
        steps = max(step for step, _ in zf.checkpoint.steps(folder))
        job = Job(folder, max(job.steps if kind != "term" else 0, steps), timeout_s)
        return told(found), broken(job, found, ranks)


def _nap(seconds: float, rank: int, part: str, step: int) -> None:
    time.sleep(seconds)


def _await_step(folder: Path, step: int, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not any(found >= step for found, _ in zf.checkpoint.steps(folder)):
        assert time.monotonic() < deadline, f"no step {step} in {folder}"
        time.sleep(0.01)


def _late(late_s: float, part: str, step: int, rank: int, now: str, at: int) -> None:
    if rank == 1 and (now, at) == (part, step):
        time.sleep(late_s)


def _lateness(seed: int, folder: Path, late_s: float, timeout_s: float) -> Result:
    """One rank comes late to the first step, to a step or to a save."""
    part, step = [("init", 0), ("step", 7), ("save", 10), ("save", 15)][seed % 4]
    late = functools.partial(_late, late_s, part, step)
    job = Job(folder, 20, timeout_s, bool(seed // 4 % 2), fault=late)
    with running(job) as (ranks, pipes, _):
        found = ends(ranks, pipes, late_s + timeout_s + 30.0)
        wrong = broken(job, found, ranks)
        is_done = all(x is not None and x.kind == "done" for x in found)
        if is_done != (late_s < timeout_s):
            wrong.append(f"late by {late_s} s with a timeout of {timeout_s} s: {told(found)}")
        return told(found), wrong


def _limited(part: str, step: int, extra: int, rank: int, now: str, at: int) -> None:
    if rank == 1 and (now, at) == (part, step):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _memory(seed: int, folder: Path) -> Result:
    """One rank reaches a limit of memory: at once, or a little later.

    That rank may hang, because ``threading.Thread.start`` of CPython waits for ever for a thread
    that has no memory to begin; or abort in LLVM or the C library. The other one must name it.
    """
    part, step = [("init", 0), ("step", 3), ("save", 5), ("save", 10)][seed % 4]
    extra = [0, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26][seed // 4 % 6]
    fault = functools.partial(_limited, part, step, extra)
    job = Job(folder, 20, shared_memory=bool(seed // 24 % 2), fault=fault)
    with running(job) as (ranks, pipes, _):
        found = ends(ranks, pipes, 30.0)
        return f"{part}, {extra} bytes left: {told(found)}", broken(job, found, ranks, hit=1)


def _strange(seed: int, folder: Path) -> Result:
    """Strangers send garbage to every open port while the run starts and trains."""
    job = Job(folder, 60, shared_memory=bool(seed % 2), fault=functools.partial(_nap, 0.01))
    with running(job) as (ranks, pipes, port):
        pids = [rank.pid for rank in ranks]
        with strangers.knocking(pids, {port}, seed) as knocks:
            found = ends(ranks, pipes, 60.0)
        return f"{knocks} sent; {told(found)}", broken(job, found, ranks)


def _fork(rank: int, part: str, step: int) -> None:
    if part != "step":
        return
    child = os.fork()
    if child == 0:
        # A fork computes, closes all that it was given, and ends as Python ends.
        kinds: list[Callable[[], Any]] = [
            lambda: os._exit(0),
            lambda: torch.randn(50, 50) @ torch.randn(50, 50),
            lambda: os.closerange(3, 64),
        ]
        kinds[step % 3]()
        os._exit(0)
    threading.Thread(target=os.waitpid, args=(child, 0)).start()


def _forks(seed: int, folder: Path, steps: int = 60) -> Result:
    """Each rank forks before every step."""
    job = Job(folder, steps, shared_memory=bool(seed % 2), fault=_fork)
    with running(job) as (ranks, pipes, _):
        found = ends(ranks, pipes, 60.0 + steps / 4)
        wrong = broken(job, found, ranks)
        wrong += [x.text for x in found if x is not None and x.kind != "done"]
        return told(found), wrong


def _two_jobs(seed: int, folder: Path) -> Result:
    """Two jobs of different values train and save to one path."""
    shared, naps = bool(seed % 2), [functools.partial(_nap, wait) for wait in (0.003, 0.004)]
    jobs = [
        Job(folder, 20, shared_memory=shared, seed=index, fault=nap)
        for index, nap in enumerate(naps)
    ]
    with running(jobs[0]) as first, running(jobs[1]) as second:
        both = [ends(ranks, pipes, 60.0) for ranks, pipes, _ in (first, second)]
        wrong = wrong_checkpoints(folder, 20, (0, 1))
        for job, found in zip(jobs, both, strict=True):
            for x in found:
                if x is None or (x.kind == "done" and x.text != expected(20, job.seed)[20]):
                    wrong.append(f"job {job.seed}: {told(found)}")
                elif x.kind not in ("done", "ZfunError"):
                    wrong.append(x.text)
        return " || ".join(map(told, both)), wrong


KINDS: dict[str, Callable[[int, Path], Result]] = {
    "sigterm": lambda seed, path: _signalled(seed, path, "term", 0.0, 6.0),
    "pause": lambda seed, path: _signalled(seed, path, "stop", 2.0, 8.0),
    "stop": lambda seed, path: _signalled(seed, path, "stop", 7.0, 3.0),
    "late": lambda seed, path: _lateness(seed, path, 2.0, 20.0),
    "too late": lambda seed, path: _lateness(seed, path, 8.0, 3.0),
    "late 30": lambda seed, path: _lateness(seed, path, 30.0, 60.0),
    "too late 30": lambda seed, path: _lateness(seed, path, 30.0, 8.0),
    "memory": _memory,
    "strangers": _strange,
    "forks": _forks,
    "two jobs": _two_jobs,
}


def run(kind: str, seed: int) -> Result:
    """Run a case, and return what happened and each broken promise."""
    with tempfile.TemporaryDirectory() as name:
        before = {path.name for path in Path("/dev/shm").glob("*zfun*")}
        line, wrong = KINDS[kind](seed, Path(name) / "run")
        left = {path.name for path in Path("/dev/shm").glob("*zfun*")} - before
    return line, wrong + [f"/dev/shm/{name} is left" for name in sorted(left)]


def main(kind: str, first: int, count: int) -> int:
    torch.set_num_threads(1)
    failed, begin = 0, time.monotonic()
    for seed in range(first, first + count):
        line, wrong = run(kind, seed)
        failed += bool(wrong)
        print(f"{kind} {seed}: {line}", *wrong, sep="\n    ", flush=True)
    took = time.monotonic() - begin
    print(f"{kind}: {count - failed} of {count} are as they should be; {took:.0f} s")
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("\n".join(KINDS))
    sys.exit(min(1, main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
