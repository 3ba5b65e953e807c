"""Laws of optimizers, for any shapes and hyperparameters."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.conftest import examples
from zfun import ops, optim, tree

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4)
UNIT = st.floats(0.0, 0.999)
RATES = st.floats(1e-6, 1.0)


@st.composite
def optimizers(draw: st.DrawFn) -> optim.Optimizer:
    rate: Any = draw(
        st.one_of(
            RATES, st.builds(optim.warmup_cosine, RATES, st.integers(0, 3), st.integers(4, 9))
        )
    )
    weight_decay = draw(st.one_of(st.just(0.0), UNIT))
    rule = draw(st.sampled_from(["sgd", "adam", "adamw", "lion", "adagrad"]))
    if rule == "sgd":
        momentum = draw(st.one_of(st.just(0.0), st.floats(0.1, 0.999)))
        last = optim.sgd(
            rate,
            momentum=momentum,
            nesterov=momentum > 0 and draw(st.booleans()),
            weight_decay=weight_decay,
        )
    elif rule == "lion":
        last = optim.lion(rate, b1=draw(UNIT), b2=draw(UNIT), weight_decay=weight_decay)
    elif rule == "adagrad":
        last = optim.adagrad(
            rate, rate_decay=draw(UNIT), eps=draw(st.floats(1e-10, 1e-2)), weight_decay=weight_decay
        )
    else:
        make = optim.adam if rule == "adam" else optim.adamw
        last = make(
            rate,
            b1=draw(UNIT),
            b2=draw(UNIT),
            eps=draw(st.floats(1e-10, 1e-2)),
            weight_decay=weight_decay,
        )
    before = draw(
        st.lists(st.sampled_from([optim.clip_by_global_norm(0.7), optim.scale(0.3)]), max_size=2)
    )
    return optim.chain(*before, last) if before else last


def values(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def same_bits(first: Any, second: Any) -> bool:
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return all(
        x.dtype == y.dtype
        and x.shape == y.shape
        and torch.equal(
            x.contiguous().reshape(-1).view(torch.uint8),
            y.contiguous().reshape(-1).view(torch.uint8),
        )
        for x, y in pairs
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    optimizers(),
    SHAPES,
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_apply_is_update_then_add(
    optimizer: optim.Optimizer,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    donate: bool,
) -> None:
    params = values(shapes, seed, dtype)
    one, other = (
        (params, optimizer.init(params)),
        (tree.map(torch.clone, params), optimizer.init(params)),
    )
    for step in range(3):
        grads = values(shapes, seed + step + 1, dtype)
        kept = tree.map(torch.clone, (grads, one))
        updates, state = optimizer.update(grads, one[1], one[0])
        assert same_bits(kept, (grads, one))
        before, added = tree.map(torch.clone, other[0]), optim.apply_updates(one[0], updates)
        other = optimizer.apply(grads, other[1], other[0], donate=donate)
        assert same_bits(state, other[1])
        assert all(
            reference.agrees(*triple) for triple in zip(added, other[0], before, strict=True)
        )
        one = (tree.map(torch.clone, other[0]), state)


@settings(max_examples=examples(40), deadline=None)
@given(
    optimizers(),
    SHAPES,
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 2**20),
    st.data(),
)
def test_cutting_changes_no_bits(
    optimizer: optim.Optimizer,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    numel = sum(x.numel() for x in values(shapes, 0, dtype))
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=3)))
    # Clipping is tested separately: every element depends on the norm, and the rounding of the norm
    # depends on the pieces.
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, numel], strict=True)]

    def recut(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.cat([x.reshape(-1) for x in leaves]).split(sizes))

    params = values(shapes, seed, dtype)
    pieces, whole_state = recut(params), optimizer.init(params)
    piece_state = optimizer.init(pieces)
    for step in range(3):
        grads = values(shapes, seed + step + 1, dtype)
        params, whole_state = optimizer.apply(grads, whole_state, params)
        pieces, piece_state = optimizer.apply(recut(grads), piece_state, pieces)
    if isinstance(whole_state, tuple) and any(part == () for part in whole_state):
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-1}[dtype]
        torch.testing.assert_close(
            torch.cat(pieces), torch.cat(recut(params)), rtol=tolerance, atol=tolerance
        )
    else:
        assert same_bits(torch.cat(pieces), torch.cat([x.reshape(-1) for x in params]))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["sgd", "adam", "adamw", "lion", "adagrad"]),
    st.one_of(RATES, st.builds(optim.warmup_cosine, RATES, st.just(1), st.just(4))),
    st.tuples(UNIT, UNIT, st.floats(1e-10, 1e-2), st.one_of(st.just(0.0), UNIT)),
    SHAPES,
    st.sampled_from([torch.float64, torch.float32]),
    st.integers(0, 2**20),
)
def test_a_chain_of_parts_is_the_rule(
    rule: str,
    rate: Any,
    options: tuple[float, ...],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """The moments have the same bits; a parameter differs in each step by at most eight roundings
    of the largest term of the step.

    For Adam the rule receives the decayed gradient too, because Adam would enlarge the rounding
    error where a gradient and the decay cancel.
    """
    b1, b2, eps, weight_decay = options
    decay, descend = optim.add_decayed_weights(weight_decay), optim.scale_by_learning_rate(rate)
    adam = {"b1": b1, "b2": b2, "eps": eps}
    fused, parts, place = {
        "sgd": (optim.sgd(rate, momentum=b1 or 0.5), (decay, optim.trace(b1 or 0.5)), 1),
        "adam": (optim.adam(rate, **adam), (decay, optim.scale_by_adam(**adam)), 1),
        "adamw": (
            optim.adamw(rate, **adam, weight_decay=weight_decay),
            (optim.scale_by_adam(**adam), decay),
            0,
        ),
        "lion": (
            optim.lion(rate, b1=b1, b2=b2, weight_decay=weight_decay),
            (optim.scale_by_lion(b1=b1, b2=b2), decay),
            0,
        ),
        "adagrad": (optim.adagrad(rate, eps=eps), (decay, optim.scale_by_adagrad(eps=eps)), 1),
    }[rule]
    chained = optim.chain(*parts, descend)
    params = values(shapes, seed, dtype)
    state, states = fused.init(params), chained.init(params)
    for step in range(3):
        grads = values(shapes, seed + step + 1, dtype)
        given = decay.update(grads, (), params)[0] if place == 1 else grads
        for g, p, x in zip(grads, params, given, strict=True):
            exact = g.double() + (weight_decay * p.double() if place == 1 else 0.0)
            terms = g.double().abs() + weight_decay * p.double().abs()
            assert ((x.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * terms).all()
        expected, state = fused.apply(given, state, params)
        found, states = chained.apply(grads, states, params)
        assert same_bits(states[place], state)
        for x, y, p in zip(found, expected, params, strict=True):
            terms = (1.0 + weight_decay) * p.abs() + (y - p).abs()
            assert ((x - y).abs() <= 8 * torch.finfo(dtype).eps * terms).all()
        params = expected


@settings(max_examples=60, deadline=None)
@given(
    SHAPES,
    RATES,
    UNIT,
    UNIT,
    st.floats(1e-10, 1e-2),
    UNIT,
    st.sampled_from(["sgd", "nesterov", "adam", "adamw"]),
    st.integers(0, 2**20),
)
def test_changes_equal_those_of_torch(
    shapes: list[tuple[int, ...]],
    rate: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    rule: str,
    seed: int,
) -> None:
    params = values(shapes, seed, torch.float64)
    twins = [torch.nn.Parameter(x.clone()) for x in params]
    nesterov, momentum = rule == "nesterov", max(b1, 0.01)
    ours, theirs = {
        "sgd": lambda: (
            optim.sgd(rate, weight_decay=weight_decay),
            torch.optim.SGD(twins, rate, weight_decay=weight_decay),
        ),
        "nesterov": lambda: (
            optim.sgd(rate, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay),
            torch.optim.SGD(
                twins, rate, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
            ),
        ),
        "adam": lambda: (
            optim.adam(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
            torch.optim.Adam(twins, rate, betas=(b1, b2), eps=eps, weight_decay=weight_decay),
        ),
        "adamw": lambda: (
            optim.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
            torch.optim.AdamW(twins, rate, betas=(b1, b2), eps=eps, weight_decay=weight_decay),
        ),
    }[rule]()
    start, state = params, ours.init(params)
    for step in range(3):
        grads = values(shapes, seed + step + 1, torch.float64)
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        params, state = ours.apply(grads, state, params)
        theirs.step()
    for p, twin, before in zip(params, twins, start, strict=True):
        torch.testing.assert_close(p - before, twin.detach() - before, rtol=1e-12, atol=1e-13)
        assert not torch.equal(p, before) or p.numel() == 0


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 70),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2**20),
)
def test_alignment_of_memory_changes_no_bits(
    numel: int, offset: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = torch.randn(4, offset + numel, generator=generator).to(dtype).clone()
    v = v.abs() * 10.0 ** torch.randint(-30, 10, v.shape, generator=generator).to(dtype)

    def run(begin: int, end: int) -> list[torch.Tensor]:
        pieces = [x.clone()[begin:end] for x in (p, g, m, v)]
        adam = ops.AdamRule(b1=0.9, b2=0.999, step_size=0.1, eps=1e-8, l2=0.1, decay=0.01)
        adam(pieces[0], pieces[1], pieces[2], pieces[3], None)
        sgd = ops.SgdRule(learning_rate=0.1, momentum=0.9, nesterov=True, l2=0.1)
        sgd(pieces[0], pieces[1], pieces[2], None)
        return pieces

    whole = run(0, offset + numel)
    assert same_bits([x[offset:] for x in whole], run(offset, offset + numel))
