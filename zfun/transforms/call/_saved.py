"""Views of gathered buckets that autograd saves for backward: packed as places, without memory.

Inside of a recomputed block autograd saves nothing here, because backward runs the block again. The
block then uses buckets again, in order, up to the last tensor that autograd saved in forward.
So ``SavedViews`` notes the uses and the saved tensors of each such block.

[Note: what backward will use]
Backward runs the nodes of autograd that lead from the loss to a parameter, the last made first.
Each view and each block belongs to nodes, known by autograd's sequence numbers. A value that the
loss detaches or ignores leaves its nodes behind, so ``backward`` walks through the graph, and lists
in order: the buckets that the nodes on the way will use, and where each bucket node becomes ready.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zfun import ops
from zfun.transforms.call._buckets import BucketShard
from zfun.transforms.call._written import outdated

# A view of a gathered bucket: bucket, dtype, shape, strides and offset. The bucket is a list that
# all views share, because the reference count of the list tells whether a view is left.
Packed: TypeAlias = tuple[list[int], torch.dtype, tuple[int, ...], tuple[int, ...], Any]


# The marks among the buckets that backward uses: where a recomputed block begins, where
# recomputation stops, where the block ends, and that the node of the bucket before is ready.
_BEGIN, _STOP, _END, _READY = -1, -2, -3, -4

# The number of the next node that autograd makes in this thread.
_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The identity of a tensor's storage. Without untyped_storage(), whose object would live as long as
# the storage: torch would make, and Python's collector look at, one for each saved activation.
_storage_of: Callable[[Tensor], int] = torch._C._storage_address  # pyrefly: ignore[missing-attribute]

_current: ContextVar[tuple[SavedViews, Callable[[], None]] | None] = ContextVar(
    "zfun_saved_views", default=None
)


class SavedViews:
    """Knows the storages of gathered buckets, and packs the views that autograd saves.

    Args:
        num_buckets: the number of buckets.

    Attributes:
        blocks: the uses in the recomputed blocks that are running, the innermost last.
        old: for each bucket, the bytes and the paths of leaves that were written after forward.
    """

    def __init__(self, num_buckets: int) -> None:
        self.blocks: list[_Uses] = []
        self.old: dict[int, list[tuple[range, str]]] = {}
        # Each saved view as backward will meet it: see _in_order().
        self._views: list[tuple[int, int, tuple[int, ...]]] = []
        # The nodes that need buckets, and the buckets of each recomputed block, in order.
        self._needs: list[tuple[Sequence[int], tuple[int, ...]]] = []
        # The next node at each first use of a bucket, the bucket, and whether the use is in a block
        # of torch's own checkpoint, which tells nothing.
        self._uses: list[tuple[int, int, bool]] = []
        self._first_number = _next_number()
        self._marks = [[bucket] for bucket in range(num_buckets)]
        self._alone = [(bucket,) for bucket in range(num_buckets)]
        # The bucket of each storage.
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def know(self, tensor: Tensor, bucket: int) -> None:
        """Know a tensor as a gathered bucket."""
        # The weak reference keeps the address from being given to another storage while the entry
        # lives.
        reference = StorageWeakRef(tensor.untyped_storage())
        self._storages[_storage_of(tensor)] = (bucket, reference)

    @ops.uncompiled
    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Return the form in which autograd keeps a tensor."""
        # Autograd saves mostly activations, and packs each, so this must be fast.
        try:
            if type(tensor) is Tensor:
                storage = _storage_of(tensor)
            else:  # A lazy leaf, which torch's checkpoint saves, has the storage of its value.
                storage = tensor.untyped_storage()._cdata
            found = self._storages.get(storage)
        except NotImplementedError:  # a sparse tensor
            return without_cycle(tensor)
        if found is None or tensor.is_conj() or tensor.is_neg():
            return without_cycle(tensor)
        bucket, _ = found
        self._views.append((_next_number() - 1, 1, self._alone[bucket]))
        # A plain tuple, because torch 2.15 makes views from no other type of shape.
        return (
            self._marks[bucket],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )

    def outdate(self, paths: Collection[str], shards: Sequence[BucketShard]) -> None:
        """Know leaves of these paths as written."""
        for bucket, shard in enumerate(shards):
            size = shard.dtype.itemsize
            for slot in shard.slots:
                if slot.path in paths:
                    place = range(slot.offset * size, (slot.offset + slot.numel) * size)
                    self.old.setdefault(bucket, []).append((place, slot.path))

    def check_leaf(self, bucket: int, path: str) -> None:
        """Refuse a leaf that was written since forward."""
        if any(path == old for _, old in self.old[bucket]):
            raise outdated(path)

    def check_place(self, bucket: int, place: int) -> None:
        """Refuse a saved view that begins at this byte of a leaf that was written."""
        for places, path in self.old[bucket]:
            if place in places:
                raise outdated(path)

    @contextlib.contextmanager
    def current(self, set_aside: Callable[[], None]) -> Iterator[None]:
        """The context of the loss, in which recomputed blocks find this object.

        ``set_aside`` is called where a recomputed block begins, so that its first use of a bucket
        is noted. An attribute would be a cycle, and keep the gradients of the call alive.
        """
        token = _current.set((self, set_aside))
        try:
            yield
        finally:
            _current.reset(token)

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[_Uses]:
        """The context of a recomputed block in forward."""
        uses = _Uses()
        self.blocks.append(uses)
        try:
            yield uses
        finally:
            self.blocks.pop()
            buckets, stop = uses.buckets, uses.stop
            marked = (_BEGIN, *buckets[:stop], _STOP, *buckets[stop:], _END)
            self._needs.append((uses.nodes, marked))

    def use(self, bucket: int) -> None:
        """Note the first use of a bucket after uses of others."""
        for uses in self.blocks:
            if uses.buckets[-1:] != [bucket]:
                uses.buckets.append(bucket)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_ours = self.blocks or hooks is None or getattr(hooks[0], "__self__", None) is self
        # Each leaf of a bucket is loaded by itself in the first pass, and all at once later,
        # wherever a checkpoint ends.
        if not self._uses or self._uses[-1][1] != bucket:
            self._uses.append((_next_number(), bucket, not is_ours))

    def backward(self, roots: Sequence[Any], nodes: Mapping[Any, int]) -> list[int]:
        """List the buckets that backward will use; see [Note: what backward will use].

        Args:
            roots: the nodes of the results of the loss, ``None`` for a result without a gradient;
                backward may begin at the first one alone.
            nodes: the bucket nodes.
        """
        reached: set[int] = set()
        ready: dict[int, int] = {}
        found: list[int] = []
        for part in (roots[:1], roots[1:]):
            some = [root for root in part if root is not None]
            if some:
                self._reach(some, nodes, reached, ready)
                found += self._in_order(reached, ready)
            found.append(_END)
        return found

    def _reach(
        self,
        roots: Iterable[Any],
        nodes: Mapping[Any, int],
        reached: set[int],
        ready: dict[int, int],
    ) -> None:
        """Add the numbers of the nodes behind roots, and of the last to run before each bucket."""
        todo, first = list(roots), self._first_number
        for root in todo:
            if root in nodes:
                ready[nodes[root]] = first
        # The list grows while the loop goes through it.
        for node in todo:
            number = node._sequence_nr()
            # A smaller number is of a graph that the batch brought along.
            if number < first or number in reached:
                continue
            reached.add(number)
            for following, _ in node.next_functions:
                if following in nodes:
                    bucket = nodes[following]
                    ready[bucket] = min(number, ready.get(bucket, number))
                elif following is not None:
                    todo.append(following)

    def _in_order(self, reached: Set[int], ready: Mapping[int, int]) -> list[int]:
        ends = [number for number, _, _ in self._uses[1:]] + [_next_number()]
        unknown = [
            (range(number, end), (_BEGIN, bucket, _END))
            for (number, bucket, is_unknown), end in zip(self._uses, ends, strict=False)
            if is_unknown
        ]
        # The node, 1 for a use and 0 for a complete bucket, and the buckets.
        events = [view for view in self._views if view[0] in reached]
        events += [
            (number, 1, buckets)
            for numbers, buckets in [*self._needs, *unknown]
            if (number := max(filter(reached.__contains__, numbers), default=-1)) >= 0
        ]
        events += [(number, 0, (bucket, _READY)) for bucket, number in ready.items()]
        events.sort(reverse=True)
        found: list[int] = []
        for _, _, buckets in events:
            if found[-1:] != list(buckets):
                found += buckets
        return found

    def is_kept(self, bucket: int) -> bool:
        """Whether autograd's graph keeps a view of a bucket."""
        return sys.getrefcount(self._marks[bucket]) > max(map(sys.getrefcount, [[bucket]]))


