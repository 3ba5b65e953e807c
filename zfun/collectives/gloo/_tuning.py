"""Two settings of the system that make gloo faster between ranks of one host.

[Note: batch scheduling]

A thread of gloo wakes up whenever bytes arrive. By default the scheduler lets such a thread
preempt the thread that computes, which loses the processor and the caches. Linux has a scheduling
class of the same share but without preemption (``SCHED_BATCH``). Threads inherit the class of the
thread that starts them.

[Note: short send buffers]

The socket buffers of a connection may hold megabytes that the receiver has not read. Over a network
this keeps the link busy. Within a host every byte has then left the cache before the receiver reads
the byte, so connections within a host get short buffers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

# Linux doubles the value, for bookkeeping.
_BYTES = 1 << 17
_DESCRIPTORS = Path("/proc/self/fd")


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Let this thread, and threads started in this context for good, preempt no other thread."""
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":
            # Keep a class that the user has chosen. Where the system refuses, only speed is lost.
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(0) == os.SCHED_OTHER:
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                    stack.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        yield


@contextlib.contextmanager
def short_send_buffers() -> Iterator[None]:
    """Give short buffers to the connections within this host that are made in this context."""
    before = _sockets()
    yield
    for name, descriptor in _sockets().items():
        # The socket may be closed by now, or not be a socket with buffers; then only speed is lost.
        if name not in before:
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                if _is_within_host(connection):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BYTES)


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by an identity that no two sockets share."""
    found = {}
    with contextlib.suppress(OSError):
        for descriptor in _DESCRIPTORS.iterdir():
            # The descriptor of the folder itself is closed again.
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
