"""What a step frees stays in the process, for the next step.

The C library gives memory at the end of its heap back to the system as soon as some tens of megabytes of it are free, and takes pages anew
when they are needed: after backward the activations go, in the next forward they come back, zeroed page by page. Whether that happens is
chance, for it depends on what lies at the end; of two ranks it may be one, and then the other waits for it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

__all__ = ["keep_freed_memory"]

# Names and numbers of the GNU C library (malloc.h).
_TRIM_THRESHOLD, _MAP_THRESHOLD = -1, -3
# The most that the function takes: what is free at the end of the heap beyond it is given back.
_MOST_FREE = 2**31 - 1
# As much as the library comes to by itself when large blocks are freed, which it does no more once the other is set. Larger blocks are
# mapped one by one, and given back when they are freed.
_LARGE = 1 << 25


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees, up to 2 GiB, unless its environment says how it is to be; return whether it does.

    Where there is another C library than GNU's, nothing is lost but some time.
    """
    if sys.platform != "linux" or _is_chosen(environ):
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)
    return change is not None and bool(change(_MAP_THRESHOLD, _LARGE) and change(_TRIM_THRESHOLD, _MOST_FREE))


def _is_chosen(environ: Mapping[str, str]) -> bool:
    chosen = "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    return chosen or any(name in environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"))
