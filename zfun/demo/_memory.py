"""The peak of a process's memory."""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def forget_peak() -> int:
    """Reset the peak and return the bytes to compare :func:`peak_bytes` with.

    On a system that cannot reset the peak, the old peak is the baseline, and a later smaller peak
    counts as no growth.
    """
    gc.collect()
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the largest resident set since :func:`forget_peak`, in bytes."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
