"""The rendezvous of ranks that share memory: they pass descriptors of segments over sockets.

The sockets stay open. The system closes the sockets of a process that ends, so a waiting rank
learns at once that another rank has died.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from zfun.collectives.backends._attempt import await_keys
from zfun.collectives.shm._memory import SharedMemory
from zfun.collectives.shm._segment import Peer, Segment

_RENDEZVOUS_S = 20.0


def rendezvous(
    store: Store, rank: int, size: int, timeout_s: float, wanted: bool | None
) -> SharedMemory | str:
    """Map the segments of all ranks, or return the reason if a rank cannot.

    All ranks return the same answer. A rank with ``wanted=False`` only tells the others. The error
    is ``TimeoutError`` if a rank does not answer.
    """
    store = PrefixStore("shared", store)
    with contextlib.ExitStack() as stack:
        segment: Segment | None = None
        listener: socket.socket | None = None
        problem, name = (
            "it was made with shared_memory=False" if wanted is False else _unsupported(),
            "",
        )
        if not problem:
            try:
                segment = Segment(rank, size)
                stack.callback(os.close, segment.fd)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                name = f"zfun-{secrets.token_hex(16)}"
                listener.bind("\0" + name)
                listener.listen(size)
            except (OSError, ValueError, OverflowError) as error:
                problem = f"memory cannot be mapped there: {error}"
        offers = exchange_texts(
            store,
            "offer",
            rank,
            size,
            timeout_s,
            json.dumps([problem, host_name(), name]),
            answer=wanted is not False,
        )
        found = _first_problem([json.loads(offer) for offer in offers], rank, size)
        if found or segment is None or listener is None:
            return found or problem
        peers: dict[int, Peer] = {}
        try:
            peers = _exchange_segments(
                segment, listener, [json.loads(offer)[2] for offer in offers], rank
            )
        except (OSError, ValueError, struct.error) as error:
            problem = f"rank {rank} cannot map the memory of the others: {error}"
        for peer in peers.values():
            stack.callback(peer.close)
        # A rank that this one has not answered need not wait.
        listener.close()
        problems = exchange_texts(store, "mapped", rank, size, timeout_s, problem)
        if any(problems):
            return next(filter(None, problems))
        stack.pop_all()
        return SharedMemory(segment, peers, rank, timeout_s)


def _unsupported() -> str:
    """Return the reason why this process cannot share memory, or an empty text."""
    if sys.platform != "linux":
        return f"it runs on {sys.platform}, not on Linux"
    if platform.machine() != "x86_64":
        return f"its processor ({platform.machine()}) may reorder stores; x86-64 does not"
    missing = [
        name
        for module, name in ((os, "memfd_create"), (os, "posix_fallocate"), (socket, "send_fds"))
        if not hasattr(module, name)
    ]
    return f"its Python has no {missing[0]}" if missing else ""


def host_name() -> str:
    """Name the system, the network namespace and the user: equal if memory can be shared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/net").readlink()
    except OSError:
        # Then the sockets of ranks on different hosts fail to connect.
        return ""
    return f"{boot} {namespace} {os.getuid()}"


def _first_problem(offers: Sequence[Sequence[str]], rank: int, size: int) -> str:
    if len(offers) < size:
        return offers[0][0] if offers else ""
    for peer, (problem, host, _) in enumerate(offers):
        if problem:
            return f"rank {peer} cannot take part: {problem}"
        if host != offers[0][1]:
            return (
                f"ranks 0 and {peer} are on different hosts, or belong to different users or "
                "networks of one"
            )
    return ""


def exchange_texts(
    store: Any,
    key: str,
    rank: int,
    size: int,
    timeout_s: float,
    text: str,
    *,
    answer: bool = True,
) -> list[str]:
    """Publish a text in the store and return the texts of all ranks, in rank order.

    With ``answer=False`` this rank does not wait for the others and returns no texts.

    Raises:
        TimeoutError: a rank did not publish a text in time.
    """
    store.set(f"{key}/{rank}", text)
    if not answer:
        return []
    keys = [f"{key}/{peer}" for peer in range(size)]
    if not await_keys(store, keys, timeout_s):
        raise TimeoutError(f"a rank did not join the group within {timeout_s:g} s")
    texts: list[bytes] = store.multi_get(keys)
    return [text.decode() for text in texts]


def _exchange_segments(
    segment: Segment, listener: socket.socket, names: Sequence[str], rank: int
) -> dict[int, Peer]:
    """Send every other rank the descriptor of this rank's segment, and map the segments of all.

    All ranks listen already, and the messages fit the buffers of the sockets, so no rank waits for
    another rank to connect.
    """
    others = [peer for peer in range(len(names)) if peer != rank]
    with contextlib.ExitStack() as stack:
        asked: dict[int, socket.socket] = {}
        for peer in others:
            asked[peer] = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            asked[peer].settimeout(_RENDEZVOUS_S)
            asked[peer].connect("\0" + names[peer])
            asked[peer].sendall(struct.pack("<q", rank))
        answered: dict[int, socket.socket] = {}
        listener.settimeout(_RENDEZVOUS_S)
        while len(answered) < len(others):
            connection = stack.enter_context(listener.accept()[0])
            connection.settimeout(_RENDEZVOUS_S)
            # Abstract names of sockets have no permissions, so processes of other users are
            # refused here.
            if _credentials(connection)[1] != os.getuid():
                connection.close()
                continue
            (peer,) = struct.unpack("<q", connection.recv(8, socket.MSG_WAITALL))
            if peer not in others or peer in answered:
                raise OSError("a process outside the group connected")
            # A peer that has failed meanwhile tells why through the store; the others need answers.
            with contextlib.suppress(BrokenPipeError):
                socket.send_fds(connection, [b"\0"], [segment.fd])
            answered[peer] = connection
        peers: dict[int, Peer] = {}
        for peer, connection in asked.items():
            _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
            try:
                pid, user = _credentials(connection)
                if user != os.getuid():
                    raise OSError("another user answered")
                peers[peer] = Peer(fd, peer, len(names), (connection, answered[peer]), pid)
                stack.callback(peers[peer].close)
            finally:
                os.close(fd)
        stack.pop_all()
        return peers


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a socket."""
    pid, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, user
