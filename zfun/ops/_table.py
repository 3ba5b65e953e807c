"""Where tensors lie, so that a kernel can take many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from zfun.ops._tensors import is_plain, number


class AddressTable:
    """Addresses of the tensors of one buffer, kept between calls to save time.

    Make one for each bucket of a layout and pass it to every :func:`ravel_into` of that bucket.
    Tensors are checked and their addresses read again at each call, unless ``tensors`` is the very
    tuple of the last call: then the table keeps the addresses. So pass a tuple twice only if no
    tensor in it was given other memory in between (``.data =``, ``set_``, ``resize_``). A table
    holds references to the tensors of the last call; :meth:`clear` drops them. One thread may use a
    table at a time.

    Example:
        >>> from zfun.ops import ravel_into
        >>> table, out, leaves = AddressTable(), torch.empty(4), (torch.ones(2), torch.ones(1))
        >>> offsets = (0, 3)
        >>> for scale in (1.0, 2.0):
        ...     ravel_into(out, leaves, offsets, scale=scale, table=table)
        >>> out
        tensor([2., 2., 0., 2.])
    """

    __slots__ = ("_guards", "_kept", "_key", "_tensors", "dtype", "like", "needs_grad", "pieces")

    def __init__(self, *, kept: bool = True) -> None:
        """Make an empty table; without ``kept``, no call prepares for the next one."""
        self._kept = kept
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._tensors: Sequence[Tensor | None] | None = None
        self._key: tuple[Any, ...] = ()
        self._guards: Any = None
        self.needs_grad = False
        self.dtype = torch.float32
        self.like: Any = None
        self.pieces: Any = None

    def point_at(
        self, tensors: Sequence[Tensor | None], offsets: Sequence[int], numel: int
    ) -> bool:
        """Read where tensors lie.

        Args:
            tensors: the tensors to copy; ``None`` for none.
            offsets: where each begins in the buffer.
            numel: length of the buffer.

        Returns:
            Whether a compiled kernel may take them: they are plain and of one dtype, and ascend
            without overlap within the buffer.
        """
        known = (
            len(self._key) == 2
            and self._key[1] == numel
            and (self._key[0] is offsets or self._key[0] == tuple(offsets))
        )
        if known and self._tensors is tensors and type(tensors) is tuple:
            return True
        # Gradients are new tensors in each step, of the same shapes: one call checks them all.
        if known and self._guards is not None and self._guards.check(*tensors):
            self._tensors = tensors
            addresses = map(Tensor.data_ptr, tensors)  # type: ignore[arg-type]
            self.pieces[2] = np.fromiter(addresses, np.int64, len(tensors))
            return True
        return self._read(tensors, offsets, numel)

    def _read(self, tensors: Sequence[Tensor | None], offsets: Sequence[int], numel: int) -> bool:
        self.clear()
        pairs = [
            (x, start)
            for x, start in zip(tensors, offsets, strict=True)
            if x is not None and x.numel()
        ]
        present = [x for x, _ in pairs]
        if not is_plain(*present) or len({x.dtype for x in present}) != 1:
            return False
        self.needs_grad = any(x.requires_grad for x in present)
        starts = np.array([start for _, start in pairs], np.int64)
        stops = starts + np.fromiter(map(Tensor.numel, present), np.int64, len(present))
        if starts[0] < 0 or stops[-1] > numel or (starts[1:] < stops[:-1]).any():
            return False
        self._tensors = tensors
        self._key = (offsets if type(offsets) is tuple else tuple(offsets), numel)
        self.dtype = present[0].dtype
        self.like = np.empty(0, number(self.dtype))
        self.pieces = np.stack(
            [starts, stops, np.fromiter(map(Tensor.data_ptr, present), np.int64, len(present))]
        )
        if self._kept and len(present) == len(tensors):
            self._guards = _guards(present)
        return True


def _guards(tensors: list[Tensor]) -> Any:
    """Make a check that tensors are of the same kind as these, if torch has guards."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        made = TensorGuards(
            *tensors,
            dynamic_dims_sizes=cast("Any", [list(x.shape) for x in tensors]),
            dynamic_dims_strides=cast("Any", [list(x.stride()) for x in tensors]),
        )
        return made if made.check(*tensors) else None
    except (ImportError, TypeError, ValueError, RuntimeError):
        return None
