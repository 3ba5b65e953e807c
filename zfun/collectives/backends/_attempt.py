"""A part of the store that only the living ranks of one attempt use.

[Note: attempts]

``torchrun --max-restarts`` keeps the store when it starts the ranks again, with the addresses and
the counts of the ranks that have ended. The number of restarts tells attempts apart on one host
only, because on several hosts each agent counts its own. So the ranks agree on a random name
through the store. Each rank leaves a random token. Rank 0 answers each token with the name, and
reads the tokens again until every rank has confirmed the name, because a token may belong to a rank
that has ended. Then rank 0 tells the others which ranks have not come.

Tokens are lines of one key, and so are confirmations. So rank 0 reads those of all ranks in one
request, and the other ranks read nothing whose length grows with the group.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import PrefixStore, Store

from zfun.errors import PeerLost

_SHORTEST_NAP_S, _LONGEST_NAP_S = 5e-4, 0.25


def attempt_store(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """Return a part of the store that is new to all ranks. See [Note: attempts].

    The store may have keys of ranks that have ended. A rank that did not come raises
    :class:`PeerLost`.
    """
    meeting = PrefixStore("zfun/attempt", store)
    try:
        name = (_answer if rank == 0 else _ask)(meeting, rank, size, timeout_s)
    except RuntimeError as error:
        raise never_came([0], rank, timeout_s) from error
    return PrefixStore(f"zfun/{name}", store)


def holder_of_store(ranks: Sequence[int]) -> int | None:
    """Return the position of rank 0 of the program among ranks if its process holds the store.

    An agent such as torchrun's holds the store itself, and says so.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return None if agent or 0 not in ranks else list(ranks).index(0)


def try_for(seconds: float, ask: Callable[[], object]) -> bool:
    """Ask the store something in another thread; return whether the store answers in time."""
    answered: list[bool] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            ask()
            answered.append(True)

    thread = threading.Thread(target=run, name="zfun store", daemon=True)
    thread.start()
    thread.join(timeout=seconds)
    return bool(answered)


def _ask(store: Any, rank: int, size: int, timeout_s: float) -> str:
    token = secrets.token_hex(8)
    store.append("tokens", f"{token}\n")
    if not await_keys(store, [f"name/{token}"], timeout_s):
        raise never_came([0], rank, timeout_s)
    name = store.get(f"name/{token}").decode()
    store.append(f"confirmed/{name}", f"{rank}\n")
    # Rank 0 may have come later than this rank, and then waits longer.
    if not await_keys(store, [f"lost/{name}"], timeout_s + 1.0):
        raise never_came([0], rank, timeout_s)
    lost = json.loads(store.get(f"lost/{name}"))
    if lost:
        raise never_came(lost, rank, timeout_s)
    return name


def _answer(store: Any, rank: int, size: int, timeout_s: float) -> str:
    name = secrets.token_hex(8)
    unconfirmed, answered = set(range(size)) - {rank}, set[str]()
    started = time.monotonic()
    while unconfirmed:
        tokens = set(_lines(store, "tokens")) - answered
        if tokens:
            store.multi_set([f"name/{token}" for token in tokens], [name] * len(tokens))
            answered |= tokens
        unconfirmed -= {int(line) for line in _lines(store, f"confirmed/{name}")}
        if unconfirmed and not _nap(started, timeout_s):
            break
    store.set(f"lost/{name}", json.dumps(sorted(unconfirmed)))
    if unconfirmed:
        # This process may hold the store, and the others look once in a while.
        time.sleep(2 * _LONGEST_NAP_S)
        raise never_came(sorted(unconfirmed), rank, timeout_s)
    return name


def _lines(store: Store, key: str) -> list[str]:
    return store.get(key).decode().split() if store.check([key]) else []


def await_keys(store: Store, keys: Sequence[str], timeout_s: float) -> bool:
    """Wait until the keys exist; return whether they do in time.

    After a timeout, the store's own wait may leave an answer on the connection, which the next
    question then receives. A store in a stopped process never answers.
    """
    exist: list[bool] = []

    def ask() -> None:
        started = time.monotonic()
        while not store.check(list(keys)):
            if not _nap(started, timeout_s):
                return
        exist.append(True)

    return try_for(timeout_s + 0.5, ask) and bool(exist)


def never_came(lost: Sequence[int], rank: int, timeout_s: float) -> PeerLost:
    """Return the error about ranks that do not take part in the making of a group."""
    named = " and ".join(f"rank {peer}" for peer in lost) or "a rank"
    return PeerLost(
        f"every rank makes the group; rank {rank} lost {named}, which did not come within "
        f"{timeout_s:g} s; read the output of {named}, and if it is only slow pass a larger "
        "timeout_s to process_group()",
        rank=rank,
    )


def _nap(started: float, timeout_s: float) -> bool:
    """Sleep for a fraction of the time waited so far; return whether there is time left."""
    waited = time.monotonic() - started
    if waited >= timeout_s:
        return False
    time.sleep(min(max(waited / 8, _SHORTEST_NAP_S), _LONGEST_NAP_S, timeout_s - waited))
    return True
