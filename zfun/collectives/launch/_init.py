"""Groups of real processes, over torch.distributed."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zfun.collectives._debug import checked
from zfun.collectives._group import Group
from zfun.collectives._ops import Stream
from zfun.collectives.backends._attempt import attempt_store, holder_of_store
from zfun.collectives.backends._base import ProcessGroup, keep_until_exit
from zfun.collectives.backends._local import single_group
from zfun.collectives.backends._mpi import MpiMessages, runs_over_mpi
from zfun.collectives.backends._nccl import NativeGroup, errors_left_to_zfun, torch_timeout
from zfun.collectives.gloo._group import ExchangeGroup, HostsGroup
from zfun.collectives.gloo._tuning import batch_scheduling, short_send_buffers
from zfun.collectives.launch._environment import launched, launcher_store, number
from zfun.collectives.launch._together import make_together
from zfun.collectives.shm._group import SharedGroup
from zfun.collectives.shm._memory import SharedMemory
from zfun.collectives.shm._rendezvous import exchange_texts, host_name, rendezvous
from zfun.errors import OptionError
from zfun.options import SECONDS, Kind, takes

_Hook: TypeAlias = Callable[..., Any]
# Connects the ranks of a group: the store, this rank, the numbers of all ranks, the timeout.
_Connect: TypeAlias = Callable[[dist.Store, int, Sequence[int], float], Any]


def _is_torch_group(x: object) -> bool:
    # torch gives an integer to a process that is not a rank of the group.
    outside = dist.GroupMember.NON_GROUP_MEMBER
    return isinstance(x, (dist.ProcessGroup, DeviceMesh)) or (type(x) is int and x == outside)


@takes(
    group=Kind(
        _is_torch_group,
        ("a torch process group, a DeviceMesh",),
        "torch.distributed.group.WORLD",
    )
    | None,
    timeout_s=SECONDS,
)
def process_group(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    axis: str | None = None,
    timeout_s: float = 120.0,
    shared_memory: bool | None = None,
    debug: bool = False,
) -> Group:
    """Return the ranks of a launcher as a group, or one rank without a launcher.

    Launchers are torchrun, those of MPI such as ``mpirun``, and Slurm's ``srun``.

    A collective that does not complete raises :class:`~zfun.errors.PeerLost` within ``timeout_s``,
    with the error of the failed rank if that rank could still publish the error. The end of a
    ``with`` block, :meth:`Group.close` and the exit of the process release the connections.

    Over gloo and MPI every collective is a direct exchange with sums in rank order, bitwise equal
    to ``simulate``. MPI takes the place of gloo where a launcher of MPI starts the ranks and
    ``mpi4py`` is installed (the extra ``mpi``). CPU ranks of one host use shared memory instead,
    with the same bits. On several hosts, with ranks numbered host by host and equally many on each,
    data moves through shared memory inside a host and through messages between hosts. Over nccl the
    collectives are native, with one communicator per stream, and sums are in nccl's order.

    Args:
        group: a torch process group or a mesh; None means all ranks, and initialises
            ``torch.distributed`` from the launcher's environment if necessary, except over MPI.
        axis: the axis of the mesh, needed if the mesh has several.
        timeout_s: how long a collective may take, in seconds.
        shared_memory: whether CPU ranks exchange data through shared memory. None: on each host
            where the ranks can (Linux on x86-64; the memory is anonymous, so the system frees the
            memory with the last process). True: raise if the ranks cannot. False: by messages. All
            ranks pass the same value.
        debug: compare the ranks before every collective (see :func:`checked`).

    Returns:
        The group that this process belongs to.

    Raises:
        OptionError: the mesh has no such axis, ``axis`` comes without a mesh, this process is not
            in the group, the launcher's environment is incomplete, or ``shared_memory`` is True and
            the ranks cannot share any.

    Example:
        >>> process_group().size
        1
    """
    if isinstance(group, DeviceMesh):
        group = _mesh_axis(group, axis)
    elif axis is not None:
        given = "no mesh" if group is None else "a torch process group, which has no axes"
        raise OptionError(
            f"axis={axis!r} names an axis of a mesh; got {given}; pass the mesh as the first "
            "argument, or leave axis out"
        )
    on_close: Callable[[], None] | None = None
    if group is None:
        if not dist.is_initialized():
            if not launched():
                return single_group()
            size = number("WORLD_SIZE")
            if size > 1 and not _has_devices(size) and runs_over_mpi(number("RANK"), size):
                made = _over_mpi(timeout_s, shared_memory)
                return checked(made) if debug else made
            on_close = _init_from_launcher(timeout_s)
        group = dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0 or group is None:
        raise OptionError(
            "this process is not a rank of the given group; call process_group() on its ranks only"
        )
    size = dist.get_world_size(group)
    if size == 1:
        made: Group = single_group()
        if on_close is not None:
            atexit.register(on_close)
        return made
    try:
        made = _made(group, rank, size, timeout_s, shared_memory, on_close)
    except OptionError:
        if on_close is not None:
            on_close()
        raise
    return checked(made) if debug else made


def _made(
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    timeout_s: float,
    shared_memory: bool | None,
    on_close: Callable[[], None] | None,
) -> Group:
    holder = holder_of_store(dist.get_process_group_ranks(group))
    # Ranks that have ended may have left keys in the store.
    store = attempt_store(group.get_group_store(), rank, size, timeout_s)
    backends = dist.get_backend_config(group)
    if "nccl" not in backends and "gloo" in backends:
        return _made_over_messages(
            _gloo, store, rank, range(size), timeout_s, shared_memory, on_close, holder
        )
    if shared_memory:
        raise _no_shared_memory(
            f"this is for gloo on the CPU, and the backend is {dist.get_backend(group)}"
        )
    return (NativeGroup if "nccl" in backends else ExchangeGroup)(
        group, store, rank, size, timeout_s, on_close, None, holder
    )


def _made_over_messages(
    connect: _Connect,
    store: dist.Store,
    rank: int,
    numbers: Sequence[int],
    timeout_s: float,
    shared_memory: bool | None,
    on_close: Callable[[], None] | None,
    holder: int | None,
) -> ProcessGroup:
    size = len(numbers)
    messages = functools.partial(connect, dist.PrefixStore("gloo", store), rank, numbers, timeout_s)
    make = functools.partial(_transport, store, rank, size, timeout_s, shared_memory, messages)
    kind, *transport = make_together(store, rank, numbers, timeout_s, make, holder)
    made = kind(*transport, store, rank, size, timeout_s, on_close, numbers, holder)
    made.make_part = lambda store, rank, numbers: _made_over_messages(
        connect, store, rank, numbers, timeout_s, shared_memory, None, holder
    )
    return made


def _transport(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    shared_memory: bool | None,
    messages: Callable[[], Any],
) -> tuple[Any, ...]:
    """Return the kind of group that the ranks can have, and the connections of this rank."""
    memory = rendezvous(store, rank, size, timeout_s, shared_memory)
    if shared_memory and isinstance(memory, str):
        raise _no_shared_memory(memory)
    # Gloo has a thread that wakes up a hundred times a second in the middle of the computation,
    # with or without messages.
    connections = messages() if isinstance(memory, str) else None
    if not isinstance(memory, str):
        return SharedGroup, memory, None
    if (
        "on different hosts" in memory
        and (rows := _rows(dist.PrefixStore("rows", store), rank, size, timeout_s)) is not None
    ):
        return HostsGroup, rows, connections
    return ExchangeGroup, connections


def _gloo(store: dist.Store, rank: int, numbers: Sequence[int], timeout_s: float) -> Any:
    """Make an unregistered instance of gloo with own connections, tags and timeout."""
    with batch_scheduling(), short_send_buffers():
        return dist.ProcessGroupGloo(store, rank, len(numbers), timedelta(seconds=timeout_s))


def _mpi(store: dist.Store, rank: int, numbers: Sequence[int], timeout_s: float) -> Any:
    return MpiMessages(numbers)


def _rows(
    store: dist.Store, rank: int, size: int, timeout_s: float
) -> dict[Stream, SharedMemory] | None:
    """Return the shared memories of this host's ranks, one per stream.

    Return None if a host cannot share memory, or if the ranks are not numbered host by host with
    equally many ranks on each.
    """
    hosts = exchange_texts(store, "host", rank, size, timeout_s, host_name())
    per_host = hosts.count(hosts[0])
    rows = [hosts[first : first + per_host] for first in range(0, size, per_host)]
    if (
        not hosts[0]
        or per_host in (1, size)
        or len(set(hosts)) < len(rows)
        or any(len(set(row)) > 1 for row in rows)
    ):
        return None
    place = dist.PrefixStore(f"{rank // per_host}", store)
    memories = {
        stream: rendezvous(
            dist.PrefixStore(stream.name, place), rank % per_host, per_host, timeout_s, None
        )
        for stream in Stream
    }
    found = {
        stream: memory for stream, memory in memories.items() if isinstance(memory, SharedMemory)
    }
    if all(
        exchange_texts(
            store, "met", rank, size, timeout_s, "yes" if len(found) == len(Stream) else ""
        )
    ):
        return found
    for memory in found.values():
        memory.close()
    return None


def _no_shared_memory(reason: str) -> OptionError:
    return OptionError(
        f"shared_memory=True needs ranks that can share memory; {reason}; pass None to use it "
        "only where it works"
    )


def _mesh_axis(mesh: DeviceMesh, axis: str | None) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if axis is None and mesh.ndim > 1:
        raise OptionError(
            f"a mesh of {mesh.ndim} axes needs axis=; it has {', '.join(names) or 'no named axes'}"
        )
    if axis is not None and axis not in names:
        raise OptionError(
            f"the mesh has no axis {axis!r}; it has {', '.join(names) or 'no named axes'}"
        )
    return mesh.get_group(axis)


def _met(timeout_s: float) -> tuple[int, int, int | None, dist.Store]:
    """Return rank, size, the rank that holds the store, and the store, when all ranks are there."""
    rank, size = number("RANK"), number("WORLD_SIZE")
    if rank >= size:
        raise OptionError(
            f"RANK must be less than WORLD_SIZE; got {rank} and {size}; start the program with "
            "torchrun"
        )
    holder = holder_of_store(range(size))
    store = launcher_store(rank, timeout_s, holder)
    return rank, size, holder, attempt_store(store, rank, size, timeout_s)


def _has_devices(size: int) -> bool:
    """Whether each rank of this host has a GPU."""
    local_ranks = number("LOCAL_WORLD_SIZE", size)
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks


def _over_mpi(timeout_s: float, shared_memory: bool | None) -> Group:
    rank, size, holder, store = _met(timeout_s)
    return _made_over_messages(
        _mpi, store, rank, range(size), timeout_s, shared_memory, None, holder
    )


def _init_from_launcher(timeout_s: float) -> Callable[[], None]:
    """Initialise ``torch.distributed``; return the function that takes that back."""
    before = sys.excepthook
    rank, size, holder, store = _met(timeout_s)
    start = functools.partial(dist.init_process_group, store=store, rank=rank, world_size=size)
    if _has_devices(size):
        device = torch.device("cuda", number("LOCAL_RANK", rank))
        torch.cuda.set_device(device)
        with errors_left_to_zfun():
            start("nccl", timeout=torch_timeout(timeout_s), device_id=device)
    else:
        begin = functools.partial(start, "gloo", timeout=timedelta(seconds=timeout_s))
        make_together(store, rank, range(size), timeout_s, begin, holder)
    return functools.partial(_shut_down_torch, os.getpid(), before, sys.excepthook)


def _shut_down_torch(process: int, before: _Hook, hook: _Hook) -> None:
    if process != os.getpid():
        # See [Note: forks].
        keep_until_exit(dist.group.WORLD)
    elif dist.is_initialized():
        dist.destroy_process_group()
        # Torch leaves the hook that prints the number of the rank.
        if sys.excepthook is hook:
            sys.excepthook = before
