"""Groups of processes whose backend does the collectives: nccl."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from zfun.collectives._ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    check_collective,
    describe,
)
from zfun.collectives._ranges import with_ranges
from zfun.collectives._work import Work
from zfun.collectives.backends._base import ProcessGroup, transport_errors

# torch 2.13 gives these two a new name and warns about the old one.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@final
class NativeGroup(ProcessGroup):
    """Processes whose backend does the collectives, one communicator per stream."""

    def __init__(self, *args: Any, ranks: Sequence[int] | None = None) -> None:
        super().__init__(*args)
        # The numbers of the ranks in torch's world.
        self._ranks = dist.get_process_group_ranks(self._torch_group) if ranks is None else ranks
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        # With local synchronization torch names a group by the number of groups that the rank is
        # in. The group of all ranks does without, because ranks in different numbers of groups
        # would never meet.
        local = self.size < dist.get_world_size()
        timeout = timedelta(seconds=self._timeout_s)
        self._streams: dict[Stream, Any] = {}
        for stream in Stream:
            self._streams[stream] = dist.new_group(
                list(self._ranks), timeout=timeout, use_local_synchronization=local
            )

    @with_ranges
    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        self._check_open()
        # Control values may live on the CPU; they are copied to the device and back.
        sent = x.detach().resolve_conj().resolve_neg().to(self._device)
        numel = call.op.output_numel(x.numel(), self.size)
        received = (
            out.detach()
            if out is not None and out.device == self._device
            else sent.new_empty(numel)
        )
        text = describe(call, x.numel(), x.dtype)
        index = self._watchdog.note_start(call.stream, text)
        with torch.no_grad(), self._explained(call, text, index), transport_errors(None):
            works = self._issue(call, sent, received)

        def wait() -> Tensor:
            self._check_process()
            with (
                torch.no_grad(),
                self._explained(call, text, index),
                self._watchdog.waiting(call.stream, index),
                transport_errors(None),
            ):
                for work in works:
                    work.wait()
                if isinstance(call.op, Reduce) and call.op.root != self.rank:
                    received.zero_()
                if out is not None:
                    return out if out.device == received.device else out.copy_(received)
                # The work handle kept the input alive until here, where the current stream has
                # waited for the stream of the collective.
                return received if sent.device == x.device else received.to(x.device)

        return Work(wait)

    def _part(self, store: dist.Store, ranks: Sequence[int]) -> ProcessGroup:
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
        return NativeGroup(*settings, ranks=[self._ranks[rank] for rank in ranks])

    def _issue(self, call: Collective, x: Tensor, out: Tensor) -> list[Any]:
        stream = self._streams[call.stream]
        match call.op:
            case AllGather():
                return [_all_gather_into(out, x, group=stream, async_op=True)]
            case ReduceScatter():
                return [_reduce_scatter_into(out, x, group=stream, async_op=True)]
            case AllToAll():
                return [dist.all_to_all_single(out, x, group=stream, async_op=True)]
            case AllReduce():
                return [dist.all_reduce(out.copy_(x), group=stream, async_op=True)]
            case Broadcast(root):
                return [dist.broadcast(out.copy_(x), group=stream, group_src=root, async_op=True)]
            case Reduce(root):
                return [dist.reduce(out.copy_(x), group=stream, group_dst=root, async_op=True)]
            case Permute(destinations) if destinations[self.rank] == self.rank:
                out.copy_(x)
                return []
            case Permute(destinations):
                messages = [
                    dist.P2POp(dist.isend, x, group=stream, group_peer=destinations[self.rank]),
                    dist.P2POp(
                        dist.irecv, out, group=stream, group_peer=call.op.sources[self.rank]
                    ),
                ]
                return dist.batch_isend_irecv(messages)

    def _release(self) -> None:
        for group in self._streams.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)
