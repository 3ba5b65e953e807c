"""Ranges of addresses: what they show, and for how long."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zfun.collectives._mapping import HUGE_PAGE, PAGE, Mapping
from zfun.collectives._region import Region

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("zfun test")
    os.ftruncate(fd, 4 * HUGE_PAGE)
    os.pwrite(fd, bytes(range(256)) * (4 * HUGE_PAGE // 256), 0)
    yield fd
    os.close(fd)


def _num_mapped() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:zfun test")


@settings(max_examples=20)
@given(num_pages=st.integers(1, 1200), phase=st.integers(0, HUGE_PAGE // PAGE - 1))
def test_a_range_begins_between_two_huge_pages_where_it_should(num_pages: int, phase: int) -> None:
    made = Mapping(num_pages * PAGE, phase * PAGE)
    assert made.begin % HUGE_PAGE == phase * PAGE
    found = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    # A neighbour of the same kind may have grown together with it.
    assert any(int(low, 16) <= made.begin and made.begin + made.nbytes <= int(high, 16) for low, high in found)


def test_pages_stay_what_they_are(file: int) -> None:
    made = Mapping(2 * HUGE_PAGE)
    made.show(0, HUGE_PAGE, file, HUGE_PAGE, writable=True, shared=True)
    made.show(HUGE_PAGE, HUGE_PAGE, file, 0, writable=True, shared=False)
    window = made.window()
    assert window[5] == window[HUGE_PAGE + 5] == 5
    window[5], window[HUGE_PAGE + 5] = 77, 78
    for change in (made.collapse, made.unmap, made.populate):
        # Whether the system heeds it or not.
        change(0, HUGE_PAGE)
        assert window[5] == 77
        assert bytes(window[6:100]) == bytes(range(6, 100))
    assert window[HUGE_PAGE + 5] == 78
    # One of them is the file's own page.
    assert os.pread(file, 1, HUGE_PAGE + 5) == b"\x4d"
    assert os.pread(file, 1, 5) == b"\x05"
    assert not made.advise(0, 0, mmap.MADV_DONTNEED)


def test_a_range_lives_as_long_as_its_windows(file: int) -> None:
    made = Mapping(HUGE_PAGE)
    made.show(0, HUGE_PAGE, file, 0, writable=True, shared=True)
    piece = made.window()[300:400]
    assert _num_mapped() == 1
    del made
    assert bytes(piece[:3]) == bytes([44, 45, 46])
    del piece
    assert _num_mapped() == 0
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Mapping(1 << 47)


@settings(max_examples=10)
@given(places=st.lists(st.sampled_from([0, 1, 5, 512, 507]), min_size=2, max_size=3), num_huge=st.integers(3, 4))
def test_a_region_has_huge_pages_where_all_pieces_lie_alike(places: list[int], num_huge: int) -> None:
    fd, nbytes = os.memfd_create("zfun test"), num_huge * HUGE_PAGE + 5 * PAGE
    try:
        os.ftruncate(fd, 4 * HUGE_PAGE)
        for rank in range(len(places)):
            region = Region([(fd, place * PAGE) for place in places], nbytes, rank)
            apart = [(place * PAGE - region.begin - index * nbytes) % HUGE_PAGE for index, place in enumerate(places)]
            assert apart[rank] == 0
            assert region.has_huge_pages == (num_huge == 4 and not any(apart))
    finally:
        os.close(fd)
