"""What the ranks of a host tell each other: records of calls, and counters. See [Note: collectives through shared memory].

[Note: records]

For each lane a segment has a counter of published calls, one of finished calls, and a ring of slots for records. A record says which call
it is, what it is (a hash, and as much of the text it was made of as there is room for), and how and where its input lies; what is small
lies behind it. Two words of it are written later on: when the owner has summed its slice of a borrowed sum, and when it has given a
borrowed result back. Both are the number of the call plus one, so that they grow when the slot is used again.

Every word has one writer. To wait is to look at a word of another rank until it is above a number.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from zfun.collectives._calls import Lane
from zfun.collectives._segment import FINISHED, HEAD_WORDS, LANE_WORDS, RINGS, SLOT_BYTES, Peer, Segment
from zfun.collectives._sent import Disagreement, Sent, TransportError, Use

__all__ = ["DATA_AT", "INLINE_BYTES", "Board"]

# Words of a record that come later, and where the text and the data begin, in bytes.
_RETURNED, _SUMMED = 5, 6
_TEXT_AT = 64
DATA_AT = 512
INLINE_BYTES = SLOT_BYTES - DATA_AT
_SLOTS = 64

_SPIN_S = 20e-6
_YIELD_S = 150e-6
_LONGEST_NAP_S = 1e-3


class Board:
    """Records and counters of this rank, and those of the others.

    Args:
        segment: what this rank writes.
        peers: what the others write.
        timeout_s: how long a wait may last.

    Attributes:
        interrupted: whether all waits are to end.
        watch: the context of a wait that takes long.
        help: what is done meanwhile; the others may have to come on before this rank can.
    """

    def __init__(self, segment: Segment, peers: Mapping[int, Peer], timeout_s: float) -> None:
        self.interrupted = False
        self.watch: Callable[[Lane, int], AbstractContextManager[None]] = lambda lane, index: contextlib.nullcontext()
        self.help: Callable[[], None] = lambda: None
        self._segment = segment
        self._peers = peers
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._spin_s = _SPIN_S if len(os.sched_getaffinity(0)) > len(peers) else 0.0
        self._published = [0] * len(Lane)
        self._finished = [0] * len(Lane)
        self._finished_early: list[set[int]] = [set() for _ in Lane]
        # The newest ring of each lane, how many there have been, and who reads what is in its slots.
        self._ring: list[tuple[int, int, int] | None] = [None] * len(Lane)
        self._num_rings = [0] * len(Lane)
        self._slot_uses: list[dict[int, Use]] = [{} for _ in Lane]
        # The calls whose borrowed results this rank has not given back.
        self._borrowed: set[tuple[Lane, int]] = set()

    # What this rank says.

    def next_call(self, lane: Lane) -> tuple[int, int]:
        """Return the number of this rank's next call of a lane, and where its record goes."""
        index = self._published[lane]
        ring = self._ring[lane]
        if ring is not None:
            first, offset, slots = ring
            slot = offset + (index - first) % slots * SLOT_BYTES
            last = self._slot_uses[lane].get(slot)
            if last is None or self.is_over(last):
                return index, slot
        slots = _SLOTS if ring is None else 2 * ring[2]
        offset, _ = self._segment.allocate(slots * SLOT_BYTES)
        # What was there before says nothing of calls.
        self._segment.view(offset, slots * SLOT_BYTES // 8, torch.int64).view(slots, -1)[:, _RETURNED : _SUMMED + 1].zero_()
        words, base, number = self._segment.words, HEAD_WORDS + LANE_WORDS * lane + RINGS, self._num_rings[lane]
        at = base + 1 + 3 * number
        words[at], words[at + 1], words[at + 2] = index, offset, slots
        words[base] = self._num_rings[lane] = number + 1
        self._ring[lane] = (index, offset, slots)
        self._slot_uses[lane] = {}
        return index, offset

    def publish(self, use: Use, slot: int, form: int, offset: int) -> int:
        """Let the others see a call: write its record, then the counter of its lane.

        Args:
            use: the call; its readers are all those who look at the record.
            slot: where the record goes.
            form: how the input lies.
            offset: and where.

        Returns:
            The hash that is compared.
        """
        lane, index = use.lane, use.index
        identity, label = _identity(use.text)
        self._slot_uses[lane][slot] = use
        words, at = self._segment.words, slot // 8
        words[at] = index
        words[at + 1] = identity
        words[at + 2] = form
        words[at + 3] = offset
        words[at + 4] = len(label)
        self._segment.memory[slot + _TEXT_AT : slot + _TEXT_AT + len(label)] = label
        # From here on the others see the call.
        words[HEAD_WORDS + LANE_WORDS * lane] = index + 1
        self._published[lane] = index + 1
        if use.borrowed:
            self._borrowed.add((lane, index))
        return identity

    def note_finished(self, lane: Lane, index: int) -> None:
        """Say that this rank has read what it needs for a call, once that is so for all calls before it."""
        early, finished = self._finished_early[lane], self._finished[lane]
        early.add(index)
        while finished in early:
            early.remove(finished)
            finished += 1
        self._finished[lane] = finished
        self._segment.words[HEAD_WORDS + LANE_WORDS * lane + FINISHED] = finished

    def note_summed(self, sent: Sent) -> None:
        """Say that this rank has summed its slice."""
        self._segment.words[sent.slot // 8 + _SUMMED] = sent.index + 1

    def give_back(self, lane: Lane, index: int, slot: int) -> None:
        """Say that this rank looks at a borrowed result no more."""
        self._borrowed.discard((lane, index))
        self._segment.words[slot // 8 + _RETURNED] = index + 1

    # What the others have said.

    def is_published(self, lane: Lane, index: int) -> bool:
        """Whether all others have published a call."""
        word = HEAD_WORDS + LANE_WORDS * lane
        return all(peer.words[word] > index for peer in self._peers.values())

    def is_over(self, use: Use) -> bool:
        """Whether nobody reads the data of a call any more."""
        lane, index = use.lane, use.index
        # This rank reads its own input, too.
        if self._finished[lane] <= index or (use.borrowed and (lane, index) in self._borrowed):
            return False
        word = HEAD_WORDS + LANE_WORDS * lane + FINISHED
        for peer in use.readers:
            other = self._peers[peer]
            if other.words[word] <= index or (use.borrowed and other.words[other.slot(lane, index) // 8 + _RETURNED] <= index):
                return False
        return True

    def record(self, sent: Sent, peer: int) -> tuple[int, int]:
        """Wait until another rank has published a call; return how and where its input lies.

        Raises:
            Disagreement: it is another call.
            TransportError: it did not come.
        """
        lane, index = sent.call.lane, sent.index
        self._block(peer, HEAD_WORDS + LANE_WORDS * lane, index, lane, index)
        other = self._peers[peer]
        slot = other.slot(lane, index)
        its_index, identity, form, offset, length = other.words[slot // 8 : slot // 8 + 5].tolist()
        if its_index != index or identity != sent.identity:
            text = bytes(other.memory[slot + _TEXT_AT : slot + _TEXT_AT + length])
            raise Disagreement(peer, text.decode(errors="replace"))
        return form, offset

    def await_summed(self, sent: Sent, peer: int) -> None:
        """Return when another rank has summed its slice."""
        self.record(sent, peer)
        word = self._peers[peer].slot(sent.call.lane, sent.index) // 8 + _SUMMED
        self._block(peer, word, sent.index, sent.call.lane, sent.index)

    def await_readers(self, use: Use) -> None:
        """Return when nobody reads the data of a call any more.

        Raises:
            TransportError: a reader did not finish it.
        """
        self.begin_wait()
        for peer in use.readers:
            self._block(peer, HEAD_WORDS + LANE_WORDS * use.lane + FINISHED, use.index, use.lane, use.index)
            if use.borrowed:
                self._block(peer, self._peers[peer].slot(use.lane, use.index) // 8 + _RETURNED, use.index, use.lane, use.index)

    def begin_wait(self) -> None:
        """Let the time that a wait may last begin anew, when there is something to wait for."""
        self._deadline = None

    def _block(self, peer: int, word: int, count: int, lane: Lane, index: int) -> None:
        """Return when a counter of another rank is above ``count``: spin, then give way, then sleep for an eighth of the time waited."""
        words = self._peers[peer].words
        if words[word] > count:
            return
        started = time.monotonic()
        while time.monotonic() < started + self._spin_s:
            if words[word] > count:
                return
        while time.monotonic() < started + _YIELD_S:
            self.help()
            os.sched_yield()
            if words[word] > count:
                return
        if self._deadline is None:
            self._deadline = started + self._timeout_s
        with self.watch(lane, index):
            while words[word] <= count:
                self.help()
                if self.interrupted:
                    raise TransportError(peer, "the group is broken")
                # Its last words come before its end, but may have come after the look above.
                if self._peers[peer].is_gone():
                    if words[word] > count:
                        return
                    raise TransportError(peer, "its process has ended or closed the group")
                now = time.monotonic()
                if now >= self._deadline:
                    raise TransportError(peer, f"no answer within {self._timeout_s:g} s")
                time.sleep(min((now - started) / 8, _LONGEST_NAP_S, self._deadline - now))


@functools.lru_cache(maxsize=4096)
def _identity(text: str) -> tuple[int, bytes]:
    """Return the hash of a call's description, and as much of the description as a slot holds."""
    data = text.encode()
    (number,) = struct.unpack("<q", hashlib.blake2b(data, digest_size=8).digest())
    return number, data[: DATA_AT - _TEXT_AT]
