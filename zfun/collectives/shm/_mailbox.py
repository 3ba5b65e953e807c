"""The records of collectives that ranks publish to each other, and how a rank waits for them.

[Note: records]

For each stream a segment holds a counter of published collectives and a chain of records. The
first record of a stream has a fixed place, and each record names the place of the next one. A
reader walks the chain, so the owner may put the next record anywhere: into a record that all
ranks have finished, or else into a new one. A stream with many collectives under way has many
records, and nobody waits for a free one. The first records lie in the control pages: beside a
block, a record would make every reader map a huge page.

======  =================================================
word    of a record
======  =================================================
0       index of the collective on its stream
1       hash of the text that ranks compare
2       offset of the input in the segment
3       length of the text
4       offset of the next record
5       finished: index + 1 (see the note in ``shm``)
======  =================================================

The text begins at byte 64 and the data of a small input at byte 512. The finished word only
grows, also when the record is used again, so a rank may look at the word at any later time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zfun.collectives._ops import Collective, Stream
from zfun.collectives.backends._base import Mismatch, TransportError
from zfun.collectives.shm._pages import PAGE
from zfun.collectives.shm._segment import CONTROL_BYTES, Peer, Segment

_INDEX, _HASH, _OFFSET, _LENGTH, _NEXT, _FINISHED = range(6)
_TEXT_AT, _DATA_AT = 64, 512
_RECORD_BYTES = PAGE
INLINE_BYTES = _RECORD_BYTES - _DATA_AT

_SPIN_S = 20e-6
_YIELD_S = 150e-6
_LONGEST_NAP_S = 1e-3


@dataclass(slots=True, eq=False)
class Letter:
    """A collective that this rank has published.

    Attributes:
        index: its number on its stream.
        text: the text that ranks compare.
        identity: the hash of the text.
        readers: the ranks that read the input of this rank.
        record: the offset of this rank's record.
        x: the input, until this rank has finished.
        out: the caller's output, if any, until this rank has finished.
        offset: of the input in the segment, where ranks read the input.
        peers: for each peer the offsets of its record and of its input, once known.
    """

    call: Collective
    index: int
    text: str
    identity: int
    readers: tuple[int, ...]
    record: int
    x: Tensor | None
    out: Tensor | None
    offset: int = 0
    peers: dict[int, tuple[int, int]] = field(default_factory=dict)

    def inputs(self) -> list[int]:
        """Return the offsets of the peers' inputs in their segments."""
        return [offset for _, offset in self.peers.values()]


