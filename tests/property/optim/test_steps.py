"""Laws of the steps of optimizers over flat buffers: compiled and readable kernels agree, AdamW is
torch's, and alignment of memory changes no bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import examples
from zfun import ops

FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38]
Step = Callable[..., None]


ADAM = ops.AdamRule(b1=0.9, b2=0.99, step_size=0.1, eps=1e-8, correction=0.3)
LAMB = ops.LambRule(0.9, 0.99, 0.1, eps=1e-8, weight_decay=0.1, bias=0.3, correction=0.2)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ADAM(p, g, m, v, change)


def adam_l2(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ops.AdamRule(b1=0.4, b2=0.9, step_size=0.1, eps=1e-8, l2=0.3)(p, g, m, v, change)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    dataclasses.replace(ADAM, decay=0.02)(p, g, m, v, change)


def sgd(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ops.SgdRule(learning_rate=0.1, momentum=0.9, l2=0.1)(p, g, m, change)


def nesterov(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ops.SgdRule(learning_rate=0.1, momentum=0.9, nesterov=True)(p, g, m, change)


def plain_sgd(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ops.SgdRule(learning_rate=0.1, l2=0.1)(p, g, None, change)


def lion(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ops.LionRule(b1=0.9, b2=0.99, learning_rate=0.1, decay=0.02)(p, g, m, change)


def adagrad(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    ops.AdagradRule(learning_rate=0.1, eps=1e-8, l2=0.1)(p, g, v, change)


def lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor, change: Tensor | None) -> None:
    half = p.numel() // 64 * 32
    LAMB(p, g, m, v, change, segments=[(0, half), (half, p.numel())])


STEPS = [adam, adam_l2, adamw, sgd, nesterov, plain_sgd, lion, adagrad, lamb]


def buffers(
    numel: int, seed: int, dtype: torch.dtype, grad_dtype: torch.dtype, offset: int = 0
) -> list[Tensor]:
    """Parameters, gradients and two moments, each at an unaligned address."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = torch.randn(4, numel, generator=generator, dtype=FP64) * 10.0 ** torch.randint(
        -4, 3, (4, 1), generator=generator
    )
    values = (p.to(dtype), g.to(grad_dtype), m.to(dtype), v.square().to(dtype))
    return [torch.cat([x.new_zeros(offset), x])[offset:] for x in values]


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, with one pattern for every NaN."""
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.where(torch.isnan(x), -1, x.contiguous().view(raw))


@settings(max_examples=examples(150), deadline=None)
@given(
    st.sampled_from(STEPS),
    st.sampled_from([(FP32, FP32), (FP32, BF16), (FP32, FP16), (FP64, FP32), (BF16, BF16)]),
    st.sampled_from([1, 7, 31, 33, 1000, 1024, 3000]),
    st.integers(0, 17),
    st.integers(0, 2**20),
    st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(SPECIAL)), max_size=3),
    st.booleans(),
)
def test_compiled_and_readable_steps_agree_in_every_bit(
    step: Step,
    dtypes: tuple[torch.dtype, torch.dtype],
    numel: int,
    offset: int,
    seed: int,
    special: list[tuple[float, float]],
    to_change: bool,
) -> None:
    results: list[list[Tensor]] = []
    for kernels in ("reference", "compiled"):
        p, g, m, v = values = buffers(numel, seed, *dtypes, offset)
        for place, value in special if step is not lamb else ():
            g[int(place * numel)] = value
        change = torch.full_like(p, 7.0) if to_change else None
        before = [x.clone() for x in values]
        with ops.use(kernels):
            step(p, g, m, v, change)
        assert torch.equal(bits(g), bits(before[1]))
        assert change is None or torch.equal(p, before[0])
        results.append([p, m, v, *([] if change is None else [change])])
    for name, one, other in zip(
        ("parameters", "first", "second", "change"), *results, strict=False
    ):
        assert torch.equal(bits(one), bits(other)), name


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([16, 64, 1024, 4096, 100_000]),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99]),
    st.sampled_from([0.9, 0.999]),
    st.sampled_from([0.0, 0.01, 0.3]),
    st.booleans(),
    st.sampled_from([FP32, FP64]),
    st.integers(0, 2**20),
)
def test_adam_has_the_bits_of_the_fused_kernel_of_torch(
    numel: int,
    b1: float,
    b2: float,
    weight_decay: float,
    decoupled: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    p, _, m, v = buffers(numel, seed, dtype, dtype)
    m.zero_(), v.zero_()
    parameter = torch.nn.Parameter(p.clone())
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    oracle = make(
        [parameter], lr=1e-2, betas=(b1, b2), eps=1e-8, weight_decay=weight_decay, fused=True
    )
    for step in range(1, 6):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed + step), dtype=dtype)
        parameter.grad = grad.clone()
        oracle.step()
        rule = ops.AdamRule(
            b1=b1,
            b2=b2,
            step_size=1e-2 / (1.0 - b1**step),
            eps=1e-8,
            l2=0.0 if decoupled else weight_decay,
            decay=1e-2 * weight_decay if decoupled else 0.0,
            correction=math.sqrt(1.0 - b2**step),
        )
        rule(p, grad, m, v, None)
    state = oracle.state[parameter]
    for mine, theirs in ((p, parameter.detach()), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert torch.equal(bits(mine), bits(theirs))


def test_a_hundred_steps_stay_near_those_of_torch() -> None:
    # torch computes the tail after whole vectors of 16 elements differently, and this length has a
    # tail.
    numel = 1003
    p, _, m, v = buffers(numel, 0, FP32, FP32)
    p.normal_(generator=torch.Generator().manual_seed(0))
    m.zero_(), v.zero_()
    start, parameter = p.clone(), torch.nn.Parameter(p.clone())
    oracle = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(1, 101):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        parameter.grad = grad.clone()
        oracle.step()
        step_size, correction = 1e-2 / (1.0 - 0.9**step), math.sqrt(1.0 - 0.999**step)
        rule = ops.AdamRule(0.9, 0.999, step_size, 1e-8, decay=1e-3, correction=correction)
        rule(p, grad, m, v, None)
    mine, theirs = p.double() - start.double(), parameter.detach().double() - start.double()
    assert theirs.norm() > 1.0
    assert (mine - theirs).norm() <= 1e-6 * theirs.norm()
    assert torch.equal(p[: numel // 16 * 16], parameter.detach()[: numel // 16 * 16])


@pytest.mark.parametrize("step", STEPS)
def test_chunks_and_alignment_change_no_bits(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zfun.ops.numba._compile._MIN_PER_THREAD", 1024)
    for kernels in ("reference", "compiled"):
        with ops.use(kernels):
            whole = buffers(10_000, 3, FP32, FP32)
            step(*whole, None)
            cut = buffers(10_000, 3, FP32, FP32, offset=5)
            # The norms of LAMB cover whole segments, so chunks must not split a segment.
            for begin, end in (
                ((0, 37), (37, 4133), (4133, 10_000)) if step is not lamb else ((0, 10_000),)
            ):
                step(*(x[begin:end] for x in cut), None)
            threaded = buffers(10_000, 3, FP32, FP32, offset=11)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "get_num_threads", lambda: 3)
                step(*threaded, None)
        assert all(
            torch.equal(bits(x), bits(y)) and torch.equal(bits(x), bits(z))
            for x, y, z in zip(whole, cut, threaded, strict=True)
        )
        assert not torch.equal(whole[0], buffers(10_000, 3, FP32, FP32)[0])


@settings(max_examples=examples(20), deadline=None)
@given(
    st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(0, 2**20)
)
def test_lamb_follows_the_paper_and_chunks_change_no_bits(
    units: int, cuts: list[int], seed: int
) -> None:
    first = 32 * units
    sizes = [first, 77]
    numel = sum(sizes)
    p, g, m, v = (x.to(FP64) for x in buffers(numel, seed, FP64, FP64))
    rule = ops.LambRule(0.9, 0.99, 0.1, eps=1e-6, weight_decay=0.1, bias=0.2, correction=0.5)
    expected = []
    for old, grad, mean, square in zip(*(x.split(sizes) for x in (p, g, m, v)), strict=True):
        mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad**2
        direction = mean / 0.2 / (square.sqrt() / 0.5 + 1e-6) + 0.1 * old
        expected.append(-0.1 * old.norm() / direction.norm() * direction)
    whole = [x.clone() for x in (p, g, m, v)]
    rule(whole[0], whole[1], whole[2], whole[3], None, segments=[(0, first), (first, numel)])
    torch.testing.assert_close(whole[0] - p, torch.cat(expected), rtol=1e-9, atol=1e-12)
    # Each rank has a piece of the buffer. A layer outside the piece is an empty segment on that
    # rank.
    places = sorted({0, numel, *(32 * cut for cut in cuts if 32 * cut < numel)})
    gathered: list[Tensor] = []
    for final in (False, True):
        results = []
        for begin, end in itertools.pairwise(places):
            mine = [x[begin:end].clone() for x in (p, g, m, v)]
            clipped = [
                (max(min(a, end) - begin, 0), max(min(b, end) - begin, 0))
                for a, b in ((0, first), (first, numel))
            ]

            def gather(rows: Tensor, final: bool = final) -> Tensor:
                if not final:
                    gathered.append(rows)
                return torch.stack(gathered)

            rule(mine[0], mine[1], mine[2], mine[3], None, segments=clipped, gather=gather)
            results.append(mine)
    for index in range(4):
        assert torch.equal(torch.cat([result[index] for result in results]), whole[index])
