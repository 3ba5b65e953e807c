"""n ranks as real processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist

from zfun.collectives._agree import barrier
from zfun.collectives._group import Group
from zfun.collectives.launch._init import process_group
from zfun.errors import OptionError, PeerLost, check_process
from zfun.options import ANY, SECONDS, instance, integer, number, takes

if TYPE_CHECKING:  # not every system has fork servers
    from multiprocessing.context import (
        ForkServerContext,
        ForkServerProcess,
        SpawnContext,
        SpawnProcess,
    )

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


@takes(n=integer(1), args=ANY, timeout_s=SECONDS, collective_timeout_s=SECONDS | None)
def spawn(
    n: int,
    fn: Callable[..., _Result],
    *args: Any,
    timeout_s: float = 120.0,
    collective_timeout_s: float | None = None,
    shared_memory: bool | None = None,
) -> list[_Result]:
    """Call ``fn(group, *args)`` on n ranks, which are processes of this machine; return results.

    :func:`simulate` with real processes, one thread each, over shared memory or over gloo on the
    loopback interface, which other hosts cannot reach. ``fn``, ``args`` and results travel by
    pickle, so ``fn`` must be importable by name. :class:`Workers` runs several functions on the
    same processes.

    Args:
        n: the number of ranks.
        fn: the program of a rank.
        args: passed to ``fn`` after the group.
        timeout_s: how long the run may take, in seconds; then every process is killed.
        collective_timeout_s: how long one collective may take; by default as long as the run.
        shared_memory: whether the ranks exchange data through shared memory; see
            :func:`process_group`.

    Returns:
        The results in rank order.

    Raises:
        PeerLost: a rank died or did not finish in time.
        Exception: the error of ``fn`` on the lowest rank that failed first, with that rank's
            traceback as a note.
    """
    with Workers(
        n,
        timeout_s=timeout_s,
        collective_timeout_s=collective_timeout_s,
        shared_memory=shared_memory,
    ) as workers:
        return workers.run(fn, *args)


@dataclass(frozen=True, slots=True)
class _RankFailure:
    """How a rank failed. ``order`` ranks causes before consequences."""

    error: BaseException
    order: int


@takes(
    n=integer(1),
    timeout_s=SECONDS,
    collective_timeout_s=SECONDS | None,
    grace_s=number(0, below=1e9, example="5.0"),
    context=instance(
        multiprocessing.context.BaseContext,
        "a context of multiprocessing",
        "multiprocessing.get_context()",
    )
    | None,
)
class Workers:
    """A context manager with n processes, for several runs without starting processes again.

    Args:
        n: the number of ranks.
        timeout_s: how long one run may take, in seconds, the start of the processes not counted.
        collective_timeout_s: how long one collective may take; by default as long as the run.
        grace_s: how long the other ranks may run after one has failed, before they are killed.
        shared_memory: whether the ranks exchange data through shared memory; see
            :func:`process_group`.
        context: the start method; by default ``multiprocessing.get_context("spawn")``, under which
            each process imports torch. A fork server with torch imported starts processes in a
            tenth of the time.

    Example:
        ``with Workers(2) as workers: results = workers.run(train, 10)``
    """

    def __init__(
        self,
        n: int,
        *,
        timeout_s: float = 120.0,
        collective_timeout_s: float | None = None,
        grace_s: float = 5.0,
        shared_memory: bool | None = None,
        context: SpawnContext | ForkServerContext | None = None,
    ) -> None:
        self._n = n
        self._timeout_s = timeout_s
        self._collective_timeout_s = (
            timeout_s if collective_timeout_s is None else collective_timeout_s
        )
        self._grace_s = grace_s
        self._shared_memory = shared_memory
        self._context = context or multiprocessing.get_context("spawn")
        self._process = os.getpid()
        self._store: dist.Store | None = None
        self._processes: list[SpawnProcess | ForkServerProcess] = []
        self._connections: list[Connection] = []

    def run(
        self,
        fn: Callable[Concatenate[Group, _Params], _Result],
        *args: _Params.args,
        **kwargs: _Params.kwargs,
    ) -> list[_Result]:
        """Call ``fn(group, *args, **kwargs)`` on every rank; see :func:`spawn`.

        After a failure the next run starts new processes.
        """
        outcomes = self._outcomes(fn, args, kwargs)
        failures = {
            rank: outcome
            for rank, outcome in enumerate(outcomes)
            if isinstance(outcome, _RankFailure)
        }
        if not failures:
            return outcomes
        first = min(failures, key=lambda rank: (failures[rank].order, rank))
        error = failures.pop(first).error
        for rank, other in failures.items():
            error.add_note(f"rank {rank} ended with {type(other.error).__name__}: {other.error}")
        raise error

    def outcomes(
        self,
        fn: Callable[Concatenate[Group, _Params], _Result],
        *args: _Params.args,
        **kwargs: _Params.kwargs,
    ) -> list[_Result | BaseException]:
        """Call ``fn`` as :meth:`run` does, and return for each rank the result or the error."""
        return [
            outcome.error if isinstance(outcome, _RankFailure) else outcome
            for outcome in self._outcomes(fn, args, kwargs)
        ]

    def close(self) -> None:
        """End the processes."""
        if self._process != os.getpid():
            return
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self._kill()

    def _outcomes(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        check_process(self._process, "a Workers")
        job = _pickled_job(fn, args, kwargs)
        try:
            if not self._processes:
                self._start()
            outcomes = self._collect(job)
        except BaseException:
            self._kill()
            raise
        if any(isinstance(outcome, _RankFailure) for outcome in outcomes.values()):
            self._kill()
        return [outcomes[rank] for rank in range(self._n)]

    def _start(self) -> None:
        # The store lives in this process and outlives every rank.
        store = self._store = _loopback_store()
        for rank in range(self._n):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(
                    rank,
                    self._n,
                    store.port,
                    theirs,
                    self._collective_timeout_s,
                    self._shared_memory,
                ),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _collect(self, job: bytes) -> dict[int, Any]:
        # A rank answers once when ready, so that the time to import torch does not count.
        ready = self._answers(None, time.monotonic() + max(self._timeout_s, 60.0))
        if any(isinstance(outcome, _RankFailure) for outcome in ready.values()):
            return ready
        return self._answers(job, time.monotonic() + self._timeout_s)

    def _answers(self, job: bytes | None, deadline: float) -> dict[int, Any]:
        started = time.monotonic()
        outcomes: dict[int, Any] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(job or b"")
            except OSError:
                outcomes[rank] = self._died(rank)
        while len(outcomes) < self._n:
            waiting = {
                self._connections[rank]: rank for rank in range(self._n) if rank not in outcomes
            }
            answered = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                for rank in waiting.values():
                    text = (
                        f"rank {rank} did not finish within {time.monotonic() - started:.1f} "
                        "s and was killed"
                    )
                    outcomes[rank] = _RankFailure(PeerLost(text, rank=rank), 3)
                return outcomes
            for connection in answered:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    answer = connection.recv_bytes()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    outcomes[rank] = self._died(rank)
                else:
                    outcomes[rank] = _unpickled_answer(answer, rank, self._n)
                if isinstance(outcomes[rank], _RankFailure):
                    deadline = min(deadline, time.monotonic() + self._grace_s)
        return outcomes

    def _died(self, rank: int) -> _RankFailure:
        self._processes[rank].join(1.0)
        code = self._processes[rank].exitcode
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return _RankFailure(
            PeerLost(f"rank {rank} of {self._n} {how} in the middle of a run", rank=rank), 1
        )

    def _kill(self) -> None:
        # A fork leaves the processes to its parent.
        if self._process != os.getpid():
            return
        for process in self._processes:
            # A stopped process does not react to SIGTERM.
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes.clear()
        self._connections.clear()
        self._store = None


def _loopback_store() -> dist.TCPStore:
    """Return a store that other hosts cannot reach, on a port that the system has chosen.

    A store that makes its own socket listens on all interfaces, and believes every message.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        return dist.TCPStore(
            "127.0.0.1",
            server.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            # The store closes this descriptor.
            master_listen_fd=os.dup(server.fileno()),
        )


