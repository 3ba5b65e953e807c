"""The published states of the ranks, and the reasons why a collective cannot complete.

See [Note: why a collective does not complete].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zfun.collectives._ops import Stream
from zfun.errors import CollectiveMismatch, PeerLost, ZfunError

# The remedy where ranks wait for each other.
SAME_ORDER = "let all ranks call the same functions in the same order, around a sharded loss too"
HAS_LEFT = "it has left the group; every rank must take part in every collective"


@dataclass(frozen=True, slots=True)
class Status:
    """The published state of a rank.

    Attributes:
        started: the number of collectives started in each stream.
        recent: the last collectives: stream, then index, then description. JSON keys are strings.
        waiting: stream and index of the collectives that the rank waits for.
        left: whether the rank has closed the group.
    """

    started: tuple[int, ...] = (0,) * len(Stream)
    recent: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    waiting: tuple[tuple[int, int], ...] = ()
    left: bool = False

    def call(self, stream: int, index: int) -> str | None:
        """Return the description of a collective, if started and still recorded."""
        return self.recent.get(str(stream), {}).get(str(index))

    def has_started(self, stream: int, index: int) -> bool:
        return self.started[stream] > index


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason why a collective will not complete.

    Attributes:
        message: the reason.
        mismatch: whether the ranks differ; otherwise a rank is lost.
        lost: this rank, if known.
    """

    message: str
    mismatch: bool = False
    lost: int | None = None

    def error(self, rank: int, collective: str, leaf: str | None = None) -> ZfunError:
        if self.mismatch:
            return CollectiveMismatch(self.message, rank=rank, collective=collective, leaf=leaf)
        who = "a rank" if self.lost is None else f"rank {self.lost}"
        did = "was given up by the other ranks" if self.lost == rank else f"lost {who}"
        text = f"rank {rank} {did} in {collective}: {self.message}"
        return PeerLost(text, rank=rank, collective=collective, leaf=leaf)


def diagnose(
    rank: int, own: Status, peers: Mapping[int, Status], *, certain: bool = True
) -> Verdict | None:
    """Say why the collectives that this rank waits for cannot complete, if the states tell.

    ``certain`` says that the states are the same as at the last look, so that ranks which wait for
    each other will wait for ever.

    Example:
        >>> own = Status((1, 0, 0), {"0": {"0": "all_gather 'a'"}}, ((0, 0),))
        >>> other = Status((1, 0, 0), {"0": {"0": "all_gather 'b'"}}, ((0, 0),))
        >>> diagnose(0, own, {1: other}).mismatch
        True
    """
    for stream, index in own.waiting:
        text = own.call(stream, index)
        for peer, status in sorted(peers.items()):
            other = status.call(stream, index)
            if text is not None and other is not None and text != other:
                return different(index, (rank, text), (peer, other))
            if status.has_started(stream, index):
                continue
            if status.left:
                return Verdict(HAS_LEFT, lost=peer)
            circle = [
                (theirs, at) for theirs, at in status.waiting if not own.has_started(theirs, at)
            ]
            if circle and certain:
                theirs, at = circle[0]
                (low, low_text), (high, high_text) = sorted(
                    [
                        (rank, f"collective {index} ({text})"),
                        (peer, f"collective {at} ({status.call(theirs, at)})"),
                    ]
                )
                return Verdict(
                    f"the ranks wait for each other in different collectives: rank {low} in "
                    f"{low_text}, rank {high} in {high_text}; {SAME_ORDER}",
                    mismatch=True,
                )
    return None


def different(index: int, *sides: tuple[int, str]) -> Verdict:
    """Return the verdict on two ranks that have started different collectives.

    ``index`` is the place in the stream; each side is a rank and its collective.
    """
    (low, low_text), (high, high_text) = sorted(sides)
    return Verdict(
        f"all ranks must start the same collectives in the same order; at collective {index} of "
        f"its stream rank {low} started {low_text}, and rank {high} started {high_text}",
        mismatch=True,
    )


def end_of_suspicion(peer: int | None, suspects: Mapping[int, int], rank: int) -> int | None:
    """Return the last rank of a chain in which each rank suspects the next one.

    A rank that suspects another is alive, so in a circle nobody but ``peer`` may be lost.

    Example:
        >>> end_of_suspicion(1, {1: 2}, rank=0)
        2
        >>> end_of_suspicion(1, {1: 0}, rank=0)
        1
    """
    end, passed = peer, {rank}
    while end in suspects and end not in passed:
        passed.add(end)
        end = suspects[end]
    return peer if end in passed else end
