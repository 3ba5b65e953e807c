"""A flat buffer that has not been written: where what belongs in it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zfun.ops import _jit
from zfun.ops._jit import wide
from zfun.ops._table import AddressTable

__all__ = ["Pieces", "pieces_of"]

_NOTHING = np.zeros(0, np.int64)


class Pieces:
    """What :func:`ravel_into` would write, or a stretch of it, while it lies where it was made.

    Who adds buffers of several ranks can read this rank's own term so, and save the way to memory and back. It holds the tensors, which
    must not be written meanwhile. Made by :func:`pieces_of`.

    Attributes:
        dtype: of the buffer.
        scale: factor applied to every element.
    """

    __slots__ = ("_begin", "_end", "_like", "_places", "_source_dtype", "_tensors", "dtype", "scale")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        places: Any,
        like: Any,
        source_dtype: torch.dtype,
        stretch: tuple[int, int],
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        self._tensors = tensors
        self._places = places
        self._like = like
        self._source_dtype = source_dtype
        self._begin, self._end = stretch
        self.dtype = dtype
        self.scale = scale

    def numel(self) -> int:
        """The number of elements."""
        return self._end - self._begin

    @property
    def num_tensors(self) -> int:
        """How many tensors it holds."""
        return len(self._tensors)

    def __getitem__(self, span: slice) -> Pieces:
        """Return a stretch of it, which holds no more tensors than lie in it."""
        begin, end, _ = span.indices(self.numel())
        stretch = self._begin + begin, self._begin + end
        starts, stops, _ = self._places
        here = slice(int(stops.searchsorted(stretch[0], "right")), int(starts.searchsorted(stretch[1])))
        return Pieces(self._tensors[here], self._places[:, here], self._like, self._source_dtype, stretch, self.dtype, self.scale)

    @property
    def is_alike(self) -> bool:
        """Whether the tensors are of the dtype of the buffer."""
        return self.dtype == self._source_dtype

    def arguments(self) -> tuple[Any, Any, Any]:
        """Return what kernels take: places and addresses, an array of the dtype of the tensors, and the factor."""
        places = self._places.copy()
        places[:2] -= self._begin
        return places, self._like, _jit.number(wide(self.dtype))(self.scale)

    def write(self, out: Tensor) -> Tensor:
        """Write it to a buffer of its length and dtype, and return that."""
        from zfun.ops import _ravel_cpu

        array, kernel, past = _jit.as_array(out), _jit.telling(_ravel_cpu.ravel), _jit.is_large(out)
        places, like, factor = self.arguments()
        exact = self.is_alike and self.scale == 1.0
        _jit.in_parts(array.size, lambda begin, end: kernel(places, like, array, begin, end, factor, exact, past, _NOTHING))
        torch.autograd.graph.increment_version(out)
        return out


def pieces_of(
    tensors: Sequence[Tensor | None], offsets: Sequence[int], numel: int, *, dtype: torch.dtype, scale: float, table: AddressTable
) -> Pieces | None:
    """Return what :func:`ravel_into` would write, without writing it; ``None`` where no compiled kernel can read it so.

    Args:
        tensors: what belongs in the buffer, as for :func:`ravel_into`.
        offsets: where each begins, in elements of the buffer.
        numel: length of the buffer.
        dtype: dtype of the buffer.
        scale: factor applied to every element.
        table: where addresses are kept between the calls for one bucket.

    Returns:
        The whole of it.

    Example:
        >>> pieces = pieces_of([torch.ones(2), torch.ones(1)], [0, 3], 4, dtype=torch.float32, scale=2.0, table=AddressTable())
        >>> pieces[1:].write(torch.empty(3))
        tensor([2., 0., 2.])
    """
    if not _jit.compiled() or not table.point_at(tensors, offsets, numel) or (table.needs_grad and torch.is_grad_enabled()):
        return None
    present = [x for x in tensors if x is not None and x.numel()]
    return Pieces(present, table.pieces.copy(), table.like, table.dtype, (0, numel), dtype, scale)
