"""The heap of a rank on a CPU: what a step frees stays there for the next one, and lies on huge pages.

The C library gives memory at the end of its heap back to the system as soon as some tens of megabytes of it are free, and takes pages anew
when they are needed: after backward the activations go, in the next forward they come back, zeroed page by page. Whether that happens is
chance, for it depends on what lies at the end; of two ranks it may be one, and then the other waits for it.

And it grows by as much as is needed at the moment, in small pages, of which a matrix product of activations needs more addresses than the
processor remembers. So it is made to grow once by more than a step needs, as addresses without memory, for which the system is then asked
to use huge pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["prepare_heap"]

# Names and numbers of the GNU C library (malloc.h), and what it does by itself.
_TRIM_THRESHOLD, _TOP_PAD, _MAP_THRESHOLD = -1, -2, -3
_USUAL_PAD = 1 << 17
# The most that the function takes: what is free at the end of the heap beyond it is given back.
_MOST_FREE = 2**31 - 1
# As much as the library comes to by itself when large blocks are freed, which it does no more once the other is set. Larger blocks are
# mapped one by one, and given back when they are freed.
_LARGE = 1 << 25
# Addresses for activations and gradients; memory only where they are written.
_ROOM = 1 << 30
# Until the end of the heap moves, what is free before it is used up.
_MOST_BLOCKS = 64


def prepare_heap(environ: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees from now on, up to 2 GiB, and use huge pages for it, unless its environment says how its heap is.

    What is free now is given back: a model that has been built leaves holes that no activation fits in.

    Where there is another C library than GNU's, or there are no huge pages, nothing is lost but some time.

    Args:
        environ: the environment.

    Returns:
        Whether it keeps what it frees.
    """
    if sys.platform != "linux" or _is_chosen(environ):
        return False
    library = ctypes.CDLL(None)
    change = getattr(library, "mallopt", None)
    if change is None or not (change(_MAP_THRESHOLD, _LARGE) and change(_TRIM_THRESHOLD, _MOST_FREE)):
        return False
    library.malloc_trim(ctypes.c_size_t(0))
    _grow_on_huge_pages(library)
    return True


def _is_chosen(environ: Mapping[str, str]) -> bool:
    chosen = "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    return chosen or any(name in environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"))


def _grow_on_huge_pages(library: Any) -> None:
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    before = library.sbrk(0)
    if before is None or not library.mallopt(_TOP_PAD, _ROOM):
        return
    blocks: list[int | None] = []
    while library.sbrk(0) == before and len(blocks) < _MOST_BLOCKS:
        blocks.append(library.malloc(ctypes.c_size_t(_LARGE - mmap.PAGESIZE)))
    library.mallopt(_TOP_PAD, _USUAL_PAD)
    for block in blocks:
        library.free(ctypes.c_void_p(block))
    begin, end = -(-before // mmap.PAGESIZE) * mmap.PAGESIZE, library.sbrk(0)
    if begin < end:
        # A system that has no huge pages says so, which does not matter here.
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)
