"""Groups of real processes, over torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zfun.collectives._calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Call,
    Lane,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    check_call,
    describe,
)
from zfun.collectives._checked import checked
from zfun.collectives._exchange import Buffers, Started, start_exchange
from zfun.collectives._group import Group, own_part
from zfun.collectives._hosts import Place, goes_over_hosts, num_messages, over_hosts
from zfun.collectives._meeting import _exchange_texts, _host, meet
from zfun.collectives._monitor import Monitor, different
from zfun.collectives._pending import Pending
from zfun.collectives._shared import Disagreement, SharedMemory, TransportError
from zfun.collectives._single import single_group
from zfun.errors import OptionError, PeerLost, ZfunError, checked_options

__all__ = ["process_group"]

# torch 2.13 gives these two a new name and warns about the old one.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Gloo takes 31 bits of tag: the lane, the number of the transfer in its lane, and a checksum of what the ranks must agree on. A message
# whose tag nobody expects is never delivered, so that different collectives cannot read each other's data.
_SEQUENCE_BITS = 13
_CHECKSUM_BITS = 16
_INTERRUPT_TAG = 0x7FFFFFFF


@checked_options
def process_group(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    axis: str | None = None,
    timeout_s: float = 120.0,
    shared_memory: bool | None = None,
    debug: bool = False,
) -> Group:
    """Return the ranks of a launcher such as torchrun as a group; without a launcher, a group of one rank.

    A collective that does not come back raises :class:`~zfun.errors.PeerLost` within ``timeout_s``, with the error of the rank that
    failed if it could still publish it. Used as a context manager, or closed by :meth:`Group.close` or at exit, the group releases its
    connections.

    Over gloo and mpi every collective is a direct exchange whose sums are taken in rank order, bitwise those of ``simulate``. Gloo's ranks
    of one host read each other's memory instead, with the same bits; gloo is then only how they meet. On several hosts, with as many ranks
    on each, numbered host by host, they do so inside of each host, and messages go between hosts. Over nccl the collectives are native,
    one communicator per lane, and sums are in nccl's order.

    Args:
        group: a torch process group or a mesh; None means all ranks, and starts ``torch.distributed`` from the launcher's environment if
            nobody has done so.
        axis: the axis of the mesh, needed if it has several.
        timeout_s: how long a collective may take, in seconds.
        shared_memory: whether gloo's ranks exchange data through shared memory. None: on each host if they can (Linux on x86-64; the
            memory is anonymous and gone with the last process, whatever ends it). True: it is an error if they cannot. False:
            over gloo. All ranks pass the same.
        debug: compare what the ranks start before every collective (see :func:`checked`).

    Returns:
        The group that this process belongs to.

    Raises:
        OptionError: the mesh has no such axis, this process is not in the group, the launcher's environment is incomplete, or
            ``shared_memory`` is True and the ranks cannot share any.

    Example:
        >>> process_group().size
        1
    """
    if group is None and axis is not None:
        raise OptionError(f"axis={axis!r} names an axis of a mesh; got no mesh; pass it as the first argument")
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
        raise OptionError("this process is not a rank of the given group; call process_group() on its ranks only")
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
    group: dist.ProcessGroup, rank: int, size: int, timeout_s: float, shared_memory: bool | None, on_close: Callable[[], None] | None
) -> Group:
    store = _own_store(group, rank)
    backends = dist.get_backend_config(group)
    if "nccl" not in backends and "gloo" in backends:
        return _made_over_gloo(store, rank, size, timeout_s, shared_memory, on_close)
    if shared_memory:
        raise _no_shared_memory(f"this is for gloo on the CPU, and the backend is {dist.get_backend(group)}")
    return (_NativeGroup if "nccl" in backends else _ExchangeGroup)(group, store, rank, size, timeout_s, on_close)


def _made_over_gloo(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    shared_memory: bool | None,
    on_close: Callable[[], None] | None = None,
    numbers: Sequence[int] | None = None,
) -> _ProcessGroup:
    # An own instance has its own connections, tags and timeout, and is in nobody's registry.
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timedelta(seconds=timeout_s))
    memory = meet(store, rank, size, timeout_s, shared_memory)
    if shared_memory and isinstance(memory, str):
        raise _no_shared_memory(memory)
    settings = (gloo, store, rank, size, timeout_s, on_close, numbers)
    made: _ProcessGroup
    if not isinstance(memory, str):
        made = _SharedGroup(memory, *settings)
    elif "on different hosts" in memory and (rows := _rows(dist.PrefixStore("rows", store), rank, size, timeout_s)) is not None:
        made = _HostsGroup(rows, *settings)
    else:
        made = _ExchangeGroup(*settings)
    made._wants_shared_memory = shared_memory
    return made


def _rows(store: dist.Store, rank: int, size: int, timeout_s: float) -> dict[Lane, SharedMemory] | None:
    """Return what the ranks of this host share, one memory for each lane, if all ranks stand host by host, as many on each."""
    hosts = _exchange_texts(store, "host", rank, size, timeout_s, _host())
    per_host = hosts.count(hosts[0])
    rows = [hosts[first : first + per_host] for first in range(0, size, per_host)]
    if not hosts[0] or per_host in (1, size) or len(set(hosts)) < len(rows) or any(len(set(row)) > 1 for row in rows):
        return None
    place = dist.PrefixStore(f"{rank // per_host}", store)
    memories = {lane: meet(dist.PrefixStore(lane.name, place), rank % per_host, per_host, timeout_s, None) for lane in Lane}
    found = {lane: memory for lane, memory in memories.items() if isinstance(memory, SharedMemory)}
    if all(_exchange_texts(store, "met", rank, size, timeout_s, "yes" if len(found) == len(Lane) else "")):
        return found
    for memory in found.values():
        memory.close()
    return None


def _no_shared_memory(reason: str) -> OptionError:
    return OptionError(f"shared_memory=True needs ranks that can share memory; {reason}; pass None to use it only where it works")


def _mesh_axis(mesh: DeviceMesh, axis: str | None) -> dist.ProcessGroup:
    names = mesh.mesh_dim_names or ()
    if axis is None and mesh.ndim > 1:
        raise OptionError(f"a mesh of {mesh.ndim} axes needs axis=; it has {', '.join(names) or 'no named axes'}")
    if axis is not None and axis not in names:
        raise OptionError(f"the mesh has no axis {axis!r}; it has {', '.join(names) or 'no named axes'}")
    return mesh.get_group(axis)


def _launched() -> bool:
    present = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(present) == 1:
        raise OptionError(f"a launcher sets RANK and WORLD_SIZE; got only {present[0]}; start the program with torchrun")
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
        raise OptionError(f"the launcher's environment is incomplete: {error}; start the program with torchrun") from error
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise PeerLost(
            f"the ranks did not meet at {where} within {timeout_s} s, or the port is taken: {error}; choose another MASTER_PORT",
            rank=int(os.environ["RANK"]),
        ) from error


def _shut_down_torch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_store(group: dist.ProcessGroup, rank: int) -> dist.Store:
    """Return a part of the group's store for the next of its zfun groups. Each rank counts for itself; all make them in the same order."""
    store = group.get_group_store()
    return dist.PrefixStore(f"zfun/{store.add(f'zfun/count/{rank}', 1)}", store)


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> Any: ...