class Mailbox:
    """The records of this rank and of its peers. See [Note: records].

    Attributes:
        interrupted: ends all waits.
        watch: a context, made of stream and index, for each wait that takes long.
    """

    def __init__(self, segment: Segment, peers: Mapping[int, Peer], timeout_s: float) -> None:
        self.interrupted = False
        self.watch: Callable[[Stream, int], AbstractContextManager[None]]
        self.watch = lambda stream, index: contextlib.nullcontext()
        self._segment = segment
        self._peers = peers
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        # Spinning helps only if every rank has a core.
        self._spin_s = _SPIN_S if len(os.sched_getaffinity(0)) > len(peers) else 0.0
        self._published = [0] * len(Stream)
        self._next = [_first_record(stream) for stream in Stream]
        self._used: list[collections.deque[Letter]] = [collections.deque() for _ in Stream]
        self._unused = list(range(_RECORD_BYTES, _first_record(max(Stream)), _RECORD_BYTES))
        # For each peer and stream: the places of records that this rank has walked over and not
        # read yet, by index, and then the index and the place of the first record after these.
        self._walked: dict[tuple[int, Stream], dict[int, int]] = {}
        self._ahead: dict[tuple[int, Stream], tuple[int, int]] = {}
        for peer in peers:
            for stream in Stream:
                self._walked[peer, stream] = {}
                self._ahead[peer, stream] = 0, _first_record(stream)

    def prepare(
        self, call: Collective, text: str, readers: tuple[int, ...], x: Tensor, out: Tensor | None
    ) -> Letter:
        """Return the next collective of a stream, which is not published yet."""
        identity, _ = _identity(text)
        stream = call.stream
        index, record = self._published[stream], self._next[stream]
        return Letter(call, index, text, identity, readers, record, x, out)

    def inline(self, sent: Letter) -> int:
        """Return the offset at which a small input lies in the record."""
        return sent.record + _DATA_AT

    def publish(self, sent: Letter) -> None:
        """Show a collective to the peers: write its record, then the counter of the stream.

        Raises:
            OSError: there is no memory for the next record. Nothing has been published then.
        """
        stream = sent.call.stream
        following = self._free_record(stream)
        _, label = _identity(sent.text)
        words, memory, at = self._segment.words, self._segment.memory, sent.record // 8
        words[at + _INDEX] = sent.index
        words[at + _HASH] = sent.identity
        words[at + _OFFSET] = sent.offset
        words[at + _LENGTH] = len(label)
        words[at + _NEXT] = following
        memory[sent.record + _TEXT_AT : sent.record + _TEXT_AT + len(label)] = label
        words[_counter(stream)] = sent.index + 1
        self._next[stream] = following
        self._published[stream] = sent.index + 1
        self._used[stream].append(sent)

    def _free_record(self, stream: Stream) -> int:
        used = self._used[stream]
        # The oldest collective is finished first, unless its window is still in use.
        for _ in range(min(2, len(used))):
            if self.is_finished(used[0], self._peers):
                return used.popleft().record
            used.rotate(-1)
        if self._unused:
            return self._unused.pop()
        offset, _ = self._segment.allocate(_RECORD_BYTES)
        # The memory may hold earlier contents.
        self._segment.words[offset // 8 + _FINISHED] = 0
        return offset

    def finish(self, sent: Letter) -> None:
        """Tell the peers that this rank reads no input of a collective any more.

        A finalizer may call this function at any moment, in any thread, and more than once.
        """
        words, at = self._segment.words, sent.record // 8 + _FINISHED
        # When the record has been used again the word is larger, and stays so.
        if words[at] <= sent.index:
            words[at] = sent.index + 1

    def is_finished(self, sent: Letter, readers: Any) -> bool:
        """Whether this rank and all ranks of ``readers`` have finished a collective."""
        if self._segment.words[sent.record // 8 + _FINISHED] <= sent.index:
            return False
        for peer in readers:
            record, _ = sent.peers[peer]
            if self._peers[peer].words[record // 8 + _FINISHED] <= sent.index:
                return False
        return True

    def await_records(self, sent: Letter) -> None:
        """Wait until all peers have published a collective; note where their inputs lie.

        Raises:
            Mismatch: a peer published another collective.
            TransportError: a peer published nothing.
        """
        self._deadline = None
        for peer, other in self._peers.items():
            if peer in sent.peers:
                continue
            self._await(peer, _counter(sent.call.stream), sent)
            record = self._walk(peer, other, sent)
            index, identity, offset, length = other.words[record // 8 : record // 8 + 4].tolist()
            if index != sent.index or identity != sent.identity:
                text = bytes(other.memory[record + _TEXT_AT : record + _TEXT_AT + length])
                raise Mismatch(peer, text.decode(errors="replace"))
            sent.peers[peer] = record, offset

    def await_finished(self, sent: Letter) -> None:
        """Wait until the readers have finished a collective.

        Raises:
            TransportError: a reader did not finish.
        """
        self.await_records(sent)
        for peer in sent.readers:
            record, _ = sent.peers[peer]
            self._await(peer, record // 8 + _FINISHED, sent)

    def _walk(self, peer: int, other: Peer, sent: Letter) -> int:
        """Return the place of a record that a peer has published."""
        stream = sent.call.stream
        walked = self._walked[peer, stream]
        index, record = self._ahead[peer, stream]
        while index <= sent.index:
            walked[index] = record
            index, record = index + 1, other.words[record // 8 + _NEXT]
            self._ahead[peer, stream] = index, record
        return walked.pop(sent.index)

    def _await(self, peer: int, word: int, sent: Letter) -> None:
        """Wait until a word of a peer exceeds an index: spin, then yield, then sleep."""
        words, index = self._peers[peer].words, sent.index
        if words[word] > index:
            return
        started = time.monotonic()
        while time.monotonic() < started + self._spin_s:
            if words[word] > index:
                return
        while time.monotonic() < started + _YIELD_S:
            os.sched_yield()
            if words[word] > index:
                return
        if self._deadline is None:
            self._deadline = started + self._timeout_s
        with self.watch(sent.call.stream, index):
            while words[word] <= index:
                if self.interrupted:
                    raise TransportError(peer, "the group is broken")
                # The peer may have written the word just before its end.
                if self._peers[peer].is_gone():
                    if words[word] > index:
                        return
                    raise TransportError(peer, "its process has ended or closed the group")
                now = time.monotonic()
                if now >= self._deadline:
                    raise TransportError(peer, f"no answer within {self._timeout_s:g} s")
                nap = min((now - started) / 8, _LONGEST_NAP_S, self._deadline - now)
                time.sleep(nap)


def _counter(stream: Stream) -> int:
    """The word that counts the published collectives of a stream, on a cache line of its own."""
    return 64 + 16 * stream


def _first_record(stream: Stream) -> int:
    return CONTROL_BYTES - (1 + stream) * _RECORD_BYTES


@functools.lru_cache(maxsize=4096)
def _identity(text: str) -> tuple[int, bytes]:
    """Return the hash of a text, and as much of the text as a record holds."""
    data = text.encode()
    (number,) = struct.unpack("<q", hashlib.blake2b(data, digest_size=8).digest())
    return number, data[: _DATA_AT - _TEXT_AT]
