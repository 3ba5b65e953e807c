"""The allocator of shared memory: blocks are apart, aligned, and reused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed import needs_shared_memory
from zfun.collectives import Broadcast, Collective, Stream
from zfun.collectives.shm._mailbox import Mailbox
from zfun.collectives.shm._pages import HUGE_PAGE, PAGE
from zfun.collectives.shm._segment import CONTROL_BYTES, Segment

pytestmark = [needs_shared_memory, pytest.mark.timeout(60)]

SIZES = st.one_of(
    st.integers(1, 3 * PAGE), st.integers(1, 12 * HUGE_PAGE // PAGE).map(lambda n: n * PAGE)
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 9)), max_size=40), st.integers(0, 3))
def test_blocks_are_apart_and_aligned_and_reused(program: list[tuple[int, int]], rank: int) -> None:
    segment = Segment(rank, 4)
    taken: list[tuple[int, int]] = []
    for nbytes, place in program:
        begin, length = segment.allocate(nbytes)
        assert length >= nbytes
        assert begin % (PAGE if nbytes >= PAGE else 128) == 0
        assert begin >= CONTROL_BYTES
        if nbytes >= 4 * HUGE_PAGE:
            # So that a zero-copy gather can map huge pages: see [Note: huge pages].
            assert (begin - rank * length) % HUGE_PAGE == 0
        assert all(begin + length <= other or end <= begin for other, end in taken)
        assert begin + length <= segment.reserved
        taken.append((begin, begin + length))
        assert segment.in_use == CONTROL_BYTES + sum(end - other for other, end in taken)
        if place < 5:
            other, end = taken.pop(place % len(taken))
            segment.release(other, end - other)
    for begin, end in taken:
        segment.release(begin, end - begin)
    assert segment.in_use == CONTROL_BYTES
    # The free pieces have merged, and alignment may waste a huge page.
    before = segment.reserved
    segment.allocate(max(before - CONTROL_BYTES - 2 * HUGE_PAGE, PAGE))
    assert segment.reserved == before
    segment.close()


def test_readers_of_records_map_no_blocks() -> None:
    segment = Segment(0, 1)
    block, length = segment.allocate(HUGE_PAGE)
    mailbox = Mailbox(segment, {}, timeout_s=1.0)
    call, sent = Collective(Broadcast(0), "params", "w", Stream.PARAMS), []
    for _ in range(40):
        sent.append(mailbox.prepare(call, "a broadcast", (), torch.ones(1), None))
        mailbox.publish(sent[-1])
    places = [letter.record for letter in sent]
    assert len(set(places)) == 40
    assert all(place < CONTROL_BYTES for place in places[:24])
    # With many collectives under way, some records lie elsewhere.
    assert all(place < CONTROL_BYTES or place >= block + length for place in places)
    segment.close()


def test_tensors_keep_the_memory_of_a_closed_segment() -> None:
    segment = Segment(0, 1)
    begin, length = segment.allocate(PAGE)
    x = segment.memory[begin : begin + length]
    x[:3] = b"abc"
    segment.close()
    assert bytes(x[:3]) == b"abc"


def test_a_free_piece_is_kept_where_there_is_no_memory_for_more() -> None:
    segment = Segment(0, 1)
    begin, length = segment.allocate(1 << 20)
    segment.release(begin, length)
    before = segment.in_use
    with pytest.raises(OSError, match="full"):
        segment.allocate(segment.capacity)
    assert segment.in_use == before
    assert segment.allocate(1 << 20) == (begin, length)
    segment.close()
