"""Threads that carry data beside a computation wait for their turn.

Such a thread wakes up whenever a few more bytes have come, and each time the scheduler would let it take the processor, and its caches,
from the thread that computes. Linux has a class of threads that get the same share, but interrupt nobody; a thread gives its class to those
that it starts.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["interrupting_nobody"]


@contextlib.contextmanager
def interrupting_nobody() -> Iterator[None]:
    """Let this thread, and for good those that are started in here, take its turn without interrupting others; where a system can."""
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            # What has been chosen for this process is not changed, and where it may not be changed nothing is lost but some time.
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                    stack.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        yield
