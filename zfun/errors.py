"""The errors of zfun: few types, and one form of message (rule, value, remedy)."""

from __future__ import annotations

import os
from typing import Any

__all__ = [
    "AliasChanged",
    "CheckpointError",
    "CollectiveMismatch",
    "ConfigError",
    "CorruptCheckpoint",
    "DonatedStateError",
    "ForkError",
    "LeafError",
    "NonFiniteError",
    "NotElementwiseError",
    "OffloadError",
    "OptionError",
    "PeerLost",
    "PlacementError",
    "SpecMismatch",
    "UntrustedCheckpoint",
    "ZfunError",
]


class ZfunError(Exception):
    """The base of every error that zfun raises.

    Args:
        message: one sentence first: the rule, the value, the remedy.
        rank: the rank that raised, where known.
        step: the training step, where known.
        leaf: the tree path of the leaf at fault, or the name of its bucket.
        collective: the collective at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        leaf: str | None = None,
        collective: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.leaf = leaf
        self.collective = collective


class PlacementError(ZfunError):
    """A value has a placement that the operation cannot take."""


class SpecMismatch(ZfunError):
    """Two trees, layouts or ranks that must agree do not."""


class AliasChanged(SpecMismatch):
    """Leaves that were tied are not any more, or the other way round."""


class LeafError(ZfunError, TypeError):
    """A leaf that cannot be sharded or trained."""


class OptionError(ZfunError, TypeError, ValueError):
    """An option that does not exist, or a value out of range."""


class ConfigError(OptionError):
    """A configuration of another library that has mistakes; the message lists all of them.

    Args:
        message: the number of mistakes, and one line for each.
        mistakes: one record for each, with ``path``, ``rule``, ``got`` and ``remedy``.
    """

    def __init__(self, message: str, *, mistakes: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.mistakes = mistakes


class DonatedStateError(ZfunError):
    """A value whose buffers a later step has taken over was used again."""


class ForkError(ZfunError):
    """A fork used a group, or a value in shared memory, of the parent process."""


class NotElementwiseError(ZfunError):
    """An optimizer mixes elements of a leaf and so cannot run on shards."""


class NonFiniteError(ZfunError):
    """Too many steps in a row had gradients that are not finite."""


class OffloadError(ZfunError):
    """A store could not keep or return a part of the state.

    Args:
        message: the rule, the problem, the remedy.
        path: the file at fault, for a store on a disk.
        errno: the number of the system's error, as in the module ``errno``.
        where: ``rank``, ``step`` and ``leaf``, where known.
    """

    def __init__(
        self, message: str, *, path: str | None = None, errno: int | None = None, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.path = path
        self.errno = errno

    def __str__(self) -> str:
        where = {"leaf": self.leaf, "rank": self.rank}
        known = ", ".join(f"{key} {value}" for key, value in where.items() if value is not None)
        return f"{super().__str__()}{known and f' [{known}]'}"


class CheckpointError(ZfunError):
    """A checkpoint could not be written, read or found.

    Args:
        message: the rule, the problem, the remedy.
        path: the file or directory at fault.
        errno: the number of the system's error, as in the module ``errno``.
        where: ``rank``, ``step`` and ``leaf``, where known.
    """

    def __init__(
        self, message: str, *, path: str | None = None, errno: int | None = None, **where: Any
    ) -> None:
        super().__init__(message, **where)
        self.path = path
        self.errno = errno


class CorruptCheckpoint(CheckpointError):
    """The bytes of a checkpoint are not those that were written, or break the format."""


class UntrustedCheckpoint(CorruptCheckpoint):
    """A checkpoint of another library asks for code to run, or for a file elsewhere."""


class PeerLost(ZfunError):
    """Another rank raised, died or did not answer in time."""


class CollectiveMismatch(ZfunError):
    """Ranks issued different collectives at the same place."""


def check_process(maker: int, thing: str) -> None:
    """Check that this process made a group or a value, and is not a fork of the maker.

    Args:
        maker: the process that made the thing.
        thing: the thing, for the message.

    Raises:
        ForkError: this process is a fork.
    """
    process = os.getpid()
    if process != maker:
        raise ForkError(
            f"{thing} belongs to the process that made it; got a use in process {process}, a fork "
            f"of process {maker}; give a fork ordinary tensors, such as those of unshard(), or "
            "start the process with the method 'spawn'"
        )
