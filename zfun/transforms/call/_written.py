"""A loss must not write to its parameters, which may be the memory of other ranks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from torch import Tensor

from zfun import ops
from zfun.errors import PlacementError, ZfunError
from zfun.layout import LeafSlot


def check_unwritten(
    views: Sequence[Tensor], slots: Sequence[LeafSlot], marks: Sequence[int] | None = None
) -> None:
    """Refuse a loss that has written to parameters; the error names the leaf.

    ``views`` were new tensors when the loss got them. ``marks`` are the :func:`marks_of` the views
    before the loss, to be compared too.
    """
    changed = [view._version for view in views]
    if marks is not None:
        changed = [*map(operator.or_, changed, map(operator.ne, marks_of(views), marks))]
    if any(changed):
        raise written(next(itertools.compress(slots, changed)).path)


def marks_of(leaves: Sequence[Tensor]) -> list[int]:
    """Return an integer for the values of each vector, because a version does not tell all.

    ``torch.batch_norm`` writes the running statistics, which are vectors, in kernels that leave the
    versions of the tensors as they are.
    """
    return [ops.fingerprint(leaf) if leaf.ndim == 1 else 0 for leaf in leaves]


def written(path: str) -> ZfunError:
    """Return the error about a leaf that a loss has written."""
    return ZfunError(
        f"a loss must not change its parameters in place; leaf {path!r} was changed; clone() it "
        "in the loss, or name the leaf in zf.zero(..., buffers=...), which keeps the values that "
        "the loss leaves; load the parameters again, because the shards may have the change",
        leaf=path,
    )


def outdated(path: str) -> PlacementError:
    """Return the error about a leaf that backward needs and that was written after the call."""
    return PlacementError(
        "backward uses the parameters of the forward pass; got a write to leaf "
        f"{path!r} between a call and its backward pass, or after a use in the call; write before "
        "the call, or after backward",
        leaf=path,
    )
