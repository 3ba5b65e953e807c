"""The records through which the ranks of a group tell each other how they are.

[Note: requests to the store]

One store serves all ranks, so nothing here costs more requests where the group has more ranks.
Events that every rank must hear of (an error, a suspicion, an exit) are lines of one journal, which
one request reads. Texts that only one reader needs have a key for each rank.

Records are JSON, so that bytes from a peer cannot run code.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed import Store

from zfun.collectives.backends._diagnosis import Status, Verdict

_JOURNAL = "journal"


@dataclass(slots=True)
class News:
    """The journal, read.

    Attributes:
        errors: the ranks that have published an error, in order of time; those that pass another
            rank's error on stand last.
        suspects: for each rank whose wait is broken, the rank that it suspects.
        left: for each rank that has closed the group, the collectives it started in each stream.
    """

    errors: list[int] = field(default_factory=list)
    suspects: dict[int, int] = field(default_factory=dict)
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Board:
    """One rank's access to the records in a store. See [Note: requests to the store]."""

    def __init__(self, store: Store, rank: int) -> None:
        # torch's stubs lack append().
        self._store: Any = store
        self._rank = rank

    def set_status(self, status: Status) -> None:
        self._store.set(f"status/{self._rank}", json.dumps(asdict(status)))

    def status_of(self, peer: int) -> Status | None:
        record = self._read(f"status/{peer}")
        if record is None:
            return None
        waiting = tuple((int(stream), int(index)) for stream, index in record["waiting"])
        return Status(tuple(record["started"]), record["recent"], waiting, bool(record["left"]))

    def add_error(self, verdict: Verdict, *, passed_on: bool) -> None:
        self._store.set(f"error/{self._rank}", json.dumps(asdict(verdict)))
        self._add("error", passed_on)

    def error_of(self, peer: int) -> Verdict:
        record = json.loads(self._store.get(f"error/{peer}"))
        return Verdict(str(record["message"]), bool(record["mismatch"]), record["lost"])

    def add_suspect(self, suspect: int) -> None:
        self._add("suspect", suspect)

    def add_exit(self, status: Status) -> None:
        self.set_status(status)
        self._add("exit", status.started)

    def read_news(self) -> News:
        news, passed_on = News(), list[int]()
        lines = self._store.get(_JOURNAL) if self._store.check([_JOURNAL]) else b""
        for line in lines.splitlines():
            rank, kind, content = json.loads(line)
            match kind:
                case "error":
                    (passed_on if content else news.errors).append(rank)
                case "suspect":
                    news.suspects[rank] = content
                case _:
                    news.left[rank] = tuple(content)
        news.errors += passed_on
        return news

    def _add(self, kind: str, content: object) -> None:
        self._store.append(_JOURNAL, json.dumps([self._rank, kind, content]) + "\n")

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
