"""What sums in a wire format hold on their way: ``zfun/wire/_collectives.py`` with numbers of bytes in the place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from zfun.collectives import Group, Mesh, axis_of, mesh_of
from zfun.wire import Wire

__all__ = ["CodedSums"]

# Bytes of a number that half types are widened to.
_WIDE = torch.float32.itemsize


class CodedSums:
    """Sums of buckets of gradients over the ranks, in a wire format.

    Args:
        wire: the format.
        group: what the sums are cut over; they go over its whole mesh.
        scatters: whether each rank keeps its piece alone.
        hold: called with the bytes of a buffer that is made, and the bucket.
        free: called with the bytes of one that is freed.

    Attributes:
        kept: bytes that error feedback keeps, by bucket and place.
    """

    def __init__(self, wire: Wire, group: Group, hold: Callable[[int, int], None], free: Callable[[int], None], *, scatters: bool) -> None:
        self._wire = wire
        self._group = group
        self._hold = hold
        self._free = free
        self._scatters = scatters
        self._under_way: dict[int, Iterator[None]] = {}
        self.kept: dict[tuple[int, str], int] = {}

    def start(self, bucket: int, numel: int, itemsize: int) -> None:
        """Play the start of a sum; once it is over, nobody holds the terms for it any more."""
        mesh = mesh_of(self._group)
        if not self._scatters:
            # Whole sums are taken over all ranks.
            play = self._all_reduce(bucket, numel, itemsize, mesh)
        elif isinstance(mesh, Mesh) and self._group is not mesh:
            play = self._over_rows(bucket, numel, itemsize, mesh)
        else:
            play = self._reduce_scatter(bucket, numel, itemsize, mesh, itemsize)
        next(play)
        self._under_way[bucket] = play

    def finish(self, bucket: int) -> None:
        """Play the wait for it; what is left of it is the sum."""
        _run(self._under_way.pop(bucket))

    def learn(self, bucket: int, numel: int, itemsize: int) -> int:
        """Note what error feedback keeps of a bucket from one step to the next, and return how many bytes that is."""
        twin = CodedSums(self._wire, self._group, lambda *_: None, lambda _: None, scatters=self._scatters)
        twin.start(bucket, numel, itemsize)
        twin.finish(bucket)
        self.kept |= twin.kept
        return sum(twin.kept.values())

    # Each of these yields once: where the collective has been started, and is going to be waited for.

    def _over_rows(self, bucket: int, numel: int, itemsize: int, mesh: Mesh) -> Iterator[None]:
        """Over the inner axis a reduce-scatter, over the outer one an all-reduce. On an axis of one rank there is a copy."""
        row = numel // mesh.inner.size * itemsize
        if mesh.inner.size > 1:
            yield from self._reduce_scatter(bucket, numel, itemsize, mesh.inner, itemsize)
        else:
            self._hold(row, bucket)
            yield
        if mesh.outer.size > 1:
            _run(self._all_reduce(bucket, numel // mesh.inner.size, itemsize, mesh.outer))
        else:
            self._hold(row, bucket)
        self._free(row)

    def _all_reduce(self, bucket: int, numel: int, itemsize: int, group: Group) -> Iterator[None]:
        wide = max(itemsize, _WIDE)
        yield from self._reduce_scatter(bucket, numel, itemsize, group, wide)
        message = self._write(bucket, f"gather {axis_of(group)}", 1, numel // group.size, wide)
        _run(self._exchange(bucket, message, group.size * message, numel * itemsize))
        self._free(numel // group.size * wide)

    def _reduce_scatter(self, bucket: int, numel: int, itemsize: int, group: Group, out_itemsize: int) -> Iterator[None]:
        sizes = (group.inner.size, group.outer.size) if isinstance(group, Mesh) else (group.size,)
        hops = [size for size in sizes if size > 1]
        for index, size in enumerate(hops):
            before = numel * itemsize
            messages = self._write(bucket, f"hop {index} {axis_of(group)}", size, numel // size, itemsize)
            numel, itemsize = numel // size, out_itemsize if index == len(hops) - 1 else max(itemsize, _WIDE)
            exchange = self._exchange(bucket, messages, messages, numel * itemsize)
            if index == 0:
                yield from exchange
            else:
                _run(exchange)
                self._free(before)

    def _exchange(self, bucket: int, sent: int, received: int, nbytes: int) -> Iterator[None]:
        self._hold(received, bucket)
        yield
        self._free(sent)
        self._hold(nbytes, bucket)
        self._free(received)

    def _write(self, bucket: int, place: str, count: int, numel: int, itemsize: int) -> int:
        """Play the writing of messages, and return how many bytes they have."""
        nbytes = count * self._wire.message_bytes(numel)
        feedback = self._wire.feedback
        if feedback is None:
            self._hold(nbytes, bucket)
            return nbytes
        lost, is_kept = count * numel * max(itemsize, _WIDE), (bucket, place) in self.kept
        # With what was lost before; else as it is, if it need not be widened.
        full = lost if is_kept or itemsize < _WIDE else 0
        for made in (full, nbytes, lost, lost if is_kept and feedback.err_beta else 0):
            if made:
                self._hold(made, bucket)
        # The new loss takes the place of the old one.
        self._free(full + (lost if is_kept else 0) + (lost if is_kept and feedback.err_beta else 0))
        self.kept[bucket, place] = lost
        return nbytes


def _run(play: Iterator[None]) -> None:
    for _ in play:
        pass
