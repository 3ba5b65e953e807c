"""Connections of strangers to every port on which some processes listen."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["knocking", "listening"]


class Knocks:
    """A count that prints itself."""

    def __init__(self) -> None:
        self.count = 0
        self.ports: set[int] = set()

    def __str__(self) -> str:
        return f"{self.count} messages to {len(self.ports)} ports"


def listening(pids: Iterable[int]) -> set[int]:
    """Return the TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(fd.readlink()))
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _message(chance: random.Random) -> bytes:
    return chance.choice(
        [
            b"",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(40),
            chance.randbytes(chance.randrange(1, 5000)),
            struct.pack("<QQ", 1 << chance.randrange(64), chance.randrange(1 << 32)),
            b"\0" * chance.randrange(1, 100),
            b"\xff" * chance.randrange(1, 100),
        ]
    )


@contextlib.contextmanager
def knocking(pids: list[int], ports: set[int], seed: int) -> Iterator[Knocks]:
    """Send garbage to the ports and to those of the processes, until the context ends."""
    chance, knocks, is_over = random.Random(seed), Knocks(), threading.Event()

    def knock() -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            for port in sorted(ports | listening(pids)):
                with contextlib.suppress(OSError):
                    one = socket.create_connection(("127.0.0.1", port), timeout=0.5)
                    one.sendall(_message(chance))
                    knocks.count += 1
                    knocks.ports.add(port)
                    # Some hang up at once, some stay and say no more.
                    held.append(one)
                    if chance.randrange(3):
                        held.pop().close()
            while len(held) > 20:
                held.pop(0).close()
            time.sleep(0.005)
        for one in held:
            one.close()

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield knocks
    finally:
        is_over.set()
        thread.join()
