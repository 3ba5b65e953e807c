"""Groups of real processes, over torch.distributed."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zfun.collectives._debug import checked
from zfun.collectives._group import Group
from zfun.collectives._ops import Stream
from zfun.collectives.backends._base import ProcessGroup
from zfun.collectives.backends._local import single_group
from zfun.collectives.backends._nccl import NativeGroup
from zfun.collectives.gloo._group import ExchangeGroup, HostsGroup
from zfun.collectives.gloo._tuning import holding_little, interrupting_nobody
from zfun.collectives.shm._group import SharedGroup
from zfun.collectives.shm._memory import SharedMemory
from zfun.collectives.shm._rendezvous import exchange_texts, host_name, meet
from zfun.errors import OptionError, PeerLost, checked_options

__all__ = ["process_group"]


@checked_options
def process_group(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    axis: str | None = None,
    timeout_s: float = 120.0,
    shared_memory: bool | None = None,
    debug: bool = False,
) -> Group:
    """Return the ranks of a launcher such as torchrun as a group, or one rank without a launcher.

    A collective that does not complete raises :class:`~zfun.errors.PeerLost` within ``timeout_s``,
    with the error of the failed rank if that rank could still publish the error. The end of a
    ``with`` block, :meth:`Group.close` and the exit of the process release the connections.

    Over gloo and mpi every collective is a direct exchange with sums in rank order, bitwise equal
    to ``simulate``. Gloo ranks of one host use shared memory instead, with the same bits. On
    several hosts, with ranks numbered host by host and equally many on each, data moves through
    shared memory inside a host and through messages between hosts. Over nccl the collectives are
    native, with one communicator per stream, and sums are in nccl's order.

    Args:
        group: a torch process group or a mesh; None means all ranks, and initialises
            ``torch.distributed`` from the launcher's environment if necessary.
        axis: the axis of the mesh, needed if the mesh has several.
        timeout_s: how long a collective may take, in seconds.
        shared_memory: whether gloo ranks exchange data through shared memory. None: on each host
            where the ranks can (Linux on x86-64; the memory is anonymous, so the system frees the
            memory with the last process). True: raise if the ranks cannot. False: over gloo. All
            ranks pass the same value.
        debug: compare the ranks before every collective (see :func:`checked`).

    Returns:
        The group that this process belongs to.

    Raises:
        OptionError: the mesh has no such axis, this process is not in the group, the launcher's
            environment is incomplete, or ``shared_memory`` is True and the ranks cannot share any.

    Example:
        >>> process_group().size
        1
    """
    if group is None and axis is not None:
        raise OptionError(
            f"axis={axis!r} names an axis of a mesh; got no mesh; pass it as the first argument"
        )
    if isinstance(group, DeviceMesh):
        group = _mesh_axis(group, axis)
    started_here = False
    if group is None:
        if not dist.is_initialized():
            if not _launched():
                return single_group()
            _init_from_launcher(timeout_s)
            started_here = True
        group = dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0 or group is None:
        raise OptionError(
            "this process is not a rank of the given group; call process_group() on its ranks only"
        )
    size = dist.get_world_size(group)
    on_close = _shut_down_torch if started_here else None
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
    store = _own_store(group, rank)
    backends = dist.get_backend_config(group)
    if "nccl" not in backends and "gloo" in backends:
        return _made_over_gloo(store, rank, size, timeout_s, shared_memory, on_close)
    if shared_memory:
        raise _no_shared_memory(
            f"this is for gloo on the CPU, and the backend is {dist.get_backend(group)}"
        )
    return (NativeGroup if "nccl" in backends else ExchangeGroup)(
        group, store, rank, size, timeout_s, on_close
    )


def _made_over_gloo(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    shared_memory: bool | None,
    on_close: Callable[[], None] | None = None,
    numbers: Sequence[int] | None = None,
) -> ProcessGroup:
    memory = meet(store, rank, size, timeout_s, shared_memory)
    if shared_memory and isinstance(memory, str):
        raise _no_shared_memory(memory)
    # Gloo has a thread that wakes up a hundred times a second in the middle of the computation,
    # with or without messages.
    gloo = (
        _gloo(dist.PrefixStore("gloo", store), rank, size, timeout_s)
        if isinstance(memory, str)
        else None
    )
    settings = (gloo, store, rank, size, timeout_s, on_close, numbers)
    made: ProcessGroup
    if not isinstance(memory, str):
        made = SharedGroup(memory, *settings)
    elif (
        "on different hosts" in memory
        and (rows := _rows(dist.PrefixStore("rows", store), rank, size, timeout_s)) is not None
    ):
        made = HostsGroup(rows, *settings)
    else:
        made = ExchangeGroup(*settings)
    made.make_part = lambda store, rank, size, numbers: _made_over_gloo(
        store, rank, size, timeout_s, shared_memory, numbers=numbers
    )
    return made


def _gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
    """Make an unregistered instance of gloo with own connections, tags and timeout."""
    with interrupting_nobody(), holding_little():
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))


def _rows(
    store: dist.Store, rank: int, size: int, timeout_s: float
) -> dict[Stream, SharedMemory] | None:
    """Return the shared memories of this host's ranks, one per stream.

    Only if ranks are numbered host by host, equally many on each.
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
        stream: meet(
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


def _launched() -> bool:
    present = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(present) == 1:
        raise OptionError(
            f"a launcher sets RANK and WORLD_SIZE; got only {present[0]}; start the program with "
            "torchrun"
        )
    return bool(present)


def _init_from_launcher(timeout_s: float) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except ValueError as error:
        raise OptionError(
            f"the launcher's environment is incomplete: {error}; start the program with torchrun"
        ) from error
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeerLost(
            f"the ranks did not meet at {where} within {timeout_s} s, or the port is taken: "
            f"{error}; choose another MASTER_PORT",
            rank=int(os.environ["RANK"]),
        ) from error


def _shut_down_torch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_store(group: dist.ProcessGroup, rank: int) -> dist.Store:
    """Return a part of the torch group's store for the next zfun group over the torch group.

    Each rank counts alone, because all ranks make the groups in the same order.
    """
    store = group.get_group_store()
    return dist.PrefixStore(f"zfun/{store.add(f'zfun/count/{rank}', 1)}", store)