@final
class _Messages:
    """The messages of one exchange with all ranks, under way."""

    __slots__ = ("_receives", "_sends", "_tensors", "_timeout_s")

    def __init__(self, sends: list[tuple[int, _Work]], receives: list[tuple[int, _Work]], tensors: object, timeout_s: float) -> None:
        self._sends = sends
        self._receives = receives
        self._tensors = tensors
        self._timeout_s = timeout_s

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        for peer, work in (*self._receives, *self._sends):
            # Gloo takes 0 for "for ever".
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                # Gloo counts whole milliseconds, and so may give up just before this clock says that the time is over.
                silent = time.monotonic() >= deadline - 0.01
                raise TransportError(peer, f"no answer within {self._timeout_s:g} s" if silent else _first_line(error)) from error
        self._sends.clear()
        self._receives.clear()
        self._tensors = None


def _first_line(error: BaseException) -> str:
    """The sentence of gloo's message that says what happened, without the place in its source."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition("] ")[2].partition(". ")[0] if text.startswith("[") else text.partition(". ")[0]


_Job: TypeAlias = "tuple[Callable[[], None], Future[None]] | None"


@final
class _LaneThread:
    """Runs the later phases of a lane's collectives in their order, since nobody may have to wait for the caller to ask for them."""

    def __init__(self, lane: Lane) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"zfun {lane.name.lower()}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                job()
            except BaseException as error:  # noqa: BLE001, it is raised where the result is waited for
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, job, future


