"""The blocks of this rank's segment, and the windows that show the blocks of all ranks.

[Note: when a block is free]

A block is a piece of the segment: a buffer of ``allocate``, or the copy of an input. The block is
free when no tensor of ``allocate`` and no window of this rank shows the block, and all readers have
finished the collectives that sent the block. Finalizers only note that a tensor is gone; the next
allocation reclaims the block.

[Note: windows]

A window maps the pieces of all ranks one after the other. This rank's piece is shared, so a write
to it is a write to the segment: an update may write through a window. The pieces of the peers are
private, so a loss that writes in place changes no memory of other ranks. Before this rank
writes to its piece by another way, a window that is still in use is *detached*: all pages become
private copies at the same addresses, and the tensors over the window keep the old values.
"""

from __future__ import annotations

import bisect
import collections
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zfun.collectives.shm._mailbox import Letter, Mailbox
from zfun.collectives.shm._pages import Pages
from zfun.collectives.shm._segment import Peer, Segment


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of this rank's segment. See [Note: when a block is free].

    Attributes:
        is_held: whether a tensor of ``allocate`` shows the block.
        num_windows: how many windows of this rank show the block.
        uses: the collectives that sent the block and may not be finished.
        watch: tells when the tensor is gone.
    """

    offset: int
    nbytes: int
    is_held: bool = False
    num_windows: int = 0
    uses: list[Letter] = field(default_factory=list)
    watch: object = None


@dataclass(slots=True, eq=False)
class _Window:
    """A window that is in use.

    Attributes:
        sent: the all-gather.
        pages: the mapping, as long as the window is in use.
        begin: the first address.
        end: the address behind the last.
        own: the address, the length and the offset of this rank's piece.
        block: this rank's block.
        watch: tells when the window is gone.
    """

    sent: Letter
    pages: weakref.ref[Pages]
    begin: int
    end: int
    own: tuple[int, int, int]
    block: MemoryBlock
    watch: object = None


class Symmetric:
    """Blocks and windows of this rank; the mailbox tells which collectives are finished."""

    def __init__(
        self, segment: Segment, peers: Mapping[int, Peer], mailbox: Mailbox, rank: int
    ) -> None:
        self._segment = segment
        self._peers = peers
        self._mailbox = mailbox
        self._rank = rank
        self._size = len(peers) + 1
        self._process = os.getpid()
        # Blocks by offset, ascending, and those that wait to be free.
        self._offsets: list[int] = []
        self._blocks: dict[int, MemoryBlock] = {}
        self._retiring: list[MemoryBlock] = []
        # A set: a new window may have the addresses of one that is gone and not collected yet.
        self._windows: set[_Window] = set()
        # Filled by finalizers.
        self._dropped: collections.deque[MemoryBlock | _Window] = collections.deque()

    def allocate(self, nbytes: int) -> MemoryBlock:
        """Return a new block.

        Raises:
            OSError: there is no memory.
        """
        self.reclaim()
        block = MemoryBlock(*self._segment.allocate(nbytes))
        bisect.insort(self._offsets, block.offset)
        self._blocks[block.offset] = block
        return block

    def tensor(self, block: MemoryBlock, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a block as a tensor, which holds the block until its last view is gone."""
        begin = block.offset
        view = self._segment.memory[begin : begin + numel * dtype.itemsize]
        block.is_held = True
        block.watch = _watched(view, functools.partial(self._dropped.append, block))
        return torch.frombuffer(view, dtype=dtype)

    def retire(self, block: MemoryBlock) -> None:
        """Let a block be used again as soon as the block is free."""
        self._retiring.append(block)

    def find(self, x: Tensor) -> tuple[MemoryBlock | None, int]:
        """Return the block and the offset of a tensor in the segment; ``(None, 0)`` elsewhere.

        This rank's piece of a window lies in the segment too.
        """
        # The addresses of a window that is gone may be those of another tensor now.
        self._collect()
        address = x.data_ptr()
        offset = self._segment.offset_of(address)
        if offset is not None:
            return self.block_at(offset), offset
        for window in self._windows:
            begin, nbytes, first = window.own
            if begin <= address and address + x.nbytes <= begin + nbytes:
                return window.block, first + address - begin
        return None, 0

    def block_at(self, offset: int) -> MemoryBlock | None:
        """Return the block that an offset lies in."""
        place = bisect.bisect_right(self._offsets, offset) - 1
        if place < 0:
            return None
        block = self._blocks[self._offsets[place]]
        return block if offset < block.offset + block.nbytes else None

    def note_use(self, block: MemoryBlock, sent: Letter) -> None:
        """Note that peers read a block in a collective."""
        if len(block.uses) > 4:
            block.uses = [use for use in block.uses if not self._is_over(use)]
        block.uses.append(sent)

    def window(
        self, sent: Letter, block: MemoryBlock, numel: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Return the inputs of an all-gather as one tensor; None where they cannot be mapped."""
        nbytes = numel * dtype.itemsize
        offsets = [sent.offset] * self._size
        for peer, (_, offset) in sent.peers.items():
            offsets[peer] = offset
        try:
            pages = Pages(nbytes * self._size)
            for rank, offset in enumerate(offsets):
                fd = self._segment.fd if rank == self._rank else self._peers[rank].fd
                is_own = rank == self._rank
                pages.show(rank * nbytes, nbytes, fd, offset, writable=True, shared=is_own)
        except OSError:
            return None
        view = pages.view()
        own = pages.begin + self._rank * nbytes, nbytes, sent.offset
        window = _Window(
            sent, weakref.ref(pages), pages.begin, pages.begin + pages.nbytes, own, block
        )
        window.watch = _watched(view, functools.partial(self._drop, window))
        self._windows.add(window)
        block.num_windows += 1
        return torch.frombuffer(view, dtype=dtype)

    def release_for(self, x: Tensor) -> list[Letter]:
        """Finish this rank's windows over a tensor that is about to be written.

        If the tensor reaches beyond this rank's piece of a window, the window becomes its memory.
        Peers must finish the collectives that come back before the tensor is written.
        """
        self._collect()
        begin, end = x.data_ptr(), x.data_ptr() + x.nbytes
        for window in list(self._windows):
            first, nbytes, _ = window.own
            is_own = first <= begin and end <= first + nbytes
            if window.begin <= begin < window.end and not is_own:
                self._detach(window)
        block, _ = self.find(x)
        if block is None:
            return []
        for window in [window for window in self._windows if window.block is block]:
            first, nbytes, _ = window.own
            # A rank that writes through the window expects no old values there.
            if first <= begin < first + nbytes:
                self._mailbox.finish(window.sent)
            else:
                self._detach(window)
        block.uses = [use for use in block.uses if not self._is_over(use)]
        return list(block.uses)

    def reclaim(self) -> None:
        """Take back blocks that are free."""
        self._collect()
        if self._retiring:
            self._retiring = [block for block in self._retiring if not self._free(block)]

    def close(self) -> None:
        """Forget all windows; their tensors keep the mappings."""
        for window in self._windows:
            window.watch = None
        self._windows.clear()

    def _collect(self) -> None:
        """Note which tensors and windows are gone."""
        while self._dropped:
            gone = self._dropped.popleft()
            if isinstance(gone, MemoryBlock):
                gone.is_held = False
                gone.watch = None
                self._retiring.append(gone)
                if gone.num_windows:
                    # This rank sees the block through windows from here on.
                    self._segment.unmap(gone.offset, gone.nbytes)
            elif gone in self._windows:
                gone.watch = None
                self._windows.remove(gone)
                gone.block.num_windows -= 1

    def _free(self, block: MemoryBlock) -> bool:
        while block.uses and self._is_over(block.uses[-1]):
            block.uses.pop()
        if block.uses or block.num_windows or block.is_held:
            return False
        del self._blocks[block.offset]
        del self._offsets[bisect.bisect_left(self._offsets, block.offset)]
        self._segment.release(block.offset, block.nbytes)
        return True

    def _is_over(self, sent: Letter) -> bool:
        return self._mailbox.is_finished(sent, sent.readers)

    def _drop(self, window: _Window) -> None:
        # In a finalizer: one word and one entry of a queue. A fork has not mapped the word.
        if self._process != os.getpid():
            return
        self._mailbox.finish(window.sent)
        self._dropped.append(window)

    def _detach(self, window: _Window) -> None:
        pages = window.pages()
        if pages is not None:
            pages.detach()
        window.watch = None
        self._windows.remove(window)
        window.block.num_windows -= 1
        self._mailbox.finish(window.sent)


def _watched(view: memoryview, then: Callable[[], None]) -> object:
    """Call a function when a buffer is gone, unless the returned finalizer is gone first."""
    return weakref.ref(view, lambda _: then())


def chunks(x: Tensor, size: int) -> Sequence[Tensor]:
    """Cut a tensor into one equal piece for each rank."""
    return x.view(size, x.numel() // size).unbind()
