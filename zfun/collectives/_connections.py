"""Connections between ranks of one host hold little.

The system lets a connection hold megabytes that one side has written and the other has not read yet. Over a network that keeps the wire
busy. Within a host it only means that every byte has left the cache by the time it is read, and that the room for it has too by the time it
is written: both sides wait for memory where they could copy from cache to cache.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["holding_little"]

# The system counts twice as much, for what it notes beside the data.
_BYTES = 1 << 17
_DESCRIPTORS = Path("/proc/self/fd")


@contextlib.contextmanager
def holding_little() -> Iterator[None]:
    """Let the connections within this host that are made in here hold little; where a system says which they are."""
    before = _sockets()
    yield
    for name, descriptor in _sockets().items():
        # It may have been closed meanwhile, or be none that can be set; nothing is lost then but some time.
        if name not in before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
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
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    return connection.getsockname()[0] == connection.getpeername()[0]