def _pickled_job(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise OptionError(
            "processes import the function by its name and receive its arguments by pickle; "
            f"{name}: {error}"
        ) from error


def _serve(
    rank: int,
    size: int,
    port: int,
    connection: Connection,
    collective_timeout_s: float,
    shared_memory: bool | None,
) -> None:
    """Run jobs from the connection until the connection closes or a run fails: a rank's main."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # As under torchrun the store exists already, and no rank may open one.
    agent = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    os.environ.update(
        {name: str(value) for name, value in {**local, **rendezvous, **agent}.items()}
    )
    torch.set_num_threads(1)
    group: Group | None = None
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            break
        try:
            group = group or process_group(
                timeout_s=collective_timeout_s, shared_memory=shared_memory
            )
            fn, args, kwargs = pickle.loads(job) if job else (_ready, (), {})
            answer = pickle.dumps(("result", fn(group, *args, **kwargs)))
        except BaseException as error:  # noqa: BLE001, the caller of run receives every error
            if group is not None:
                group.__exit__(type(error), error, error.__traceback__)
            connection.send_bytes(_pickled_error(error))
            return
        connection.send_bytes(answer)
    if group is not None:
        group.close()


def _ready(group: Group) -> None:
    """Run on each rank first, so that the rendezvous is over before the clock starts."""
    barrier(group)


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled or b"")
    except Exception:  # noqa: BLE001, an error without pickle is described instead
        pickled = None
    return pickle.dumps(("error", pickled, f"{type(error).__name__}: {error}", text))


def _unpickled_answer(answer: bytes, rank: int, size: int) -> Any:
    kind, *rest = pickle.loads(answer)
    if kind == "result":
        return rest[0]
    pickled, summary, text = rest
    error: BaseException = RuntimeError(summary) if pickled is None else pickle.loads(pickled)
    error.add_note(f"raised on rank {rank} of {size} processes:\n{text}")
    return _RankFailure(error, 2 if isinstance(error, PeerLost) else 0)
