"""Ranks that save or load together: all succeed, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zfun.collectives import Group, gather_json, global_ranks
from zfun.errors import CheckpointError, ZfunError

_T = TypeVar("_T")


def attempt(fn: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return the result of ``fn``, or its error, which :func:`agree` raises on all ranks."""
    try:
        return fn(), None
    except Exception as error:  # noqa: BLE001
        return None, error


def report_of(error: Exception | None) -> dict[str, Any] | None:
    """Describe an error to the other ranks."""
    if error is None:
        return None
    return {
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "path": getattr(error, "path", None),
        "errno": getattr(error, "errno", None),
        "leaf": getattr(error, "leaf", None),
    }


def error_from(report: dict[str, Any], rank: int) -> CheckpointError:
    """Return the error that a rank raises because another rank failed."""
    return CheckpointError(
        f"all ranks save and load together, and rank {rank} failed: {report['message']}",
        path=report["path"],
        errno=report["errno"],
        leaf=report["leaf"],
        rank=rank,
    )


def agree(group: Group, error: Exception | None, value: Any = None) -> list[Any]:
    """Return the JSON value of every rank, or raise on all ranks if one has an error.

    Raises:
        Exception: the error of this rank, or else of the lowest rank that failed.
    """
    # A failure that is no error of zfun, a KeyboardInterrupt, ends this process, and so the group.
    found = gather_json([report_of(error), value if error is None else None], group, "checkpoint")
    failed = [rank for rank, (report, _) in enumerate(found) if report is not None]
    if not failed:
        return [mine for _, mine in found]
    if error is not None:
        if isinstance(error, ZfunError) and error.rank is None:
            error.rank = global_ranks(group)[group.rank]
        raise error
    raise error_from(found[failed[0]][0], global_ranks(group)[failed[0]])
