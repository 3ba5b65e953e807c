"""What messages lose, kept for the next ones."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from zfun.errors import OptionError, checked_options

__all__ = ["ErrorFeedback", "error_feedback"]


class ErrorFeedback:
    """What messages lost, kept by their sender until the next message of the same place. Made by :func:`error_feedback`.

    It is the one part of a step that is not in the values that go in and come out: as a store, it belongs to who made it. A rank keeps what
    is its own; simulated ranks may share one object.

    Attributes:
        err_beta: how slowly it learns; 0 adds all that was lost.
        reset: after how many messages of a place what is kept is forgotten; 0 never does.
    """

    __slots__ = ("_kept", "_lock", "err_beta", "reset")

    def __init__(self, err_beta: float, reset: int) -> None:
        self.err_beta = err_beta
        self.reset = reset
        self._kept: dict[tuple[int, str], tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"error_feedback(err_beta={self.err_beta}, reset={self.reset})"

    def kept(self, rank: int = 0) -> dict[str, Tensor]:
        """Return what a rank keeps, by place, for a checkpoint.

        Args:
            rank: the rank.

        Returns:
            A tensor for each place, and its number of messages so far as ``"<place> count"``.
        """
        with self._lock:
            mine = {place: entry for (owner, place), entry in self._kept.items() if owner == rank}
        return {place: kept for place, (_, kept) in mine.items()} | {
            f"{place} count": torch.tensor(count) for place, (count, _) in mine.items()
        }

    def restore(self, kept: Mapping[str, Tensor], rank: int = 0) -> None:
        """Take over what :meth:`kept` returned; what the rank kept before is forgotten.

        Args:
            kept: what was kept.
            rank: the rank.
        """
        fresh = {
            (rank, place): (int(kept[f"{place} count"]), tensor.clone()) for place, tensor in kept.items() if not place.endswith(" count")
        }
        with self._lock:
            self._kept = {key: entry for key, entry in self._kept.items() if key[0] != rank} | fresh

    def _take(self, rank: int, place: str, rows: Tensor) -> tuple[int, Tensor | None]:
        """Return how many messages of a place there were, and what is kept of the last."""
        with self._lock:
            count, kept = self._kept.get((rank, place), (0, None))
        if kept is not None and kept.shape != rows.shape:
            raise OptionError(
                f"an error feedback is for the gradients of one layout; got {rows.numel()} numbers in {rows.shape[0]} messages for "
                f"{place}, after {kept.numel()} in {kept.shape[0]}; make one with zf.compression.error_feedback() for each training run"
            )
        return count, kept

    def _keep(self, rank: int, place: str, count: int, lost: Tensor) -> None:
        with self._lock:
            self._kept[rank, place] = (count, lost)


@checked_options
def error_feedback(*, err_beta: float = 0.8, reset: int = 1024) -> ErrorFeedback:
    """Make room for what messages lose, so that it is sent later.

    Before numbers x are written, what is kept of the same place is added: ``c = x + e``. Of what comes back as q the sender keeps
    ``e' = e err_beta + (c - q) (1 - err_beta)``. With ``err_beta = 0`` what is sent and what is kept make up c, to the last bit: nothing is
    ever lost, only late. A larger one smooths the noise of single steps; no direction is lost in the long run either, since what is kept
    grows by ``(1 - err_beta) (x - q)`` each time. What is not finite is not kept.

    It costs a whole gradient of memory on every rank, in the dtype of the gradients. A step that is skipped leaves what was kept changed.

    Args:
        err_beta: how slowly it learns, from 0 to less than 1.
        reset: after how many messages what is kept is forgotten, since the gradients that it belongs to are long past; 0 for never.

    Returns:
        What ``int4(feedback=...)`` and ``int8(feedback=...)`` take.

    Raises:
        OptionError: numbers out of range.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     codec = zf.compression.int4(feedback=error_feedback(err_beta=0.0))
        ...     x = torch.tensor([1.0, 10.0, 0.0, 0.0]) * (1 - group.rank)
        ...     return torch.stack([zf.compression.reduce_scatter(x, group, codec)[0] for _ in range(30)])
        >>> sums = zf.simulate(2, main)[0]
        >>> sums[:4]  # a step of the scale, 10 / 7, or nothing
        tensor([1.4286, 0.0000, 1.4286, 1.4286])
        >>> sums.mean()
        tensor(1.0000)
    """
    if not 0 <= err_beta < 1:
        raise OptionError(f"err_beta is a number from 0 to less than 1; got {err_beta!r}; 0 keeps all that was lost")
    if type(reset) is not int or reset < 0:
        raise OptionError(f"reset is a number of messages; got {reset!r}; 0 never forgets")
    return ErrorFeedback(err_beta, reset)
