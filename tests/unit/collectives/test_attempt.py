"""The meeting of many ranks in one store: right, and few requests."""

from __future__ import annotations

import collections
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from zfun.collectives.backends import _attempt
from zfun.collectives.backends._attempt import attempt_store
from zfun.errors import PeerLost

SIZE = 256


class _Counted:
    """A rank's access to the store, which counts its requests and those that are long."""

    def __init__(self, store: dist.Store, long: int) -> None:
        self._store = store
        self._long = long
        self.requests = collections.Counter[str]()
        self.long = 0

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            answer = ask(*args)
            self.requests[name] += 1
            self.long += any(len(x) > self._long for x in (*args, answer) if hasattr(x, "__len__"))
            return answer

        return counted


def _meet(store: dist.Store, size: int, monkeypatch: pytest.MonkeyPatch) -> list[_Counted]:
    """Let ranks meet, rank 0 last."""
    counted = [_Counted(store, long=size) for _ in range(size)]
    monkeypatch.setattr(_attempt, "PrefixStore", lambda prefix, store: store)
    others_wait = threading.Event()

    def one(rank: int) -> Any:
        if rank == 0:
            others_wait.wait(1.0)
        return attempt_store(counted[rank], rank, size, 60.0)  # type: ignore[arg-type]

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(one, range(size)))
    return counted


def test_a_rank_sends_few_requests_in_a_large_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _meet(dist.HashStore(), SIZE, monkeypatch)
    for rank in ranks[1:]:
        # The token, the name, the confirmation, the list of the lost; nothing is long.
        assert sum(rank.requests.values()) - rank.requests["check"] == 4
        assert rank.long == 0
    polls = ranks[0].requests["check"]
    assert sum(ranks[0].requests.values()) <= 2 * polls + SIZE / 4


def test_tokens_of_ended_ranks_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()
    store.append("tokens", "0123456789abcdef\n")
    _meet(store, 3, monkeypatch)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()

    def one(rank: int) -> str:
        with pytest.raises(PeerLost, match="lost rank 2") as caught:
            attempt_store(store, rank, 3, 0.5)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(one, range(2)))) == 2
