"""Build flat values bucket by bucket from leaves that are made one at a time.

[Note: building]
A rank never holds more than one whole leaf beside the values that the rank keeps. :class:`Leaves`
makes the leaves of a tree, or broadcasts the leaves of rank 0 in pieces; :func:`fill` copies the
part of each leaf that belongs to a buffer of this rank. The values of tensors are compared across
ranks before the first bucket, the values of deferred leaves while they are made, and the digests
after the last one.

A rank that cannot make a leaf, or whose store is full, must not leave the others waiting. So an
error is kept, the rank goes on with zeros in place of the leaves, and :meth:`Leaves.check` tells
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zfun import collectives, ops, tree
from zfun.collectives import Broadcast, Collective, Group, LeafRecord, Stream, global_ranks
from zfun.errors import LeafError, ZfunError
from zfun.flat import Flat
from zfun.layout import FUSED_BYTES, Layout, LeafSlot
from zfun.placement import Placement, S
from zfun.sources import Deferred

_Out = TypeVar("_Out")


class Target(NamedTuple):
    """A buffer of this rank, and the element of the whole bucket at which the buffer begins."""

    buffer: Tensor
    start: int


class Leaves:
    """The leaves of a replicated tree, which are made one at a time.

    Args:
        params: a tree of tensors and deferred leaves.
        group: the ranks that hold the tree; for an axis of a mesh, all ranks of the mesh.
        init: ``"check"`` compares the values of deferred leaves; ``"broadcast"`` takes the values
            of rank 0, and asks the other ranks for none.
        compared_as: the dtype to which floating values are rounded before they are compared.
        is_own: ``is_own(path)``: whether each rank keeps values of its own; by default no leaf.

    Raises:
        LeafError: a tensor on ``meta``, which has no values.
    """

    def __init__(
        self,
        params: tree.Tree,
        group: Group,
        init: str,
        *,
        compared_as: torch.dtype | None = None,
        is_own: Callable[[str], bool] = lambda path: False,
    ) -> None:
        self._values = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
        # Ranks have compared their trees, so all of them raise here.
        path = next((path for path, leaf in self._values.items() if is_on_meta(leaf)), None)
        if path is not None:
            raise LeafError(
                f"a state is made of values; leaf {path!r} is on meta and has none; pass "
                "zf.sources.initialised(params, initialise), or zf.sources.safetensors(path, "
                "params)",
                leaf=path,
            )
        self._ranks = collectives.agreement_group(group)
        self._sends = init == "broadcast" and self._ranks.size > 1
        self._compared_as = compared_as
        self._is_own = is_own
        self._digests: dict[str, int | str] = {}
        self._failure: tuple[str, Exception] | None = None

    def read(self, slot: LeafSlot, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """Yield the elements of a leaf in pieces: the first element of each, and a 1-D tensor."""
        value, is_own = self._values[slot.path], self._is_own(slot.path)
        if not self._sends or is_own:
            found = self.attempt(slot.path, lambda: _elements(value))
            if found is None:
                return
            if isinstance(value, Deferred) and not is_own and self._ranks.size > 1:
                self._digests[slot.path] = ops.fingerprint(found, self._compared_as)
            yield 0, found
            return
        self._digests[slot.path] = ""
        found = (
            self.attempt(slot.path, lambda: _elements(value).to(device))
            if self._ranks.rank == 0
            else None
        )
        dtype = value.dtype.to_real() if value.dtype.is_complex else value.dtype
        # All ranks start the same broadcasts, also where rank 0 has no values.
        step = max(1, FUSED_BYTES // dtype.itemsize)
        for first in range(0, slot.numel, step):
            numel = min(step, slot.numel - first)
            piece = (
                torch.zeros(numel, dtype=dtype, device=device)
                if found is None
                else found.narrow(0, first, numel)
            )
            call = Collective(Broadcast(0), "params", f"{slot.path} from {first}", Stream.PARAMS)
            yield first, self._ranks.start(call, piece).wait()

    def attempt(self, path: str, fn: Callable[[], _Out]) -> _Out | None:
        """Return the result of a function; keep the error of the first one that raises.

        Args:
            path: the leaf, or the name of the bucket.
            fn: starts no collective that other ranks may not start.

        Returns:
            The result; ``None`` after an error.
        """
        if self._failure is not None:
            return None
        try:
            return fn()
        except Exception as error:  # noqa: BLE001, the user's code runs here and may raise anything
            self._failure = path, error
            return None

    def check(self) -> None:
        """Compare the values of deferred leaves across ranks, and raise the error that was kept.

        Raises:
            SpecMismatch: deferred leaves have other values on some rank, or could not be made on
                another rank.
        """
        values = self._values.values()
        if self._ranks.size > 1 and (self._sends or any(isinstance(x, Deferred) for x in values)):
            records = [LeafRecord(path, "made", digest) for path, digest in self._digests.items()]
            if self._failure is not None:
                path, error = self._failure
                records = [record for record in records if record.path != path]
                records.append(LeafRecord(path, f"not made ({type(error).__name__}: {error})"))
            try:
                collectives.check_same(records, self._ranks, "parameters")
            except ZfunError:
                if self._failure is None:
                    raise
        if self._failure is not None:
            path, error = self._failure
            rank = global_ranks(self._ranks)[self._ranks.rank]
            if isinstance(error, ZfunError):
                error.leaf = path if error.leaf is None else error.leaf
                error.rank = rank if error.rank is None else error.rank
            error.add_note(f"in leaf {path!r} on rank {rank}")
            raise error


def is_on_meta(leaf: Any) -> bool:
    """Whether a leaf is a tensor without values; the fake tensors of a planner stand for some."""
    return type(leaf) in (Tensor, torch.nn.Parameter) and leaf.device.type == "meta"


def _elements(value: Tensor | Deferred) -> Tensor:
    """Return the elements of a leaf as a vector, a complex number as two; copy only if needed."""
    leaf = value.load() if isinstance(value, Deferred) else value.detach()
    leaf = leaf.resolve_conj().resolve_neg()
    return (torch.view_as_real(leaf) if leaf.is_complex() else leaf).contiguous().reshape(-1)


def target(layout: Layout, bucket: int, placement: Placement, group: Group) -> Target:
    """Return a zeroed buffer of this rank for a bucket: the shard under ``S``, else the whole."""
    slot = layout.buckets[bucket]
    if placement is not S:
        return Target(torch.zeros(slot.padded_numel, dtype=slot.dtype, device=layout.device), 0)
    start, stop = slot.span(group.rank, group.size)
    own = collectives.allocate(group, stop - start, slot.dtype, layout.device)
    return Target(own.zero_(), start)


@torch.no_grad()
def fill(leaves: Leaves, layout: Layout, bucket: int, targets: Sequence[Target]) -> None:
    """Make the leaves of a bucket, and copy the part of each into the buffers of this rank."""
    for index in layout.buckets[bucket].leaves:
        slot = layout.leaves[index]
        for first, piece in leaves.read(slot, layout.device):
            for buffer, start in targets:
                at = slot.offset + first - start
                begin, end = max(at, 0), min(at + piece.numel(), buffer.numel())
                if begin < end:
                    buffer[begin:end].copy_(piece[begin - at : end - at])
            # The generator holds the last reference, and frees the leaf before the next is made.
            del piece


def build(leaves: Leaves, layout: Layout, group: Group, placement: Placement) -> Flat[Any]:
    """Return the flat of a layout, with placement ``R`` or ``S``, before :meth:`Leaves.check`."""
    buffers = []
    for bucket in range(len(layout.buckets)):
        made = target(layout, bucket, placement, group)
        fill(leaves, layout, bucket, [made])
        buffers.append(made.buffer)
    return Flat(buffers, placement, layout, group)