def without_cycle(tensor: Tensor) -> Tensor:
    """Return a tensor that the node which saves it may hold.

    A node that saves its own result, such as that of tanh, and has the result's history through a
    saved-tensor hook, is a cycle: a graph without a backward pass would never be freed.
    """
    node = tensor.grad_fn
    is_own = node is not None and node._sequence_nr() == _next_number() - 1
    return tensor.detach() if is_own else tensor


class _Uses:
    """The buckets that a recomputed block has used, and how many until the last saved tensor.

    ``nodes`` has the numbers of the nodes whose tensors were saved.
    """

    __slots__ = ("buckets", "nodes", "stop")

    def __init__(self) -> None:
        self.buckets: list[int] = []
        self.nodes: list[int] = []
        self.stop = 0


@contextlib.contextmanager
def noting_recomputation() -> Iterator[None]:
    """The context of a block in forward, inside of the saved-tensor hooks that recompute."""
    found = _current.get()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if found is None or hooks is None:
        yield
        return
    saved, set_aside = found
    set_aside()
    pack, unpack = hooks
    with saved.recomputed() as uses:

        def note(tensor: Tensor) -> Any:
            uses.stop = len(uses.buckets)
            number = _next_number() - 1
            if uses.nodes[-1:] != [number]:
                uses.nodes.append(number)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            yield