class _ProcessGroup(Group):
    """What the kinds of process groups share: the monitor, sub-groups, the end, and the translation of errors."""

    _wants_shared_memory: bool | None = False

    def __init__(
        self,
        torch_group: Any,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        on_close: Callable[[], None] | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._torch_group = torch_group
        self._store = store
        self._timeout_s = timeout_s
        self._on_close = on_close
        self._numbers = range(size) if numbers is None else numbers
        self._subgroups: list[_ProcessGroup] = []
        self._num_subgroups = 0
        # Messages name ranks as people know them.
        self._monitor = Monitor(store, self._numbers[rank], self._numbers, self._interrupt)
        self._failure: ZfunError | None = None
        self._closed = False
        self._previous_hook = sys.excepthook
        self._hook = self._on_uncaught
        sys.excepthook = self._hook
        atexit.register(self.close)

    @property
    def numbers(self) -> Sequence[int]:
        return self._numbers

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        self._check_open()
        ranks = own_part(self, parts)
        self._num_subgroups += 1
        made = self._part(dist.PrefixStore(f"subgroup/{self._num_subgroups}/{ranks[0]}", self._store), ranks)
        if made is None:
            return single_group()
        self._subgroups.append(made)
        return made

    def _part(self, store: dist.Store, ranks: Sequence[int]) -> _ProcessGroup | None:
        """Make the group of some of the ranks; ``None`` for one rank that needs none."""
        if len(ranks) == 1:
            return None
        numbers = [self._numbers[rank] for rank in ranks]
        place = ranks.index(self.rank)
        return _made_over_gloo(store, place, len(ranks), self._timeout_s, self._wants_shared_memory, numbers=numbers)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for group in reversed(self._subgroups):
            group.close()
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        atexit.unregister(self.close)
        self._monitor.close()
        self._release()
        self._torch_group = None
        if self._on_close is not None:
            self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._publish_error(error)
        self.close()

    def _publish_error(self, error: BaseException) -> None:
        for group in (*self._subgroups, self):
            group._monitor.publish_error(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.strip('_')}: rank {self.rank} of {self.size}>"

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._monitor.publish_error(error)
        self._previous_hook(kind, error, trace)

    def _interrupt(self) -> None:
        """Wake up every wait of this rank."""

    def _release(self) -> None:
        """Let go of what the kind of group holds."""

    def _number_of(self, peer: int | None) -> int | None:
        return None if peer is None else self._numbers[peer]

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError("a closed group starts no collectives; make a new one with process_group()")
        if self._failure is not None:
            failure = type(self._failure)(str(self._failure), rank=self._failure.rank, collective=self._failure.collective)
            raise failure from self._failure

    @contextlib.contextmanager
    def _explained(self, text: str, index: int) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            if self._failure is None:
                self._failure = self._monitor.explain(self._number_of(error.peer), str(error), f"collective {index} of its lane ({text})")
            raise self._failure from error
        except Disagreement as error:
            if self._failure is None:
                verdict = different(index, (self._numbers[self.rank], text), (self._numbers[error.peer], error.text))
                self._failure = self._monitor.conclude(verdict, f"collective {index} of its lane ({text})")
            raise self._failure from error
        finally:
            # What else is waited for cannot come either.
            if self._failure is not None:
                self._give_up()

    def _give_up(self) -> None:
        """Let every other wait of this rank end."""


class _ExchangeGroup(_ProcessGroup):
    """Processes that exchange messages directly. See [Note: collectives by direct exchange]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._transfers = [0] * len(Lane)
        self._lane_threads: dict[Lane, _LaneThread] = {}
        self._buffers = Buffers()
        # A message whose handle is dropped is never sent, so that the group itself holds what is under way.
        self._under_way: dict[tuple[Lane, int], Started] = {}

    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        check_call(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(f"a gloo or mpi group moves CPU tensors only; {call.op.kind} got one on {x.device}; use nccl")
        self._check_open()
        x = x.detach()
        result = x.new_empty(call.op.output_numel(x.numel(), self.size)) if out is None else out
        text = describe(call, x.numel(), x.dtype)
        index = self._monitor.note_start(call.lane, text)
        with torch.no_grad(), self._explained(text, index):
            finish = self._begin(call, text, index, x, result.detach())

        def wait() -> Tensor:
            try:
                with torch.no_grad(), self._explained(text, index), self._monitor.waiting(call.lane, index):
                    finish()
            finally:
                self._under_way.pop((call.lane, index), None)
            return result

        return Pending(wait)

    def _begin(self, call: Call, text: str, index: int, x: Tensor, out: Tensor) -> Callable[[], None]:
        """Start a collective; return what ends it."""
        exchange = self._exchange(call.lane, text, 2 if isinstance(call.op, AllReduce) else 1)
        started = start_exchange(call.op, x, out, self.rank, self.size, exchange, self._buffers)
        self._under_way[call.lane, index] = started
        return self._background(call.lane, started.finish) if started.in_background else started.finish

    def _background(self, lane: Lane, job: Callable[[], None]) -> Callable[[], None]:
        if lane not in self._lane_threads:
            self._lane_threads[lane] = _LaneThread(lane)
        # Inference and grad mode belong to threads.
        return self._lane_threads[lane].submit(torch.no_grad()(job)).result

    def _tags(self, lane: Lane, text: str, transfers: int) -> list[int]:
        first = self._transfers[lane]
        self._transfers[lane] += transfers
        return [_tag(lane, first + i, text) for i in range(transfers)]

    def _part(self, store: dist.Store, ranks: Sequence[int]) -> _ProcessGroup | None:
        if not isinstance(self._torch_group, dist.ProcessGroupGloo):
            raise OptionError("a group over mpi cannot be divided; make torch groups of its parts and put them together with zf.Mesh()")
        return super()._part(store, ranks)

    def _exchange(self, lane: Lane, text: str, transfers: int) -> Callable[..., _Messages]:
        """Return the exchange of one collective. Its tags are taken now, since a later phase may start after a later collective."""
        tags = iter(self._tags(lane, text, transfers))

        def exchange(sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None]) -> _Messages:
            tag = next(tags)
            kept = (list(sends), list(recvs))
            receives: list[tuple[int, _Work]] = []
            outgoing: list[tuple[int, _Work]] = []
            # Neighbours first, each rank its own, so that not all of them talk to rank 0 at once.
            for step in range(1, self.size):
                source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
                peer = source
                try:
                    if (tensor := recvs[source]) is not None and tensor.numel():
                        receives.append((source, self._torch_group.recv([tensor], source, tag)))
                    peer = target
                    if (tensor := sends[target]) is not None and tensor.numel():
                        outgoing.append((target, self._torch_group.send([tensor], target, tag)))
                except RuntimeError as error:
                    raise TransportError(peer, _first_line(error)) from error
            return _Messages(outgoing, receives, kept, self._timeout_s)

        return exchange

    def _interrupt(self) -> None:
        # Nothing ends a wait of gloo but an error of its connections, and a receive that runs out of time breaks all of them.
        peer = (self.rank + 1) % self.size
        with contextlib.suppress(RuntimeError):
            self._torch_group.recv([torch.empty(1)], peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))

    def _release(self) -> None:
        for thread in self._lane_threads.values():
            thread.close()
        self._under_way.clear()


@final
class _HostsGroup(_ExchangeGroup):
    """Processes of several hosts, which read each other's memory inside of one. See [Note: collectives over hosts]."""

    def __init__(self, rows: dict[Lane, SharedMemory], *settings: Any) -> None:
        super().__init__(*settings)
        self._rows = rows
        row = rows[Lane.PARAMS]
        self._place = Place(self.rank // row.size, self.size // row.size, row.rank, row.size)

    def _begin(self, call: Call, text: str, index: int, x: Tensor, out: Tensor) -> Callable[[], None]:
        if not goes_over_hosts(call.op, x):
            return super()._begin(call, text, index, x, out)
        column = _Column(self._torch_group, self._place, self._tags(call.lane, text, num_messages(self._place)), self._timeout_s)
        row = functools.partial(self._in_row, call, text)
        # A collective has several phases, and the memory of a lane belongs to its thread.
        return self._background(call.lane, lambda: over_hosts(call.op, x, out, self._place, row, column))

    def _in_row(self, call: Call, text: str, op: Op, x: Tensor, out: Tensor) -> None:
        memory = self._rows[call.lane]
        first = self._place.host * self._place.size
        try:
            memory.finish(memory.send(Call(op, call.name, call.part, call.lane), text, x, out))
        except TransportError as error:
            raise TransportError(None if error.peer is None else first + error.peer, str(error)) from error
        except Disagreement as error:
            raise Disagreement(first + error.peer, error.text) from error

    def _give_up(self) -> None:
        for memory in self._rows.values():
            memory.interrupted = True

    def _interrupt(self) -> None:
        self._give_up()
        super()._interrupt()

    def _release(self) -> None:
        self._give_up()
        super()._release()
        for memory in self._rows.values():
            memory.close()


@final
class _Column:
    """Messages to the ranks with this rank's place on other hosts."""

    def __init__(self, torch_group: Any, place: Place, tags: Sequence[int], timeout_s: float) -> None:
        self._torch_group = torch_group
        self._place = place
        self._tags = tags
        self._timeout_s = timeout_s

    def send(self, host: int, tensor: Tensor, number: int) -> _Messages:
        peer = host * self._place.size + self._place.rank
        with _transport_errors(peer):
            return _Messages([(peer, self._torch_group.send([tensor], peer, self._tags[number]))], [], tensor, self._timeout_s)

    def receive(self, host: int, tensor: Tensor, number: int) -> _Messages:
        peer = host * self._place.size + self._place.rank
        with _transport_errors(peer):
            return _Messages([], [(peer, self._torch_group.recv([tensor], peer, self._tags[number]))], tensor, self._timeout_s)


@contextlib.contextmanager
def _transport_errors(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransportError(peer, _first_line(error)) from error


@final
class _SharedGroup(_ProcessGroup):
    """Processes of one host that read each other's memory. See [Note: collectives through shared memory]."""

    def __init__(self, memory: SharedMemory, *args: Any) -> None:
        super().__init__(*args)
        self._memory = memory
        memory.watch = self._monitor.waiting

    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        check_call(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(f"a gloo group moves CPU tensors only; {call.op.kind} got one on {x.device}; use nccl")
        self._check_open()
        x = x.detach()
        borrowed = call.borrow and out is None and self._memory.can_borrow(call.op, x)
        result = x.new_empty(call.op.output_numel(x.numel(), self.size)) if out is None and not borrowed else out
        text = describe(call, x.numel(), x.dtype)
        with torch.no_grad():
            sent = self._memory.send(call, text, x, None if result is None else result.detach())
        self._monitor.note_start(call.lane, text)

        def wait() -> Tensor:
            with torch.no_grad(), self._explained(text, sent.index):
                found = self._memory.finish(sent)
            return found if result is None else result

        return Pending(wait)

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        shared = self._memory.buffer(numel, dtype) if torch.device(device).type == "cpu" and not self._closed else None
        return super().buffer(numel, dtype, device) if shared is None else shared

    def await_readers(self, x: Tensor) -> None:
        self._check_open()
        for use in self._memory.give_up(x):
            with self._explained(use.text, use.index):
                self._memory.await_readers(use)

    def _give_up(self) -> None:
        self._memory.interrupted = True

    def _interrupt(self) -> None:
        self._memory.interrupted = True

    def _release(self) -> None:
        self._memory.close()


@functools.lru_cache(maxsize=4096)
def _checksum(text: str) -> int:
    return zlib.crc32(text.encode()) & ((1 << _CHECKSUM_BITS) - 1)


def _tag(lane: Lane, sequence: int, text: str) -> int:
    number = sequence & ((1 << _SEQUENCE_BITS) - 1)
    return (lane << _SEQUENCE_BITS | number) << _CHECKSUM_BITS | _checksum(text)


@final
class _NativeGroup(_ProcessGroup):
    """Processes whose backend does the collectives, one communicator per lane."""

    def __init__(self, *args: Any, ranks: Sequence[int] | None = None) -> None:
        super().__init__(*args)
        # In the numbers of torch's world.
        self._ranks = dist.get_process_group_ranks(self._torch_group) if ranks is None else ranks
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        # Among members only, torch names a group by how many groups a rank is in, so that ranks in other numbers of groups never meet.
        local = self.size < dist.get_world_size()
        timeout = timedelta(seconds=self._timeout_s)
        self._lanes: dict[Lane, Any] = {}
        for lane in Lane:
            self._lanes[lane] = dist.new_group(list(self._ranks), timeout=timeout, use_local_synchronization=local)

    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        check_call(call, x, out, self.size)
        self._check_open()
        # What steers the training may live on the CPU; it travels by way of the device.
        sent = x.detach().to(self._device)
        numel = call.op.output_numel(x.numel(), self.size)
        received = out.detach() if out is not None and out.device == self._device else sent.new_empty(numel)
        text = describe(call, x.numel(), x.dtype)
        index = self._monitor.note_start(call.lane, text)
        with torch.no_grad(), self._explained(text, index), _runtime_errors():
            works = self._issue(call, sent, received)

        def wait() -> Tensor:
            with torch.no_grad(), self._explained(text, index), self._monitor.waiting(call.lane, index), _runtime_errors():
                for work in works:
                    work.wait()
                if isinstance(call.op, Reduce) and call.op.root != self.rank:
                    received.zero_()
                if out is not None:
                    return out if out.device == received.device else out.copy_(received)
                # The handle holds what was sent until here: the stream of the collective has been waited for.
                return received if sent.device == x.device else received.to(x.device)

        return Pending(wait)

    def _part(self, store: dist.Store, ranks: Sequence[int]) -> _ProcessGroup:
        # One rank has communicators too: torch names them by how many a rank has, and so all must have as many.
        numbers = [self._numbers[rank] for rank in ranks]
        settings = (self._torch_group, store, ranks.index(self.rank), len(ranks), self._timeout_s, None, numbers)
        return _NativeGroup(*settings, ranks=[self._ranks[rank] for rank in ranks])

    def _issue(self, call: Call, x: Tensor, out: Tensor) -> list[Any]:
        lane = self._lanes[call.lane]
        match call.op:
            case AllGather():
                return [_all_gather_into(out, x, group=lane, async_op=True)]
            case ReduceScatter():
                return [_reduce_scatter_into(out, x, group=lane, async_op=True)]
            case AllToAll():
                return [dist.all_to_all_single(out, x, group=lane, async_op=True)]
            case AllReduce():
                return [dist.all_reduce(out.copy_(x), group=lane, async_op=True)]
            case Broadcast(root):
                return [dist.broadcast(out.copy_(x), group=lane, group_src=root, async_op=True)]
            case Reduce(root):
                return [dist.reduce(out.copy_(x), group=lane, group_dst=root, async_op=True)]
            case Permute(destinations) if destinations[self.rank] == self.rank:
                out.copy_(x)
                return []
            case Permute(destinations):
                messages = [
                    dist.P2POp(dist.isend, x, group=lane, group_peer=destinations[self.rank]),
                    dist.P2POp(dist.irecv, out, group=lane, group_peer=call.op.sources[self.rank]),
                ]
                return dist.batch_isend_irecv(messages)

    def _release(self) -> None:
        for group in self._lanes.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)


@contextlib.contextmanager
def _runtime_errors() -> Iterator[None]:
    try:
        yield
    except ZfunError:
        raise
    except RuntimeError as error:
        raise TransportError(None, _first_line(error)) from error
