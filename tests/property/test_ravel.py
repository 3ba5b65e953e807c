"""Laws of the copies between leaves and buffers: plain torch and compiled kernels agree in every
bit.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import FORM, examples
from zfun import ops
from zfun.ops._exact import LIMBS, LOWEST

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Each pair of dtypes compiles a kernel, so only a long run takes all sixteen.
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
]
if FORM != "everyday":
    PAIRS = list(itertools.product(DTYPES, DTYPES))
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    6e-8,
    1e-40,
    65504.0,
    65520.0,
    3.4e38,
    1e300,
    5e-324,
]


@st.composite
def leaves(
    draw: st.DrawFn, dtypes: list[torch.dtype]
) -> tuple[list[Tensor | None], list[int], int]:
    """Tensors of a few shapes with any values at any offset, gaps between the tensors, and the
    length of a buffer.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    tensors: list[Tensor | None] = []
    offsets = []
    end = 0
    for _ in range(draw(st.integers(0, 6))):
        end += draw(st.sampled_from([0, 0, 1, 31, 64]))
        offsets.append(end)
        if draw(st.integers(0, 7)) == 0:
            tensors.append(None)
            continue
        shape = draw(
            st.sampled_from([(), (0, 3), (1,), (5, 7), (31,), (64,), (33, 33), (5000,), (70000,)])
        )
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw(
            st.integers(-40, 6)
        )
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)) if x.numel() else ():
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
        x = x.to(draw(st.sampled_from(dtypes)))
        kind = draw(st.sampled_from(["plain", "plain", "plain", "strided", "negative", "shifted"]))
        if kind == "strided" and x.dim() == 2:
            x = x.t()
        elif kind == "negative" and x.dtype in (torch.float32, torch.float64):
            x = torch.complex(x, x).conj().imag
        elif kind == "shifted":
            x = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(shape)
        tensors.append(x)
        end += x.numel()
    return tensors, offsets, end + draw(st.sampled_from([0, 1, 32, 100]))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal in every bit, except that any NaN equals any NaN: torch itself
    writes several.
    """
    nan = torch.isnan(x)
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return (
        x.dtype == y.dtype
        and torch.equal(nan, torch.isnan(y))
        and torch.equal(x.view(raw)[~nan], y.view(raw)[~nan])
    )


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from(PAIRS), st.sampled_from([1.0, 0.25, 1 / 3, -7.7]), st.booleans())
def test_compiled_and_plain_copies_agree_in_every_bit(
    data: st.DataObject, pair: tuple[torch.dtype, torch.dtype], scale: float, mixed: bool
) -> None:
    source, dtype = pair
    tensors, offsets, numel = data.draw(
        leaves([source, torch.float32, torch.int32] if mixed else [source])
    )
    wide = ops.wide(dtype)
    expected = torch.zeros(numel, dtype=dtype)
    for x, start in zip(tensors, offsets, strict=True):
        if x is not None:
            expected[start : start + x.numel()] = (
                ((x.to(wide) * scale) if scale != 1 else x).to(dtype).reshape(-1)
            )
    table = ops.AddressTable()
    on_device = torch.tensor(scale, dtype=torch.float64)
    for kernels, factor in (
        ("reference", scale),
        ("reference", on_device),
        ("compiled", scale),
        ("compiled", on_device),
    ):
        out = torch.full((numel,), 7.0, dtype=dtype)
        with ops.use(kernels):
            ops.ravel_into(out, tensors, offsets, scale=factor, table=table)
            total = ops.total_of_bins(ops.squares_in_bins(out)[None])
        assert same_bits(out, expected)
        with ops.use("reference"):
            assert same_bits(total, ops.total_of_bins(ops.squares_in_bins(expected)[None]))
        exact = expected.double().square().sum()
        torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-320, equal_nan=True)
        # A sum that has zeros of both signs, also where no tensor is.
        added = torch.linspace(-3, 3, numel).to(dtype)
        added[::3] = -0.0
        both = added + expected
        with ops.use(kernels):
            ops.ravel_into(added, tensors, offsets, scale=factor, table=table, adds=True)
        assert same_bits(added, both)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.sampled_from([0, 1, 31, 5000, 8192, 9000, 16384, 20001, 70000]),
    st.lists(st.tuples(st.integers(0, 2**20), st.sampled_from(SPECIAL)), max_size=3),
    st.integers(-4, 3),
    st.integers(0, 2**20),
)
def test_compiled_and_plain_sums_agree_in_every_bit(
    dtype: torch.dtype,
    count: int,
    numel: int,
    special: list[tuple[int, float]],
    place: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    terms = [
        torch.randn(numel, generator=generator, dtype=torch.float64).mul_(100).to(dtype)
        for _ in range(count)
    ]
    for index, (at, value) in enumerate(special if numel else ()):
        # A float64 number that is too large for the dtype becomes an infinity.
        terms[index % count][at % numel] = torch.tensor(value, dtype=torch.float64).to(dtype)
    expected = functools.reduce(torch.add, [term.to(ops.wide(dtype)) for term in terms]).to(dtype)
    for kernels in ("reference", "compiled"):
        given = [term.clone() for term in terms]
        # The sum may overwrite any term.
        out = given[place] if 0 <= place < count else torch.full_like(expected, 7.0)
        version = out._version
        with ops.use(kernels):
            assert ops.sum_in_rank_order(given, out) is out
        assert same_bits(out, expected)
        assert out._version > version


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(0, 5000),
    st.lists(st.integers(0, 150), max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2**20),
)
def test_norms_of_pieces_combine_to_the_norm_of_the_whole(
    numel: int, cuts: list[int], dtype: torch.dtype, seed: int
) -> None:
    x = (
        torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .mul_(1e3)
        .to(dtype)
    )
    places = sorted({0, numel, *(32 * cut for cut in cuts if 32 * cut < numel)})
    whole = ops.total_of_bins(ops.squares_in_bins(x)[None])
    rows = []
    for index, (begin, end) in enumerate(itertools.pairwise(places)):
        with ops.use("reference" if index % 2 else "compiled"):
            rows.append(ops.squares_in_bins(x[begin:end]))
    assert torch.equal(
        whole,
        ops.total_of_bins(torch.stack(rows)) if rows else torch.zeros((), dtype=torch.float64),
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 2**20),
    st.lists(st.sampled_from([0.0, math.inf, math.nan]), max_size=2),
)
def test_many_rows_add_up_as_integers_of_any_length(
    num_rows: int, seed: int, special: list[float]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    limbs = torch.randint(0, 2**62, (num_rows, LIMBS), generator=generator)
    limbs >>= torch.randint(0, 62, (num_rows, LIMBS), generator=generator)
    # So that the sum is a number of float64.
    limbs[:, 2 * LIMBS // 3 :] = 0
    ends = torch.zeros(num_rows, 1, dtype=torch.float64)
    for row, value in enumerate(special[:num_rows]):
        ends[row] = value
    exact = sum(limb << (32 * k) for row in limbs.tolist() for k, limb in enumerate(row))
    expected = float(Fraction(exact, 1 << -LOWEST)) + sum(special[:num_rows])
    total = ops.total_of_bins(torch.cat([limbs, ends.view(torch.int64)], 1)).item()
    assert repr(total) == repr(expected)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 32, 100, 4096, 9000]), st.integers(-44, 37), st.integers(0, 30)
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 3),
    st.integers(0, 2**20),
)
def test_the_sum_of_squares_is_exact_however_wide_the_range(
    runs: list[tuple[int, int, int]], dtype: torch.dtype, num_cuts: int, seed: int
) -> None:
    # Draw runs of numbers below a power of ten, spread over several powers of ten.
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for numel, power, spread in runs:
        x = torch.randn(numel, generator=generator, dtype=torch.float64)
        pieces.append(
            x
            * 10.0 ** (power - spread * torch.rand(numel, generator=generator, dtype=torch.float64))
        )
    x = torch.cat(pieces).to(dtype)
    squares = torch.nn.functional.pad(x, (0, -x.numel() % 32)).double().square_().view(-1, 4, 8)
    sums = (squares[:, 0] + squares[:, 2]) + (squares[:, 1] + squares[:, 3])
    expected = math.fsum(sums.flatten().tolist())
    cuts = (32 * torch.randint(0, x.numel() // 32 + 1, (num_cuts,), generator=generator)).tolist()
    places = sorted({0, x.numel(), *cuts})
    rows = [ops.squares_in_bins(x[begin:end]) for begin, end in itertools.pairwise(places)]
    assert ops.total_of_bins(torch.stack(rows)).item() == expected
    with ops.use("reference"):
        assert ops.total_of_bins(ops.squares_in_bins(x)[None]).item() == expected


def test_an_address_table_follows_tensors_that_moved_changed_or_died() -> None:
    table, offsets = ops.AddressTable(), (0, 64)

    def check(*tensors: Tensor | None) -> None:
        out = torch.empty(128)
        ops.ravel_into(out, tensors, offsets, table=table)
        expected = torch.zeros(128)
        for x, start in zip(tensors, offsets, strict=True):
            if x is not None:
                expected[start : start + x.numel()] = x.detach().reshape(-1).float()
        assert torch.equal(out, expected)

    base = torch.arange(64.0)
    for _ in range(2):
        check(torch.randn(64), torch.randn(8, 8))
        check(torch.randn(64), torch.randn(8, 8).t())
        check(torch.randn(64), torch.randn(7))
        check(torch.randn(64, dtype=torch.float64), torch.randn(64, dtype=torch.float64))
        check(torch.randn(64), None)
        check(None, None)
        check(base, torch.complex(base, base).conj().imag)
        with torch.no_grad():
            check(torch.nn.Parameter(base), base)


def test_an_address_table_is_reused_only_for_the_same_tuple_and_buffer() -> None:
    table, offsets, tensors = ops.AddressTable(), (0, 64), [torch.ones(64), torch.ones(64)]
    out = torch.empty(128)
    for value in (1.0, 2.0):
        tensors[1] = torch.full((64,), value)
        ops.ravel_into(out, tensors, offsets, table=table)
        assert out[64:].tolist() == [value] * 64
    fixed = tuple(tensors)
    ops.ravel_into(out, fixed, offsets, table=table)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        ops.ravel_into(torch.empty(100), fixed, offsets, table=table)


@pytest.mark.parametrize("kernels", ["compiled", "reference"])
def test_a_tensor_that_autograd_records_is_refused(kernels: str) -> None:
    w, table = torch.ones(3, requires_grad=True), ops.AddressTable()
    with ops.use(kernels):
        with torch.no_grad():
            ops.ravel_into(torch.empty(3), (w,), (0,), table=table)
        with pytest.raises(
            RuntimeError,
            match=r"is not differentiable; got a tensor that autograd records; detach\(\) it",
        ):
            ops.ravel_into(torch.empty(3), (w,), (0,), table=table)


def test_a_write_is_seen_by_autograd() -> None:
    out, w = torch.zeros(3), torch.ones(3, requires_grad=True)
    product = (w * out).sum()
    ops.ravel_into(out, [torch.ones(3)], [0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_number_whose_square_is_too_large_has_an_infinite_square() -> None:
    squares = ops.squares_in_bins(torch.tensor([1e200], dtype=torch.float64))
    assert ops.total_of_bins(squares[None]) == torch.inf


def whole_number(squares: Tensor) -> int:
    """Return the one exact integer that the limbs represent."""
    return sum(limb << 32 * place for place, limb in enumerate(squares[:-1].tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 3 * (1 << 18) + 77
    # The range is so wide that sums of a unit are rounded, and another order would show.
    x = torch.randn(numel) * torch.exp2(torch.randint(-30, 30, (numel,)))
    offsets, tensors = (5, numel // 2 + 20), (x[: numel // 2 - 50].clone(), x[numel // 2 :].clone())
    results: list[Any] = []

    def run() -> None:
        out = torch.full((numel + 100,), 7.0, dtype=dtype)
        ops.ravel_into(out, tensors, offsets, scale=0.3)
        results.append((out, ops.squares_in_bins(out)))
        total = torch.empty_like(out)
        ops.sum_in_rank_order([out, out, out], total)
        results.append((total, ops.squares_in_bins(total)))

    run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    several = [threading.Thread(target=run) for _ in range(3)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert len(results) == 8
    for out, squares in results[2:]:
        expected = next(first for first in results if same_bits(out, first[0]))
        assert whole_number(squares) == whole_number(expected[1])
    assert not same_bits(results[0][0], results[1][0])
