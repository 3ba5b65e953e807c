"""Small host values of all ranks, and their comparison before anything depends on them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from zfun.collectives._group import Group, board_of, global_ranks
from zfun.collectives._ops import AllGather, AllToAll, Broadcast, Collective, Op, Stream
from zfun.collectives._work import Work
from zfun.errors import SpecMismatch
from zfun.options import GROUP, TENSOR, TEXT, each, instance, takes

_SHOWN = 3


@takes(x=TENSOR, group=GROUP, name=TEXT)
def gather_values(x: Tensor, group: Group, name: str) -> Tensor:
    """Gather a small tensor of any shape from every rank.

    Args:
        x: of the same shape, dtype and type of device on all ranks.
        group: the ranks.
        name: a name, for messages and logs.

    Returns:
        A tensor of shape ``[size, *x.shape]``.

    Example:
        >>> from zfun.collectives import simulate
        >>> rank_of = lambda group: torch.tensor(group.rank)
        >>> simulate(2, lambda group: gather_values(rank_of(group), group, "rank").tolist())
        [[0, 1], [0, 1]]
    """
    return _sent(x, group, name, AllGather()).view(group.size, *x.shape)


@takes(x=TENSOR, group=GROUP, name=TEXT)
def exchange_values(x: Tensor, group: Group, name: str) -> Tensor:
    """Exchange rows: row j of rank i becomes row i of rank j.

    Args:
        x: ``[size, n]``, of the same shape and dtype on all ranks.
        group: the ranks.
        name: a name, for messages and logs.

    Returns:
        ``[size, n]``.

    Example:
        >>> from zfun.collectives import simulate
        >>> rows = torch.tensor([[1], [2]])
        >>> simulate(2, lambda group: exchange_values(rows, group, "rows").tolist())
        [[[1], [1]], [[2], [2]]]
    """
    return _sent(x, group, name, AllToAll()).view(group.size, -1)


def gather_json(value: Any, group: Group, name: str) -> list[Any]:
    """Return the JSON value of every rank, in rank order."""
    if group.size == 1:
        return [value]
    text = json.dumps(value, separators=(",", ":")).encode()
    lengths = gather_values(torch.tensor(len(text)), group, f"{name} lengths")
    padded = torch.frombuffer(bytearray(text.ljust(int(lengths.max()))), dtype=torch.uint8)
    return [json.loads(row.numpy().tobytes()) for row in gather_values(padded, group, name)]


def start_json(value: Any, group: Group, root: int, name: str, part: str) -> list[Work]:
    """Start to send a JSON value to the other ranks, which call :func:`receive_json`."""
    text = json.dumps(value).encode()
    board = board_of(group)
    if board is not None:
        board.values[global_ranks(group)[root], (name, part, *global_ranks(group))] = text
    return [
        _broadcast(torch.tensor([len(text)]), group, root, name, f"{part}, length of the form"),
        _broadcast(_as_tensor(text), group, root, name, f"{part}, form"),
    ]


def receive_json(group: Group, root: int, name: str, part: str) -> Any:
    """Wait for a value of :func:`start_json`."""
    length = _broadcast(
        torch.zeros(1, dtype=torch.int64), group, root, name, f"{part}, length of the form"
    ).wait()
    board = board_of(group)
    if board is None:
        text = torch.empty(int(length), dtype=torch.uint8)
        text = _broadcast(text, group, root, name, f"{part}, form").wait()
        return json.loads(bytes(text.tolist()))
    found = board.read(global_ranks(group)[root], (name, part, *global_ranks(group)))
    _broadcast(torch.empty(len(found), dtype=torch.uint8), group, root, name, f"{part}, form")
    return json.loads(found)


def _broadcast(x: Tensor, group: Group, root: int, name: str, part: str) -> Work:
    return group.start(Collective(Broadcast(root), name, part), x, x)


@takes(group=GROUP)
def barrier(group: Group) -> None:
    """Return when every rank has called this function.

    Args:
        group: the ranks.

    Example:
        >>> from zfun.collectives import single_group
        >>> barrier(single_group())
    """
    gather_values(torch.zeros(1, dtype=torch.uint8), group, "barrier")


def _sent(x: Tensor, group: Group, name: str, op: Op) -> Tensor:
    call = Collective(op, name, stream=Stream.CONTROL)
    return group.start(call, x.detach().contiguous().view(-1)).wait()


@dataclass(frozen=True, slots=True)
class LeafRecord:
    """The record of one leaf on one rank.

    Args:
        path: the tree path.
        description: shape and dtype, in words.
        fingerprint: a digest of the value, where values must agree too.
    """

    path: str
    description: str
    fingerprint: str | int = ""

    @classmethod
    def of_option(cls, name: str, value: object) -> Self:
        """Return the record of an option, without the addresses that ``repr`` shows.

        Example:
            >>> LeafRecord.of_option("stage", 3).description
            '3'
        """
        return cls(name, re.sub(r" at 0x[0-9a-f]+", "", str(value)))


@takes(
    entries=each(
        instance(LeafRecord, "a LeafRecord", "LeafRecord('w', '(2,)')"),
        "a sequence of LeafRecords",
        "[LeafRecord('w', '(2,)')]",
    ),
    group=GROUP,
    what=TEXT,
    kind=TEXT,
)
def check_same(
    entries: Sequence[LeafRecord], group: Group, what: str, *, kind: str = "leaf"
) -> None:
    """Check that all ranks pass the same records, at the cost of one gather of 32 bytes per rank.

    If the digests differ, the ranks gather the records themselves, so that the error can name the
    leaves, the ranks and their records.

    Args:
        entries: the records of this rank, leaf by leaf; the order counts.
        group: the ranks.
        what: the things compared, for the message.
        kind: a word for one of the things, for the message.

    Raises:
        SpecMismatch: on all ranks, if any two differ.

    Example:
        >>> from zfun.collectives import simulate
        >>> try:
        ...     mine = lambda group: [LeafRecord("w", f"({group.rank + 3},) float32")]
        ...     simulate(2, lambda group: check_same(mine(group), group, "params"))
        ... except SpecMismatch as error:
        ...     print(error)
        all ranks must hold the same params; leaf w is (3,) float32 on rank 0 and (4,) float32
        on rank 1
    """
    text = json.dumps(
        [[entry.path, entry.description, str(entry.fingerprint)] for entry in entries]
    ).encode()
    digests = gather_values(_as_tensor(hashlib.sha256(text).digest()), group, "digest")
    if bool((digests == digests[0]).all()):
        return
    lengths = gather_values(torch.tensor(len(text)), group, "digest lengths")
    padded = text.ljust(int(lengths.max()), b" ")
    texts = gather_values(_as_tensor(padded), group, "digest texts")
    # Messages name global ranks, in ascending order.
    known = global_ranks(group)
    order = sorted(range(group.size), key=known.__getitem__)
    numbers = [known[rank] for rank in order]
    sides = [
        [LeafRecord(*fields) for fields in json.loads(bytes(texts[rank].tolist()))]
        for rank in order
    ]
    differences = _differences(sides, numbers, kind)
    more = f" (and {len(differences) - _SHOWN} more)" if len(differences) > _SHOWN else ""
    first = differences[0][0] if differences else None
    listed = "; ".join(difference for _, difference in differences[:_SHOWN])
    raise SpecMismatch(
        f"all ranks must hold the same {what}; {listed}{more}",
        rank=known[group.rank],
        leaf=first if kind == "leaf" else None,
    )


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _differences(
    sides: Sequence[Sequence[LeafRecord]], numbers: Sequence[int], kind: str
) -> list[tuple[str, str]]:
    """Return for each leaf that differs its path and a sentence."""
    by_path = [{entry.path: entry for entry in side} for side in sides]
    paths = dict.fromkeys(path for side in by_path for path in side)
    found: list[tuple[str, str]] = []
    for path in paths:
        entries = [side.get(path) for side in by_path]
        if len(set(entries)) == 1:
            continue
        described = ["missing" if entry is None else entry.description for entry in entries]
        if len(set(described)) > 1:
            found.append((path, f"{kind} {path} is {_by_side(described, numbers)}"))
        else:
            prints = ["" if entry is None else str(entry.fingerprint) for entry in entries]
            found.append(
                (path, f"leaf {path} has other values: fingerprint {_by_side(prints, numbers)}")
            )
    if not found:
        orders = [", ".join(entry.path for entry in side[:8]) for side in sides]
        found.append(
            (sides[0][0].path, f"the leaves come in another order: {_by_side(orders, numbers)}")
        )
    return found


def _by_side(values: Sequence[str], numbers: Sequence[int]) -> str:
    """Say which ranks hold which value.

    Example:
        >>> _by_side(["a", "b", "a"], range(3))
        'a on ranks 0, 2 and b on rank 1'
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(numbers, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return " and ".join(
        f"{value} on {'rank' if len(ranks) == 1 else 'ranks'} {_listed(ranks)}"
        for value, ranks in ranks_of.items()
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
