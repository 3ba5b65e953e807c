"""The errors of zfun: few types, and one form of message (rule, value, remedy)."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = [
    "AliasChanged",
    "CollectiveMismatch",
    "DonatedStateError",
    "LeafError",
    "NonFiniteError",
    "NotElementwiseError",
    "OffloadError",
    "OptionError",
    "PeerLost",
    "PlacementError",
    "SpecMismatch",
    "ZfunError",
]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class ZfunError(Exception):
    """The base of every error that zfun raises.

    Args:
        message: one sentence first: the rule, the value, the remedy.
        rank: the rank that raised, where known.
        step: the training step, where known.
        leaf: the tree path of the leaf at fault.
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


class DonatedStateError(ZfunError):
    """A value whose buffers a later step has taken over was used again."""


class NotElementwiseError(ZfunError):
    """An optimizer mixes elements of a leaf and so cannot run on shards."""


class NonFiniteError(ZfunError):
    """Too many steps in a row had gradients that are not finite."""


class OffloadError(ZfunError):
    """A store could not keep or return a part of the state."""


class PeerLost(ZfunError):
    """Another rank raised, died or did not answer in time."""


class CollectiveMismatch(ZfunError):
    """Ranks issued different collectives at the same place."""


def checked_options(fn: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Make ``fn`` answer an unknown keyword with the nearest name that exists.

    Args:
        fn: a function with keyword options.

    Returns:
        The same function; unknown keywords raise before the call.

    Raises:
        OptionError: from the returned function, for a keyword that ``fn`` does not take.

    Example:
        >>> @checked_options
        ... def train(*, bucket_bytes=1): ...
        >>> train(bucket_byte=2)
        Traceback (most recent call last):
        ...
        zfun.errors.OptionError: train() has no option 'bucket_byte'; did you mean 'bucket_bytes'?
    """
    known = list(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def wrapper(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                raise OptionError(f"{fn.__name__}() has no option {name!r}; {remedy}")
        return fn(*args, **kwargs)

    return wrapper
