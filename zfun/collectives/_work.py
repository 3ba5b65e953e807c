"""The handle of a started collective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Work:
    """A started collective.

    The handle owns every buffer that the collective reads or writes until :meth:`wait` returns.

    The input must not be written before :meth:`wait` has returned, and every pending collective
    must be waited for.

    Args:
        finish: called once, by the first :meth:`wait`; returns the result.

    Example:
        >>> import torch
        >>> Work.done(torch.ones(2)).wait()
        tensor([1., 1.])
    """

    __slots__ = ("_error", "_finish", "_result")

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None
        self._error: BaseException | None = None

    @classmethod
    def done(cls, tensor: Tensor) -> Work:
        """Return the handle of a collective that is complete already."""
        pending = cls(lambda: tensor)
        pending.wait()
        return pending

    def wait(self) -> Tensor:
        """Wait for the collective and return the result.

        Further calls return the same tensor, or raise the same error.
        """
        if self._finish is not None:
            # The callable holds the buffers; dropping the callable frees the buffers.
            finish, self._finish = self._finish, None
            try:
                self._result = finish()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
