"""Two settings of the system that make gloo faster between ranks of one host.

[Note: threads take turns]

A thread of gloo wakes up whenever more bytes have come. By default the scheduler lets such a thread
interrupt the thread that computes, and so take its processor and its caches. Linux has a class of
threads that get the same share but interrupt nobody (``SCHED_BATCH``). A thread gives its class to
the threads that it starts.

[Note: short sockets]

A connection may hold megabytes that one side has written and the other side has not read. Over a
network that keeps the wire busy. Within a host every byte has then left the cache before it is
read, so connections within a host get short buffers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["holding_little", "interrupting_nobody"]

# The system counts twice as much, for what it notes beside the data.
_BYTES = 1 << 17
_DESCRIPTORS = Path("/proc/self/fd")


@contextlib.contextmanager
def interrupting_nobody() -> Iterator[None]:
    """Let this thread, and for good those that are started in here, take its turn without interrupting others; where a system can."""
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            # What has been chosen for this process is not changed, and where it may not be changed
            # nothing is lost but some time.
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                    stack.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        yield


@contextlib.contextmanager
def holding_little() -> Iterator[None]:
    """Let the connections within this host that are made in here hold little; where a system says which they are."""
    before = _sockets()
    yield
    for name, descriptor in _sockets().items():
        # It may have been closed meanwhile, or be none that can be set; nothing is lost then but
        # some time.
        if name not in before:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                if _is_within_host(connection):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES)


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by what is never the same for two of them."""
    found = {}
    with contextlib.suppress(OSError):
        for descriptor in _DESCRIPTORS.iterdir():
            # That of the folder itself is closed again.
            with contextlib.suppress(OSError):
                found[str(descriptor.readlink())] = int(descriptor.name)
    return {name: descriptor for name, descriptor in found.items() if name.startswith("socket:")}


def _is_within_host(connection: socket.socket) -> bool:
    if connection.type != socket.SOCK_STREAM or connection.family not in (
        socket.AF_INET,
        socket.AF_INET6,
    ):
        return False
    return connection.getsockname()[0] == connection.getpeername()[0]
