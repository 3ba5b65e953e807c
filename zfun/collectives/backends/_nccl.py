"""Groups of processes whose backend does the collectives: nccl.

[Note: communicators]

Each stream has a communicator, because a communicator runs its collectives in the order in which
they were started. Where torch knows this rank's device (``device_id=`` of ``init_process_group``),
communicators are split from those of the parent, at once, by all ranks of the parent; torch's group
of all ranks is that of the control stream where zfun has made it. Otherwise torch makes a
communicator at its first collective, which therefore has to be one of all ranks: a permutation is
an all-to-all with empty messages.

[Note: control values]

A gather of small values that lie on the host, such as the words by which ranks find out that one
left a schedule, goes over gloo, beside the communicators. On the device it would cost a copy there
and back, and the host would wait for all work before it. The first one does take that way, and the
ranks connect when they have its values: then all ranks are there, and the watchdog, which does not
watch over connections, has watched over the gather. The other control values, such as a loss, lie
on the device and stay there.

[Note: lost ranks on a device]

The host does not wait for a collective. So the watchdog follows it until the device has passed it,
and where it cannot complete, keeps the error and aborts the communicators. That ends the device's
wait, with wrong results; the group raises the error at its next use. Torch's own watchdog would end
the process, so communicators are made with its handling of errors switched off, unless the
environment sets it.

[Note: hops on a device]

A wait makes a queue of the device wait and not the host. So a mesh starts all hops of a collective
at once, on a queue of the device for each stream: this queue waits for a hop, and the next hop
starts behind it. The queue first waits for the caller's. So the memory of a result, which belongs
to the queue of the hops, is reused only after the caller's work on the result that was freed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from zfun.collectives import _ops
from zfun.collectives._ranges import with_ranges
from zfun.collectives._work import Work
from zfun.collectives.backends._base import ProcessGroup, break_connections, transport_errors
from zfun.collectives.backends._diagnosis import Verdict

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NUM_MARKS = 256

Done = Callable[[], bool]
"""Whether the device has passed a place in its queue."""


@contextlib.contextmanager
def errors_left_to_zfun() -> Iterator[None]:
    """Let errors of the communicators made here not end the process.

    See [Note: lost ranks on a device].
    """
    if _ERROR_HANDLING in os.environ:
        yield
        return
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        del os.environ[_ERROR_HANDLING]


def _all_gather_into(out: Tensor, x: Tensor, *, group: Any, async_op: bool) -> Any:
    """Start a gather like torch's function, whose checks take longer than the start."""
    assert async_op  # as torch's options say by default
    return group._allgather_base(out, x)


def _reduce_scatter_into(out: Tensor, x: Tensor, *, group: Any, async_op: bool) -> Any:
    """Start a sum like torch's function, whose checks take longer than the start."""
    assert async_op
    return group._reduce_scatter_base(out, x)


def torch_timeout(timeout_s: float) -> timedelta:
    """Return torch's own time limit. It only logs, after zfun has acted."""
    return timedelta(seconds=2 * timeout_s + 60)


