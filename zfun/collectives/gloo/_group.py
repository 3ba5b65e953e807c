"""Groups of processes that exchange messages directly, over gloo or mpi."""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from zfun.collectives._group import Allocate
from zfun.collectives._ops import Collective, Op, Stream, check_collective, describe
from zfun.collectives._ranges import with_ranges
from zfun.collectives._work import Work
from zfun.collectives.backends import _base
from zfun.collectives.gloo._algorithms import Started, num_transfers, start_exchange
from zfun.collectives.gloo._buffer_pool import BufferPool
from zfun.collectives.gloo._hierarchical import HostPlace, goes_over_hosts, num_messages, over_hosts
from zfun.collectives.gloo._tuning import batch_scheduling
from zfun.collectives.shm._memory import SharedMemory
from zfun.errors import OptionError

# Gloo takes 31 bits of tag: the stream, the number of the transfer in the stream, and a checksum of
# the text that the ranks must agree on. Gloo never delivers a message with an unexpected tag, so
# different collectives cannot receive each other's data.
_SEQUENCE_BITS = 13
_CHECKSUM_BITS = 16

# Shorter inputs take less time than waking up another thread.
_SHORT_BYTES = 1 << 16


class _Background(Protocol):
    def wait(self, timeout: timedelta) -> Any: ...


@final
class _Messages:
    """The messages of one exchange with all ranks, under way."""

    __slots__ = ("_tensors", "_timeout_s", "_works")

    def __init__(
        self, works: list[tuple[int, _Background]], tensors: object, timeout_s: float
    ) -> None:
        self._works, self._tensors, self._timeout_s = works, tensors, timeout_s

    def wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        for peer, work in self._works:
            # Gloo reads 0 as "no timeout".
            left = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                # Gloo counts whole milliseconds, and so may give up just before this clock reaches
                # the timeout.
                silent = time.monotonic() >= deadline - 0.01
                raise _base.TransportError(
                    peer,
                    f"no answer within {self._timeout_s:g} s"
                    if silent
                    else _base.first_line(error),
                ) from error
        self._works.clear()
        self._tensors = None


# Starts a collective and returns an iterator over the remaining phases.
_Job: TypeAlias = Callable[[], Iterator[None]]


@final
class _StreamThread:
    """Runs the phases of a stream's collectives, so that no rank depends on a caller's ``wait``.

    The thread starts each collective as soon as possible, between the phases of earlier
    collectives, and completes all in order. The caller's computation does not stop, although
    sending a message may have to wait until gloo has read another one.
    """

    def __init__(self, stream: Stream) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Job, Future[None]] | None] = queue.SimpleQueue()
        self._unsettled: set[Future[None]] = set()
        self._thread = threading.Thread(
            target=self._run, name=f"zfun {stream.name.lower()}", daemon=True
        )
        self._thread.start()

    def submit(self, job: _Job) -> Future[None]:
        future: Future[None] = Future()
        self._unsettled.add(future)
        future.add_done_callback(self._unsettled.discard)
        self._jobs.put((job, future))
        return future

    def interrupt(self) -> None:
        """End every wait of a caller; this thread may wait on."""
        for future in list(self._unsettled):
            _settle(future, _base.TransportError(None, "the group is broken"))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)

    # Inference mode and grad mode are per thread. In inference mode the thread may write tensors of
    # either kind.
    @torch.inference_mode()
    @batch_scheduling()
    def _run(self) -> None:
        under_way: collections.deque[tuple[Iterator[None], Future[None]]] = collections.deque()
        while self._start_jobs(under_way):
            steps, future = under_way[0]
            try:
                next(steps)
            except StopIteration:
                under_way.popleft()
                _settle(future)
            except BaseException as error:  # noqa: BLE001, it is raised where the result is waited for
                under_way.popleft()
                _settle(future, error)
            del steps, future

    def _start_jobs(
        self, under_way: collections.deque[tuple[Iterator[None], Future[None]]]
    ) -> bool:
        """Start the submitted collectives; wait for one if none is under way.

        Return whether to go on.
        """
        while not under_way or not self._jobs.empty():
            item = self._jobs.get()
            if item is None:
                return False
            job, future = item
            try:
                under_way.append((job(), future))
            except BaseException as error:  # noqa: BLE001, as above
                _settle(future, error)
            del item, job, future
        return True


