"""Runs of examples/train.py whose ranks are killed or told to end, and started again."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zfun as zf
from tests.distributed import fork_server
from zfun.demo._examples import load_example

EXAMPLES = Path(__file__).parents[3] / "examples"
PARTS = ("optimizer", "grads", "params")
SIGNALS = {"killed": signal.SIGKILL, "told to end": signal.SIGTERM}


@dataclass(frozen=True)
class Plan:
    """A training run.

    Attributes:
        steps: the steps of the whole run.
        save_every: steps between two checkpoints.
        shard: the parts that the ranks shard, as ``--shard`` takes them.
    """

    steps: int = 10
    save_every: int = 3
    shard: tuple[str, ...] = PARTS

    def arguments(self, checkpoints: Path) -> list[str]:
        numbers = {"--steps": self.steps, "--save-every": self.save_every}
        words = [str(word) for item in numbers.items() for word in item]
        words += ["--preset", "tiny", "--checkpoints", str(checkpoints)]
        return [*words, "--shard", *self.shard]


@dataclass(frozen=True)
class Event:
    """A rank that is killed or told to end before a step."""

    rank: int
    step: int
    kind: str = "killed"


class Ranks:
    """The processes of one attempt; the end of the context kills those that are left.

    Args:
        plan: the run.
        size: the number of ranks.
        folder: ``checkpoints`` and a log for each rank go there.
        event: the disturbance, if any.
    """

    def __init__(self, plan: Plan, size: int, folder: Path, event: Event | None = None) -> None:
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        words = plan.arguments(folder / "checkpoints")
        self.processes: list[Any] = [
            fork_server().Process(
                target=_rank, args=(rank, size, self._store.port, folder, words, event)
            )
            for rank in range(size)
        ]

    def __enter__(self) -> Ranks:
        self.folder.mkdir(exist_ok=True)
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def wait(self, limit_s: float = 60.0) -> list[int | None]:
        """Return the exit code of each rank."""
        for process in self.processes:
            process.join(limit_s)
        return [process.exitcode for process in self.processes]


def attempt(plan: Plan, size: int, folder: Path, event: Event | None = None) -> list[int | None]:
    """Start the ranks, and return the exit code of each."""
    with Ranks(plan, size, folder, event) as ranks:
        return ranks.wait()


def _rank(
    rank: int, size: int, port: int, folder: Path, words: list[str], event: Event | None
) -> None:
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train.py", *words]
    sys.path.insert(0, str(EXAMPLES))
    train: Any = importlib.import_module("train")
    train.stdlib_bytes = _short_text
    if event is not None and event.rank == rank:
        train.batches = _disturbed(train.batches, event)
    train.main()
    sys.stdout.flush()
    # A process of multiprocessing runs no hooks of atexit.
    atexit._run_exitfuncs()


def _short_text() -> Tensor:
    text: Tensor = load_example("text").stdlib_bytes(limit=200_000)
    return text


def _disturbed(batches: Callable[..., Iterator[Any]], event: Event) -> Callable[..., Iterator[Any]]:
    def run(*args: Any, first: int) -> Iterator[Any]:
        for step, batch in enumerate(batches(*args, first=first), first):
            if step == event.step:
                os.kill(os.getpid(), SIGNALS[event.kind])
            yield batch

    return run


def steps_in(folder: Path) -> list[int]:
    return [step for step, _ in zf.checkpoint.steps(folder / "checkpoints")]


def result_of(folder: Path) -> Any:
    """Return step, parameters and moments in the newest checkpoint of a run."""
    params = load_example("gpt").init(load_example("gpt").PRESETS["tiny"])[1]
    like = (params, zf.optim.adamw(4e-4).init(params))
    group = zf.collectives.single_group()
    loaded = zf.load(folder / "checkpoints", like, group=group, rng=False)
    params, moments = loaded.state
    return loaded.step, params, moments.mu, moments.nu


def unbroken(segments: Sequence[tuple[int, int]], folder: Path, *, full_text: bool = False) -> Any:
    """Train on simulated ranks with another loop; return the same values as :func:`result_of`.

    Args:
        segments: the number of ranks and the last step of each part of the run.
        folder: the state goes through a checkpoint there where the number of ranks changes.
        full_text: train on the text of the program, and not on the short one.
    """
    gpt, text = load_example("gpt"), load_example("text")
    config = gpt.PRESETS["tiny"]
    source = text.stdlib_bytes() if full_text else _short_text()

    def main(group: zf.Group, last: int) -> Any:
        loss_fn, params = gpt.init(config)
        z = zf.zero(1, loss_fn, zf.optim.adamw(4e-4), group)
        state = z.init(params)
        if zf.checkpoint.steps(folder):
            state = zf.load(folder, state).state
        shape = (config.batch_size * group.size, config.length, group.rank, group.size)
        data = text.batches(source, *shape, first=state.step + 1)
        for _ in range(state.step, last):
            state, _ = z.step(state, next(data))
        zf.save(folder, state)
        moments = (state.opt_state.mu, state.opt_state.nu)
        return state.step, z.params(state), *map(zf.unshard, moments)

    found: Any = None
    for size, last in segments:
        found = zf.simulate(size, main, last)[0]
    return found


def log_of(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return "".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    return ""
