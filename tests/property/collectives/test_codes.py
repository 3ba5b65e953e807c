"""Signs in bits and blocks in few bits: readable and compiled kernels agree to the last bit, and
the error is within the stated bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zfun import ops

FLOATS = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


@st.composite
def tensors(draw: st.DrawFn, *, max_rows: int = 3, max_numel: int = 300) -> Tensor:
    """Numbers of every kind, with zeros of both signs, subnormal numbers, infinities and NaN."""
    shape = (draw(st.integers(1, max_rows)), draw(st.integers(0, max_numel)))
    values = draw(
        hnp.arrays(np.float32, shape, elements=st.floats(width=32), fill=st.floats(-4, 4, width=32))
    )
    x = torch.from_numpy(values).to(draw(FLOATS))
    return x[:, ::2] if draw(st.booleans()) else x


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Split small rows between threads, as large rows are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with (
            mock.patch("zfun.ops.numba._compile._MIN_PER_THREAD", 64),
            mock.patch("zfun.ops.numba._codes._CHUNK", 64),
        ):
            yield
    finally:
        torch.set_num_threads(before)


@given(tensors(), st.integers(1, 2))
def test_signs_are_those_of_a_comparison_and_both_forms_agree(x: Tensor, num_threads: int) -> None:
    with threads(num_threads):
        packed = ops.pack_signs(x)
        back = ops.unpack_signs(packed, x.shape[1])
    with ops.use("reference"):
        assert torch.equal(packed, ops.pack_signs(x))
        assert torch.equal(back, ops.unpack_signs(packed, x.shape[1]))
    assert packed.shape == (x.shape[0], math.ceil(x.shape[1] / 8))
    expected = [[1.0 if value >= 0 else -1.0 for value in row] for row in x.tolist()]
    assert back.tolist() == expected
    assert torch.equal(ops.pack_signs(back), packed)


@given(
    tensors(max_rows=1),
    st.floats(0, 2**14, width=16) | st.just(math.nan) | st.just(math.inf),
    FLOATS,
)
def test_signs_are_decoded_with_the_scale(x: Tensor, scale: float, dtype: torch.dtype) -> None:
    packed = ops.pack_signs(x)
    out = ops.unpack_signs(packed, x.shape[1], scale=torch.tensor([scale]), dtype=dtype)
    rounded = torch.tensor(scale, dtype=dtype)
    signs = ops.unpack_signs(packed, x.shape[1], dtype=dtype)
    torch.testing.assert_close(out, signs * rounded, rtol=0, atol=0, equal_nan=True)
    if math.isnan(scale):
        assert bool(out.isnan().all())
    with ops.use("reference"):
        again = ops.unpack_signs(packed, x.shape[1], scale=scale, dtype=dtype)[0]
    torch.testing.assert_close(out[0], again, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_a_scale_keeps_the_digits_of_the_result(kernels: str) -> None:
    packed = torch.tensor([0b01], dtype=torch.uint8)
    with ops.use(kernels):
        out = ops.unpack_signs(packed, 2, scale=0.1, dtype=torch.float64)
    assert out.tolist() == [0.1, -0.1]


def test_bits_behind_the_end_are_zero_and_bytes_are_filled_from_below() -> None:
    assert ops.pack_signs(torch.tensor([-1.0, 1.0, 1.0])).tolist() == [0b110]
    assert ops.pack_signs(torch.tensor([-1, 0, 3, -4, 5, 6, 7, 8, -9])).tolist() == [0b11110110, 0]
    assert ops.pack_signs(torch.tensor([-1e-300], dtype=torch.float64)).tolist() == [0]


BITS = st.sampled_from([8, 4])
BLOCKS = st.sampled_from([2, 6, 32, 64, 256])


@given(tensors(), BITS, BLOCKS, st.integers(1, 2), FLOATS)
def test_both_forms_of_block_codes_agree_to_the_last_bit(
    x: Tensor, bits: int, block: int, num_threads: int, dtype: torch.dtype
) -> None:
    numel = x.shape[1]
    with threads(num_threads):
        messages = ops.quantise(x, bits=bits, block=block)
        back = ops.dequantise(messages, numel, bits=bits, block=block, dtype=dtype)
        total = ops.sum_dequantised(messages, numel, bits=bits, block=block, dtype=dtype)
    assert messages.shape == (x.shape[0], ops.message_bytes(numel, bits=bits, block=block))
    with ops.use("reference"):
        assert torch.equal(messages, ops.quantise(x, bits=bits, block=block))
        torch.testing.assert_close(
            back,
            ops.dequantise(messages, numel, bits=bits, block=block, dtype=dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        again = ops.sum_dequantised(messages, numel, bits=bits, block=block, dtype=dtype)
        torch.testing.assert_close(total, again, rtol=0, atol=0, equal_nan=True)


@given(tensors(), BITS, BLOCKS)
def test_decoding_is_within_half_a_step_and_the_error_is_exact(
    x: Tensor, bits: int, block: int
) -> None:
    numel, q = x.shape[1], 127 if bits == 8 else 7
    messages = ops.quantise(x, bits=bits, block=block)
    back = ops.dequantise(messages, numel, bits=bits, block=block, dtype=torch.float64)
    for row, out in zip(x.float().split(block, 1), back.split(block, 1), strict=True):
        for numbers, result in zip(row.double(), out, strict=True):
            if not numbers.isfinite().all():
                assert result.isnan().all()
                continue
            peak = float(numbers.abs().max()) if numbers.numel() else 0.0
            # Half a step of the scale. The scale is rounded to float32, and the product is rounded
            # once more.
            bound = max(peak / q, 2.0**-126) / 2 * (1 + 2.0**-15)
            assert bool((result[numbers == 0] == 0).all())
            if peak < 2.0**127:
                assert bool(((numbers - result).abs() <= bound).all())
                sent, lost = result.float(), numbers.float() - result.float()
                assert bool((sent.double() + lost.double() == numbers).all())
                assert torch.equal(sent + lost, numbers.float())


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_rounded_to_the_nearest_and_ties_to_even(bits: int) -> None:
    q = 127 if bits == 8 else 7
    x = torch.tensor([[q, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.51, -q]], dtype=torch.float32)
    back = ops.dequantise(ops.quantise(x, bits=bits, block=16), 9, bits=bits, block=16)
    assert back.tolist() == [[q, 0, 2, 2, 0, -2, -2, 1, -q]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_that_is_not_finite_does_not_change_other_blocks(bits: int, bad: float) -> None:
    x = torch.ones(1, 12)
    x[0, 5] = bad
    back = ops.dequantise(ops.quantise(x, bits=bits, block=4), 12, bits=bits, block=4)[0]
    assert back.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert back[:4].tolist() == back[8:].tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_messages_may_lie_in_memory_in_any_order(kernels: str) -> None:
    messages = ops.quantise(torch.arange(24.0).view(3, 8), bits=8, block=8)
    columns = messages.t().contiguous().t()
    with ops.use(kernels):
        for read in (ops.dequantise, ops.sum_dequantised):
            found, expected = (read(x, 8, bits=8, block=8) for x in (columns, messages))
            assert torch.equal(found, expected)


def test_float64_beyond_float32_does_not_turn_finite() -> None:
    x = torch.tensor([[1e300, 1.0]], dtype=torch.float64)
    assert bool(ops.dequantise(ops.quantise(x, bits=8, block=2), 2, bits=8, block=2).isnan().all())