def _settle(future: Future[None], error: BaseException | None = None) -> None:
    # The watchdog may have interrupted the caller.
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class ExchangeGroup(_base.ProcessGroup):
    """Processes that exchange messages directly. See [Note: collectives by direct exchange]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._transfers = [0] * len(Stream)
        self._stream_threads: dict[Stream, _StreamThread] = {}
        self._buffer_pool = BufferPool()
        # Gloo never sends a message whose handle was dropped, so the group holds all handles of
        # messages under way.
        self._under_way: dict[tuple[Stream, int], Started] = {}

    @with_ranges
    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(
                f"a gloo or mpi group moves CPU tensors only; {call.op.kind} got one on "
                f"{x.device}; use nccl"
            )
        # Messages are raw memory, which a lazy conjugate or negative shares with the original.
        x = x.detach().resolve_conj().resolve_neg()
        self._check_open()
        result = out
        if result is None:
            result = self._buffer_pool.take(call.op.output_numel(x.numel(), self.size), x.dtype)
        text = describe(call, x.numel(), x.dtype)
        index = self._watchdog.note_start(call.stream, lambda: text)
        with torch.no_grad(), self._explained(call, text, index):
            finish = self._begin(call, text, index, x, result.detach())

        def wait() -> Tensor:
            self._check_process()
            try:
                with (
                    torch.no_grad(),
                    self._explained(call, text, index),
                    self._watchdog.waiting(call.stream, index),
                ):
                    finish()
            finally:
                self._under_way.pop((call.stream, index), None)
            return result

        return Work(wait)

    @property
    def allocate(self) -> Allocate | None:
        return self._allocate

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._check_process()
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        # The first access to fresh pages costs as much as a sum.
        return self._buffer_pool.take(numel, dtype)

    def _begin(
        self, call: Collective, text: str, index: int, x: Tensor, out: Tensor
    ) -> Callable[[], None]:
        """Start a collective; return the function that completes the collective."""
        exchange = self._exchange(
            call.stream, text, num_transfers(call.op, x.numel(), x.dtype.itemsize, self.size)
        )
        begin = functools.partial(
            start_exchange, call, x, out, self.rank, self.size, exchange, self._buffer_pool
        )
        if max(x.numel(), out.numel()) * x.dtype.itemsize > _SHORT_BYTES:
            return self._background(call.stream, lambda: begin().steps())
        started = begin()
        self._under_way[call.stream, index] = started
        if started.in_background:
            return self._background(call.stream, started.steps)
        return started.finish

    def _background(self, stream: Stream, job: _Job) -> Callable[[], None]:
        if stream not in self._stream_threads:
            self._stream_threads[stream] = _StreamThread(stream)
        return self._stream_threads[stream].submit(job).result

    def _tags(self, stream: Stream, text: str, transfers: int) -> list[int]:
        first = self._transfers[stream]
        self._transfers[stream] += transfers
        return [_tag(stream, first + i, text) for i in range(transfers)]

    def _exchange(self, stream: Stream, text: str, transfers: int) -> Callable[..., _Messages]:
        """Return the exchange of one collective.

        The tags are taken now, since a later phase may start after a later collective.
        """
        tags = iter(self._tags(stream, text, transfers))

        def exchange(sends: Sequence[Tensor | None], recvs: Sequence[Tensor | None]) -> _Messages:
            tag = next(tags)
            kept = (list(sends), list(recvs))
            receives: list[tuple[int, _Background]] = []
            outgoing: list[tuple[int, _Background]] = []
            # Each rank begins with the next rank, so that not all ranks send to rank 0 at once.
            for step in range(1, self.size):
                source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
                if (tensor := recvs[source]) is not None and tensor.numel():
                    with _base.transport_errors(source):
                        receives.append((source, self._torch_group.recv([tensor], source, tag)))
                if (tensor := sends[target]) is not None and tensor.numel():
                    with _base.transport_errors(target):
                        outgoing.append((target, self._torch_group.send([tensor], target, tag)))
            return _Messages([*receives, *outgoing], kept, self._timeout_s)

        return exchange

    def _interrupt(self) -> None:
        _base.break_connections(self._torch_group, self.rank, self.size)
        for thread in list(self._stream_threads.values()):
            thread.interrupt()

    def _broken_peer(self) -> int | None:
        # Gloo does not end the wait for a message of which a part has arrived when the connection
        # breaks. A new receive over such a connection fails at once.
        gloo: Any = self._torch_group
        if type(gloo).__name__ != dist.ProcessGroupGloo.__name__:
            return None
        for peer in set(range(self.size)) - {self.rank}:
            try:
                gloo.recv([torch.empty(1)], peer, _base.INTERRUPT_TAG)
            except RuntimeError:
                return peer
        return None

    def _release(self) -> None:
        for thread in self._stream_threads.values():
            thread.close()
        self._under_way.clear()


@final
class HostsGroup(ExchangeGroup):
    """Processes of several hosts, with shared memory inside each host.

    See [Note: collectives over hosts].
    """

    def __init__(self, rows: dict[Stream, SharedMemory], *settings: Any) -> None:
        super().__init__(*settings)
        self._rows = rows
        row = rows[Stream.PARAMS]
        self._place = HostPlace(self.rank // row.size, self.size // row.size, row.rank, row.size)

    def _begin(
        self, call: Collective, text: str, index: int, x: Tensor, out: Tensor
    ) -> Callable[[], None]:
        if not goes_over_hosts(call.op, x):
            return super()._begin(call, text, index, x, out)
        column = _ColumnGroup(
            self._torch_group,
            self._place,
            self._tags(call.stream, text, num_messages(self._place)),
            self._timeout_s,
        )
        row = functools.partial(self._in_row, call, text)

        # A collective has several phases, and the memory of a stream belongs to its thread.
        def steps() -> Iterator[None]:
            over_hosts(call.op, x, out, self._place, row, column)
            yield

        return self._background(call.stream, steps)

    def _in_row(self, call: Collective, text: str, op: Op, x: Tensor, out: Tensor) -> None:
        memory = self._rows[call.stream]
        first = self._place.host * self._place.size
        try:
            memory.finish(
                memory.send(Collective(op, call.name, call.part, call.stream), text, x, out)
            )
        except _base.TransportError as error:
            raise _base.TransportError(
                None if error.peer is None else first + error.peer, str(error)
            ) from error
        except _base.Mismatch as error:
            raise _base.Mismatch(first + error.peer, error.text) from error

    def _give_up(self) -> None:
        for memory in self._rows.values():
            memory.interrupt()

    def _interrupt(self) -> None:
        self._give_up()
        super()._interrupt()

    def _release(self) -> None:
        self._give_up()
        super()._release()
        for memory in self._rows.values():
            memory.close()


@final
class _ColumnGroup:
    """Messages to the ranks with this rank's position on other hosts."""

    def __init__(
        self, torch_group: Any, place: HostPlace, tags: Sequence[int], timeout_s: float
    ) -> None:
        self._torch_group = torch_group
        self._place = place
        self._tags = tags
        self._timeout_s = timeout_s

    def send(self, host: int, tensor: Tensor, number: int) -> _Messages:
        return self._start(self._torch_group.send, host, tensor, number)

    def receive(self, host: int, tensor: Tensor, number: int) -> _Messages:
        return self._start(self._torch_group.recv, host, tensor, number)

    def _start(self, move: Any, host: int, tensor: Tensor, number: int) -> _Messages:
        peer = host * self._place.size + self._place.rank
        with _base.transport_errors(peer):
            work = move([tensor], peer, self._tags[number])
        return _Messages([(peer, work)], tensor, self._timeout_s)


@functools.lru_cache(maxsize=4096)
def _checksum(text: str) -> int:
    return zlib.crc32(text.encode()) & ((1 << _CHECKSUM_BITS) - 1)


def _tag(stream: Stream, sequence: int, text: str) -> int:
    number = sequence & ((1 << _SEQUENCE_BITS) - 1)
    return (stream << _SEQUENCE_BITS | number) << _CHECKSUM_BITS | _checksum(text)
