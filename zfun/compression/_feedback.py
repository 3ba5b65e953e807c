"""Error feedback: the errors of messages, kept for the next messages."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from zfun import ops
from zfun.errors import OptionError
from zfun.options import integer, number, takes


@takes(err_beta=number(0, below=1), reset=integer(0))
class ErrorFeedback:
    """The errors of messages, kept by the sender until the next message of the same place.

    Made by :func:`error_feedback`.

    These errors are the only state of a step outside its arguments and results. As with a store,
    the object belongs to the caller. Each rank keeps its own errors; simulated ranks may
    share one object.

    Attributes:
        err_beta: share of the old error that stays; 0 adds the whole error of the last message.
        reset: after so many messages of a place the error is dropped; 0 for never.
    """

    __slots__ = ("_kept", "_lock", "_planned", "err_beta", "reset")

    def __init__(self, err_beta: float, reset: int) -> None:
        self.err_beta = err_beta
        self.reset = reset
        # The errors of real steps, and those of plans, which have shapes and no numbers.
        self._kept: dict[tuple[int, str], tuple[int, Tensor]] = {}
        self._planned: dict[tuple[int, str], tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"error_feedback(err_beta={self.err_beta}, reset={self.reset})"

    def kept(self, rank: int = 0) -> dict[str, Tensor]:
        """Return the errors of a rank, by place, for a checkpoint.

        Args:
            rank: the rank.

        Returns:
            A tensor for each place, and the number of messages so far as ``"<place> count"``.
        """
        with self._lock:
            mine = {place: entry for (owner, place), entry in self._kept.items() if owner == rank}
        return {place: kept for place, (_, kept) in mine.items()} | {
            f"{place} count": torch.tensor(count, device="cpu")
            for place, (count, _) in mine.items()
        }

    def restore(self, kept: Mapping[str, Tensor], rank: int = 0) -> None:
        """Replace the errors of a rank by those that :meth:`kept` returned.

        Args:
            kept: the errors by place.
            rank: the rank.

        Raises:
            OptionError: a number of messages is missing.
        """
        for place in kept:
            if not place.endswith(" count") and f"{place} count" not in kept:
                raise OptionError(
                    f"restore() takes what kept() returned; got {place!r} without "
                    f"'{place} count'; save all entries"
                )
        fresh = {
            (rank, place): (int(kept[f"{place} count"]), tensor.clone())
            for place, tensor in kept.items()
            if not place.endswith(" count")
        }
        with self._lock:
            self._kept = {key: entry for key, entry in self._kept.items() if key[0] != rank} | fresh

    def _take(self, rank: int, place: str, rows: Tensor) -> tuple[int, Tensor | None]:
        """Return the number of messages of a place, and the error of the last one."""
        with self._lock:
            entries = self._planned if ops.is_abstract(rows) else self._kept
            count, kept = entries.get((rank, place), (0, None))
        if getattr(kept, "fake_mode", None) is not getattr(rows, "fake_mode", None):
            return 0, None  # The errors are those of an earlier plan.
        if kept is not None and kept.shape != rows.shape:
            raise OptionError(
                f"an error feedback is for the gradients of one layout; got {rows.numel()} "
                f"numbers in {rows.shape[0]} messages for {place}, after {kept.numel()} in "
                f"{kept.shape[0]}; make one with zf.compression.error_feedback() for each "
                "training run"
            )
        return count, kept

    def _keep(self, rank: int, place: str, count: int, lost: Tensor) -> None:
        with self._lock:
            entries = self._planned if ops.is_abstract(lost) else self._kept
            entries[rank, place] = (count, lost)


@takes(err_beta=number(0, below=1), reset=integer(0))
def error_feedback(*, err_beta: float = 0.8, reset: int = 1024) -> ErrorFeedback:
    """Make error feedback: the rounding errors of messages are sent later.

    Before numbers x are encoded, the error e of the last message of the same place is added:
    ``c = x + e``. The receiver decodes q, and the sender keeps
    ``e' = e err_beta + (c - q) (1 - err_beta)``. With ``err_beta = 0``, q and the new error add up
    to c, to the last bit: gradients arrive late, but completely. A larger ``err_beta`` smooths the
    noise of single steps. The mean of many messages is then still right, because the error grows by
    ``(1 - err_beta) (x - q)`` in each step. Errors that are not finite are dropped.

    Error feedback costs the memory of a whole gradient on every rank, in the dtype of the
    gradients. A skipped step changes the errors too.

    Args:
        err_beta: share of the old error that stays, from 0 to less than 1.
        reset: after so many messages the errors are dropped, because they stem from gradients of
            long ago; 0 for never.

    Returns:
        The ``feedback`` of ``int4(feedback=...)`` and ``int8(feedback=...)``.

    Raises:
        OptionError: numbers out of range.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     codec = zf.compression.int4(feedback=error_feedback(err_beta=0.0))
        ...     x = torch.tensor([1.0, 10.0, 0.0, 0.0]) * (1 - group.rank)
        ...     sums = [zf.compression.reduce_scatter(x, group, codec)[0] for _ in range(30)]
        ...     return torch.stack(sums)
        >>> sums = zf.simulate(2, main)[0]
        >>> sums[:4]  # a step of the scale, 10 / 7, or nothing
        tensor([1.4286, 0.0000, 1.4286, 1.4286])
        >>> sums.mean()
        tensor(1.0000)
    """
    return ErrorFeedback(err_beta, reset)
