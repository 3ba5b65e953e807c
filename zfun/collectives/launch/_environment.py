"""The variables through which a launcher tells each process its rank, and where the ranks meet.

The names are torchrun's. Where a launcher of MPI or Slurm's ``srun`` has started the process, they
are filled from the names of that launcher.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from zfun.collectives.backends._attempt import never_came, try_for
from zfun.collectives.backends._mpi import load_mpi, runs_over_mpi
from zfun.errors import OptionError, PeerLost


class _Names(NamedTuple):
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    # Open MPI, and what is built on it.
    _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH, Intel MPI, and what is built on them.
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # srun. SLURM_NTASKS is set in the batch script too, which is no rank.
    _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
_DEFAULT_PORT = 29500
# The first of the ports that a job gets by its number; below those that systems give to clients.
_FIRST_PORT, _NUM_PORTS = 20000, 10000


def launched() -> bool:
    """Return whether a launcher started this process, and fill torchrun's variables."""
    present = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(present) == 1:
        raise OptionError(
            f"a launcher sets RANK and WORLD_SIZE; got only {present[0]}; start the program with "
            "torchrun"
        )
    return bool(present) or _fill()


def _fill() -> bool:
    names = _names()
    if names is None:
        return False
    rank, size = number(names.rank), number(names.size)
    if size == 1:
        return False
    local_size = _local_size(os.environ.get(names.local_size, ""), size)
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": number(names.local_rank, rank % local_size),
        "LOCAL_WORLD_SIZE": local_size,
    }
    for name, value in found.items():
        os.environ.setdefault(name, str(value))
    if not {"MASTER_ADDR", "MASTER_PORT"} <= {*os.environ}:
        host, port = _meeting_place(rank, size, local_size)
        if host:
            os.environ.setdefault("MASTER_ADDR", host)
            os.environ.setdefault("MASTER_PORT", str(port))
    return True


def _names() -> _Names | None:
    """Return the names of the launcher that started this process."""
    found = [each for each in _LAUNCHERS if {*each[:2]} <= {*os.environ}]
    # Slurm sets the first two names of PMI beside all of its own.
    same = (
        each
        for each in found
        if {*each} <= {*os.environ} and all(map(_is_equal, each[:2], found[0][:2]))
    )
    return next(same, found[0] if found else None)


def _is_equal(one: str, other: str) -> bool:
    return os.environ[one] == os.environ[other]


def _local_size(text: str, size: int) -> int:
    """Return the number of ranks on this host. Slurm writes ``4(x2),3`` for 4, 4 and 3."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]
    host = number("SLURM_NODEID", 0) if len(counts) > 1 else 0
    return counts[host] if host < len(counts) else size


def _meeting_place(rank: int, size: int, local_size: int) -> tuple[str, int]:
    """Return host and port of rank 0; no host if nothing tells."""
    here = "127.0.0.1" if local_size == size else socket.gethostname()
    if runs_over_mpi(rank, size):
        place = (here, _free_port()) if rank == 0 else None
        host, port = load_mpi().COMM_WORLD.bcast(place)
        return host, port
    job = os.environ.get("SLURM_JOB_ID", os.environ.get("PMIX_NAMESPACE", ""))
    step = os.environ.get("SLURM_STEP_ID", "")
    port = _FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % _NUM_PORTS if job else _DEFAULT_PORT
    if local_size == size:
        return here, port
    # As in node[03-04,07] or node03,node04.
    first = re.match(r"([^,\[]+)(?:\[(\w+))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    return "".join(first.groups("")) if first else "", port


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def number(name: str, default: int | None = None) -> int:
    """Return a variable of the environment that a launcher sets to a number."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise OptionError(
            f"a launcher sets {name} to a number; got {text!r}; start the program with torchrun"
        )
    return int(text)


def launcher_store(rank: int, timeout_s: float, holder: int | None) -> dist.Store:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise OptionError(
            f"a launcher sets MASTER_ADDR, and MASTER_PORT to a number; got {host!r} and {port!r}; "
            "start the program with torchrun"
        )
    opened: list[dist.Store] = []

    def open_store() -> None:
        opened.append(
            dist.TCPStore(
                host,
                int(port),
                is_master=rank == holder,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        )

    if holder is not None and rank != holder:
        # A store in a stopped process never answers.
        if not try_for(timeout_s + 1.0, open_store):
            raise never_came([holder], rank, timeout_s)
        return opened[0]
    try:
        open_store()
    except RuntimeError as error:
        raise PeerLost(
            f"the ranks meet in a store at {host}:{port}; rank {rank} cannot use this address: "
            f"{error}; choose another MASTER_PORT",
            rank=rank,
        ) from error
    return opened[0]
