"""Signs in bits and blocks in few bits: readable and compiled kernels agree to the last bit, and the error is what is stated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zfun import ops

FLOATS = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn, *, max_rows: int = 3, max_numel: int = 300) -> Tensor:
    """Numbers of every kind: zeros of both signs, subnormal ones, infinities and NaN among them."""
    shape = (draw(st.integers(1, max_rows)), draw(st.integers(0, max_numel)))
    values = draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32), fill=st.floats(-4, 4, width=32)))
    x = torch.from_numpy(values).to(draw(FLOATS))
    return x[:, ::2] if draw(st.booleans()) else x


@contextmanager
def readable() -> Iterator[None]:
    with mock.patch("zfun.ops._signs.twin_of", return_value=None):
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Cut small rows over threads, as large ones are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with mock.patch("zfun.ops._compiled._MIN_PER_THREAD", 64):
            yield
    finally:
        torch.set_num_threads(before)


@given(tensors(), st.integers(1, 2))
def test_signs_are_those_of_a_comparison_and_both_forms_agree(x: Tensor, num_threads: int) -> None:
    with threads(num_threads):
        packed = ops.pack_signs(x)
        back = ops.unpack_signs(packed, x.shape[1])
    with readable():
        assert torch.equal(packed, ops.pack_signs(x))
        assert torch.equal(back, ops.unpack_signs(packed, x.shape[1]))
    assert packed.shape == (x.shape[0], math.ceil(x.shape[1] / 8))
    expected = [[1.0 if value >= 0 else -1.0 for value in row] for row in x.tolist()]
    assert back.tolist() == expected
    assert torch.equal(ops.pack_signs(back), packed)


@given(tensors(max_rows=1), st.floats(0, 2**14, width=16) | st.just(math.nan) | st.just(math.inf), FLOATS)
def test_a_scale_comes_back_with_the_signs(x: Tensor, scale: float, dtype: torch.dtype) -> None:
    packed = ops.pack_signs(x)
    out = ops.unpack_signs(packed, x.shape[1], scale=torch.tensor([scale]), dtype=dtype)
    rounded = torch.tensor(scale, dtype=dtype)
    signs = ops.unpack_signs(packed, x.shape[1], dtype=dtype)
    torch.testing.assert_close(out, signs * rounded, rtol=0, atol=0, equal_nan=True)
    if math.isnan(scale):
        assert bool(out.isnan().all())
    with readable():
        again = ops.unpack_signs(packed, x.shape[1], scale=scale, dtype=dtype)[0]
    torch.testing.assert_close(out[0], again, rtol=0, atol=0, equal_nan=True)


def test_bits_behind_the_end_are_zero_and_bytes_are_filled_from_below() -> None:
    assert ops.pack_signs(torch.tensor([-1.0, 1.0, 1.0])).tolist() == [0b110]
    assert ops.pack_signs(torch.tensor([-1, 0, 3, -4, 5, 6, 7, 8, -9])).tolist() == [0b11110110, 0]
    assert ops.pack_signs(torch.tensor([-1e-300], dtype=torch.float64)).tolist() == [0]
