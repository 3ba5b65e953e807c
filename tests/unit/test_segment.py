"""Which parts of a segment are free or unmapped: a set of intervals, against a set of numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zfun.collectives._mapping import HUGE_PAGE, PAGE
from zfun.collectives._segment import Segment
from zfun.collectives._spans import Spans

INTERVALS = st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def numbers(spans: list[tuple[int, int]]) -> list[int]:
    return [number for begin, end in spans for number in range(begin, end)]


@settings(max_examples=100)
@given(changes=st.lists(st.tuples(st.booleans(), INTERVALS), max_size=8), asked=INTERVALS)
def test_spans_are_a_set_of_numbers(changes: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    spans, naive = Spans(), set[int]()
    for is_added, (begin, end) in changes:
        if is_added:
            spans.add(begin, end)
            naive.update(range(begin, end))
        else:
            spans.remove(begin, end)
            naive.difference_update(range(begin, end))
    assert numbers(list(spans)) == sorted(naive)
    # Neither empty, nor two that are one.
    bounds = [bound for span in spans for bound in span]
    assert bounds == sorted(set(bounds))
    assert numbers(spans.within(*asked)) == sorted(naive.intersection(range(*asked)))
    assert numbers(spans.missing(*asked)) == sorted(set(range(*asked)) - naive)


@settings(max_examples=25)
@given(sizes=st.lists(st.sampled_from([1, 128, 500, PAGE, PAGE + 1, 5 * PAGE]), min_size=1, max_size=12), data=st.data())
def test_pieces_of_a_segment_are_apart_and_used_again(sizes: list[int], data: st.DataObject) -> None:
    segment = Segment(0, 1)
    try:
        base = segment.in_use
        held: dict[int, tuple[int, int]] = {}
        for size in sizes:
            offset, nbytes = segment.allocate(size)
            assert nbytes >= size
            assert offset % (PAGE if size >= PAGE else 128) == 0
            assert offset >= base
            assert all(offset + nbytes <= begin or begin + length <= offset for begin, length in held.values())
            held[offset] = (offset, nbytes)
            segment.view(offset, nbytes, torch.uint8).fill_(len(held))
            if data.draw(st.booleans(), "whether one is given back"):
                segment.release(*held.pop(data.draw(st.sampled_from(sorted(held)), "which")))
                segment.unmap_free(data.draw(st.sampled_from([0, PAGE, 1 << 20]), "how many bytes stay mapped"))
            assert segment.in_use == base + sum(length for _, length in held.values())
        top = segment.reserved
        for piece in held.values():
            segment.release(*piece)
        assert segment.in_use == base
        # All of it is one piece again.
        assert segment.allocate(sum(length for _, length in held.values()) or 1)[0] <= -(-base // PAGE) * PAGE
        assert segment.reserved == top
    finally:
        segment.close()


def test_large_pieces_begin_huge_pages() -> None:
    segment = Segment(0, 1)
    try:
        base, large = segment.in_use, 8 * HUGE_PAGE
        offsets = [segment.allocate(nbytes)[0] for nbytes in (PAGE, large + PAGE, large, 1)]
        assert [offset % HUGE_PAGE for offset in offsets[1:3]] == [0, 0]
        assert all(segment.view(offset, 1, torch.uint8).data_ptr() % HUGE_PAGE == 0 for offset in offsets[1:3])
        # The room before them is not lost.
        assert offsets[3] < offsets[1]
        assert segment.in_use == base + 2 * PAGE + 2 * large + 128
    finally:
        segment.close()


def mapped_bytes(segment: Segment) -> int:
    """What this process has mapped of a segment, as the system counts it."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    first = f"{segment.view(0, 1, torch.uint8).data_ptr():x}-"
    assert any(line.startswith(first) for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def test_what_is_free_can_be_unmapped_again_and_again() -> None:
    segment = Segment(0, 1)
    try:
        for _ in range(2):
            piece = segment.allocate(64 * PAGE)
            segment.view(*piece, torch.uint8).fill_(1)
            assert mapped_bytes(segment) >= 64 * PAGE
            segment.release(*piece)
            segment.unmap_free(0)
            assert mapped_bytes(segment) < 64 * PAGE
    finally:
        segment.close()
