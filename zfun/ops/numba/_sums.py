"""Compiled: the sum of several buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from zfun.ops._tensors import as_array, number, wide
from zfun.ops.numba._compile import entry, in_parts, jit
from zfun.ops.numba._float_bits import narrow, widen
from zfun.ops.numba._simd import pointer

# Elements whose sum stays in the first cache until all terms are added, so that the sum may take
# the place of any term.
_CHUNK = 1 << 9


@jit
def _add_up(addresses: Any, out: Any, begin: Any, end: Any, one: Any) -> None:
    """Add the elements from ``begin`` to ``end`` of buffers in their order, and round once.

    Args:
        addresses: int64 ``[n]``: where each buffer lies.
        out: where the sum goes, of the dtype of the buffers.
        begin: the first element.
        end: the element behind the last.
        one: 1, in the dtype that is computed in.
    """
    total = np.empty(_CHUNK, type(one))
    for at in range(begin, end, _CHUNK):
        size = min(_CHUNK, end - at)
        for k in range(addresses.size):
            term = carray(pointer(addresses[k] + at * out.itemsize, out), (size,))
            if k == 0:
                for i in range(term.size):
                    total[i] = widen(term[i], one)
            else:
                for i in range(term.size):
                    total[i] += widen(term[i], one)
        target = out[at : at + size]
        for i in range(target.size):
            target[i] = narrow(total[i], out)


def sum_in_rank_order(terms: Sequence[Tensor], out: Tensor) -> None:
    array, add_up = as_array(out).reshape(-1), entry(_add_up)
    addresses = np.fromiter((term.data_ptr() for term in terms), np.int64, len(terms))
    one = number(wide(out.dtype))(1.0)
    in_parts(array.size, lambda begin, end: add_up(addresses, array, begin, end, one))
    torch.autograd.graph.increment_version(out)