class DeviceMarks:
    """Numbers that a device writes to host memory when a queue reaches them.

    The watchdog's thread reads them without a call to CUDA: such a call may wait for a device that
    hangs, and would break the capture of a graph in another thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._rounds = torch.arange(_NUM_MARKS, device=device).unbind()
        # Each mark has a place of its own, because queues reach their marks in any order.
        self.reached = torch.zeros(
            _NUM_MARKS, dtype=torch.int64, pin_memory=device.type == "cuda"
        ).unbind()
        self._count = 0

    def add(self) -> Done:
        """Add a mark to the queue; return whether the device has passed it."""
        count, place = divmod(self._count, _NUM_MARKS)
        self._count += 1
        # The places are zero at first.
        number, reached = (count + 1) % _NUM_MARKS, self.reached[place]
        reached.copy_(self._rounds[number], non_blocking=True)
        return lambda: (int(reached) - number) % _NUM_MARKS < _NUM_MARKS // 2


@final
class NativeGroup(ProcessGroup):
    """Processes whose backend does the collectives. See [Note: communicators]."""

    def __init__(
        self,
        *args: Any,
        ranks: Sequence[int] | None = None,
        streams: Mapping[_ops.Stream, Any] | None = None,
    ) -> None:
        super().__init__(*args)
        # The numbers of the ranks in torch's world.
        self._ranks = dist.get_process_group_ranks(self._torch_group) if ranks is None else ranks
        self._device = _device_of_rank()
        self._has_met = False
        self._marks = (
            {stream: DeviceMarks(self._device) for stream in _ops.Stream}
            if self._device.type == "cuda"
            else None
        )
        self._streams = dict(streams or self._communicators())
        self._sides: dict[_ops.Stream, torch.cuda.Stream] = {}

    def aside(
        self, stream: _ops.Stream, device: torch.device
    ) -> AbstractContextManager[None] | None:
        """Return a context with a queue of its own; see [Note: hops on a device]."""
        if device != self._device:
            return None
        return self._beside(stream) if device.type == "cuda" else contextlib.nullcontext()

    @contextlib.contextmanager
    def _beside(self, stream: _ops.Stream) -> Iterator[None]:
        if stream not in self._sides:
            self._sides[stream] = torch.cuda.Stream(self._device)
        side = self._sides[stream]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            yield

    def _communicators(self) -> dict[_ops.Stream, Any]:
        if _bound_device() is not None:
            own = {_ops.Stream.CONTROL: self._torch_group} if self._on_close is not None else {}
            parents = {stream: self._torch_group for stream in _ops.Stream if stream not in own}
            return own | self._split(parents, [range(self.size)])
        # With local synchronization torch names a group by the number of groups that the rank is
        # in. The group of all ranks does without, because ranks in different numbers of groups
        # would never meet.
        local = self.size < dist.get_world_size()
        with errors_left_to_zfun():
            return {
                stream: dist.new_group(
                    list(self._ranks),
                    timeout=torch_timeout(self._timeout_s),
                    use_local_synchronization=local,
                )
                for stream in _ops.Stream
            }

    def _split(
        self, parents: Mapping[_ops.Stream, Any], parts: Sequence[Sequence[int]]
    ) -> dict[_ops.Stream, Any]:
        with errors_left_to_zfun():
            return {
                stream: dist.split_group(
                    parent,
                    [list(part) for part in parts],
                    timeout=torch_timeout(self._timeout_s),
                )
                for stream, parent in parents.items()
            }

    @with_ranges
    def start(self, call: _ops.Collective, x: Tensor, out: Tensor | None = None) -> Work:
        _ops.check_collective(call, x, out, self.size)
        self._check_open()
        is_of_host = (
            call.stream is _ops.Stream.CONTROL
            and isinstance(call.op, _ops.AllGather)
            and x.device.type == "cpu" != self._device.type
            and dist.is_gloo_available()
        )
        goes_over_host = is_of_host and self._has_met
        self._has_met |= is_of_host
        device = x.device if goes_over_host else self._device
        sent = x.detach() if x.requires_grad else x
        if sent.is_conj() or sent.is_neg() or sent.device != device:
            sent = sent.resolve_conj().resolve_neg().to(device)
        received = (
            out.detach()
            if out is not None and out.device == device
            else sent.new_empty(call.op.output_numel(x.numel(), self.size))
        )
        text = functools.partial(_ops.describe, call, x.numel(), x.dtype)
        index = self._watchdog.note_start(call.stream, text)
        try:
            works = (
                [self._gather_over_host(sent, received)]
                if goes_over_host
                else self._issue(call, sent, received)
            )
        except RuntimeError:
            with self._explained(call, text(), index), transport_errors(None):
                raise

        def wait() -> Tensor:
            self._check_process()
            self._check_failure()
            # The watchdog looks for a rank that is late while an error is explained.
            with self._watchdog.waiting(call.stream, index):
                try:
                    for work in works:
                        work.wait()
                    if not goes_over_host:
                        self._follow(call, text, index)
                    if isinstance(call.op, _ops.Reduce) and call.op.root != self.rank:
                        received.zero_()
                    # The work handle kept the input alive until here, where the current stream has
                    # waited for the stream of the collective.
                    result = received if received.device == x.device else received.to(x.device)
                    if out is not None and out.device != received.device:
                        out.detach().copy_(received)
                    if is_of_host:
                        self._connect_hosts()
                except RuntimeError:
                    with self._explained(call, text(), index), transport_errors(None):
                        raise
            return result if out is None else out

        return Work(wait)

    def _gather_over_host(self, x: Tensor, out: Tensor) -> Any:
        """Start a gather of values of the host. See [Note: control values]."""
        self._connect_hosts()
        host: Any = self._host
        # Bytes, because gloo does not know every dtype.
        return host._allgather_base(out.view(torch.uint8), x.view(torch.uint8))

    def _connect_hosts(self) -> None:
        if self._host is None:
            store, limit = dist.PrefixStore("host", self._store), timedelta(seconds=self._timeout_s)
            self._host = dist.ProcessGroupGloo(store, self.rank, self.size, limit)

    def _follow(self, call: _ops.Collective, text: Callable[[], str], index: int) -> None:
        if self._marks is None or (
            self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            return
        fail = functools.partial(self._fail, call, text, index)
        self._watchdog.follow(call.stream, index, self._marks[call.stream].add(), fail)

    def _fail(
        self, call: _ops.Collective, text: Callable[[], str], index: int, verdict: Verdict
    ) -> None:
        if self._failure is None:
            self._failure = self._watchdog.conclude(verdict, *self._names(call, text(), index))

    def _part(
        self, store: dist.Store, ranks: Sequence[int], parts: Sequence[Sequence[int]]
    ) -> ProcessGroup:
        # A group of one rank makes communicators too, because torch names communicators by their
        # number on a rank, and this number must be equal on all ranks.
        numbers = [self.global_ranks[rank] for rank in ranks]
        settings = (
            self._torch_group,
            store,
            ranks.index(self.rank),
            len(ranks),
            self._timeout_s,
            None,
            numbers,
        )
        streams = self._split(self._streams, parts) if _bound_device() is not None else None
        return NativeGroup(*settings, ranks=[self._ranks[rank] for rank in ranks], streams=streams)

    def _issue(self, call: _ops.Collective, x: Tensor, out: Tensor) -> list[Any]:
        stream = self._streams[call.stream]
        if x.is_complex():
            x, out = torch.view_as_real(x), torch.view_as_real(out)
        match call.op:
            case _ops.AllGather():
                return [_all_gather_into(out, x, group=stream, async_op=True)]
            case _ops.ReduceScatter():
                return [_reduce_scatter_into(out, x, group=stream, async_op=True)]
            case _ops.AllToAll():
                return [dist.all_to_all_single(out, x, group=stream, async_op=True)]
            case _ops.UnequalAllToAll() as op:
                parts = [*op.received], [*op.sent]
                return [dist.all_to_all_single(out, x, *parts, group=stream, async_op=True)]
            case _ops.AllReduce():
                return [dist.all_reduce(out.copy_(x), group=stream, async_op=True)]
            case _ops.Broadcast(root):
                return [dist.broadcast(out.copy_(x), group=stream, group_src=root, async_op=True)]
            case _ops.Reduce(root):
                return [dist.reduce(out.copy_(x), group=stream, group_dst=root, async_op=True)]
            case _ops.Permute(destinations):
                sent, received = [0] * self.size, [0] * self.size
                sent[destinations[self.rank]] = received[call.op.sources[self.rank]] = x.numel()
                return [dist.all_to_all_single(out, x, received, sent, group=stream, async_op=True)]

    def _interrupt(self) -> None:
        if self._host is not None:
            break_connections(self._host, self.rank, self.size)
        # Aborts one after the other may wait for each other, unless nccl has them together.
        backend = self._nccl()
        if backend is not None:
            backend._group_start()
        for group in self._streams.values():
            group.abort()
        if backend is not None:
            backend._group_end()

    def _nccl(self) -> Any:
        with contextlib.suppress(RuntimeError):
            backend = self._streams[_ops.Stream.CONTROL]._get_backend(torch.device("cuda"))
            return backend if hasattr(backend, "_group_start") else None
        return None

    def _release(self) -> None:
        self._host = None
        for group in self._streams.values():
            if dist.is_initialized() and group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _bound_device() -> torch.device | None:
    """Return the device of this rank, if torch knows it."""
    world = dist.group.WORLD
    return None if world is None else world.bound_device_id


def _device_of_rank() -> torch.device:
    bound = _bound_device()
    if bound is not None:
        return bound
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
