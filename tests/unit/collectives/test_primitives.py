"""Differentiable collectives under every transform, against the same program on one process.

The oracle is a loop: a collective as a function of the list of all ranks' tensors. The program of a
rank is ``y = A(x)``, ``loss = f(y, r)``; together the ranks compute the sum of their losses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from zfun.collectives import (
    Group,
    Work,
    abstract_group,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    record,
    reduce_scatter,
    simulate,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_permute,
    start_reduce_scatter,
)
from zfun.errors import OptionError

# torch's own rules for forward mode use torch.jit.script, which torch deprecates.
pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

Program = Callable[[Tensor, Group], Tensor]
Oracle = Callable[[list[Tensor]], list[Tensor]]


def _sum(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def _chunks(x: Tensor, n: int, dim: int) -> list[Tensor]:
    return list(x.chunk(n, dim))


def _rotated(n: int) -> tuple[int, ...]:
    return tuple((rank + 1) % n for rank in range(n))


CASES: dict[str, tuple[Program, Oracle]] = {
    "all_reduce": (all_reduce, lambda xs: [_sum(xs)] * len(xs)),
    "all_gather": (all_gather, lambda xs: [torch.cat(xs)] * len(xs)),
    "all_gather dim -1": (
        lambda x, g: all_gather(x, g, -1),
        lambda xs: [torch.cat(xs, -1)] * len(xs),
    ),
    "reduce_scatter": (reduce_scatter, lambda xs: _chunks(_sum(xs), len(xs), 0)),
    "reduce_scatter dim 1": (
        lambda x, g: reduce_scatter(x, g, 1),
        lambda xs: _chunks(_sum(xs), len(xs), 1),
    ),
    "broadcast": (lambda x, g: broadcast(x, g, g.size - 1), lambda xs: [xs[-1]] * len(xs)),
    "permute": (
        lambda x, g: permute(x, g, _rotated(g.size)),
        lambda xs: [xs[r - 1] for r in range(len(xs))],
    ),
    "all_to_all 0 0": (
        all_to_all,
        lambda xs: [torch.cat([x.chunk(len(xs), 0)[r] for x in xs], 0) for r in range(len(xs))],
    ),
    "all_to_all 0 1": (
        lambda x, g: all_to_all(x, g, 0, 1),
        lambda xs: [torch.cat([x.chunk(len(xs), 0)[r] for x in xs], 1) for r in range(len(xs))],
    ),
    "all_to_all -1 0": (
        lambda x, g: all_to_all(x, g, -1, 0),
        lambda xs: [torch.cat([x.chunk(len(xs), -1)[r] for x in xs], 0) for r in range(len(xs))],
    ),
}

SIZES = [1, 2, 3]
SHAPE = (6, 6)
both = pytest.mark.parametrize(("program", "oracle"), CASES.values(), ids=CASES.keys())
sizes = pytest.mark.parametrize("n", SIZES)


def _inputs(n: int, *lead: int, seed: int = 0) -> Tensor:
    return torch.randn(
        n, *lead, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def _loss(y: Tensor, rank: int) -> Tensor:
    """A function that is not linear and differs between ranks, so that no terms cancel."""
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)
    return ((rank + 1) * weights * y.sin() * y).sum()


def _total(oracle: Oracle, xs: Tensor) -> Tensor:
    return torch.stack([_loss(y, rank) for rank, y in enumerate(oracle(list(xs)))]).sum()


def _close(actual: list[Tensor], expected: Tensor) -> None:
    torch.testing.assert_close(torch.stack(actual), expected, rtol=1e-12, atol=1e-12)


@both
@sizes
def test_primitives_have_the_values_of_the_definition(
    program: Program, oracle: Oracle, n: int
) -> None:
    xs = _inputs(n)
    _close(simulate(n, lambda g: program(xs[g.rank], g)), torch.stack(oracle(list(xs))))


@both
@sizes
def test_backward_and_double_backward_equal_those_of_one_process(
    program: Program, oracle: Oracle, n: int
) -> None:
    xs = _inputs(n)

    def rank_program(group: Group) -> tuple[Tensor, Tensor]:
        x = xs[group.rank].clone().requires_grad_()
        (first,) = torch.autograd.grad(_loss(program(x, group), group.rank), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        return first.detach(), second

    first, second = zip(*simulate(n, rank_program), strict=True)
    _close(list(first), grad(lambda v: _total(oracle, v))(xs))
    _close(list(second), grad(lambda v: (grad(lambda u: _total(oracle, u))(v) ** 2).sum())(xs))


@both
@sizes
def test_func_grad_and_grad_of_grad_equal_those_of_one_process(
    program: Program, oracle: Oracle, n: int
) -> None:
    xs = _inputs(n)

    def rank_program(group: Group) -> tuple[Tensor, Tensor]:
        first = grad(lambda x: _loss(program(x, group), group.rank))
        return first(xs[group.rank]), grad(lambda x: (first(x) ** 2).sum())(xs[group.rank])

    first, second = zip(*simulate(n, rank_program), strict=True)
    _close(list(first), grad(lambda v: _total(oracle, v))(xs))
    _close(list(second), grad(lambda v: (grad(lambda u: _total(oracle, u))(v) ** 2).sum())(xs))


@both
@sizes
def test_jvp_equals_that_of_one_process(program: Program, oracle: Oracle, n: int) -> None:
    xs, ts = _inputs(n), _inputs(n, seed=1)
    tangents = simulate(
        n, lambda g: jvp(lambda x: program(x, g).sin(), (xs[g.rank],), (ts[g.rank],))[1]
    )
    _close(tangents, jvp(lambda v: torch.stack(oracle(list(v))).sin(), (xs,), (ts,))[1])


@both
@sizes
def test_jvp_of_grad_equals_that_of_one_process(program: Program, oracle: Oracle, n: int) -> None:
    xs, ts = _inputs(n), _inputs(n, seed=1)

    def rank_program(group: Group) -> Tensor:
        return jvp(
            grad(lambda x: _loss(program(x, group), group.rank)),
            (xs[group.rank],),
            (ts[group.rank],),
        )[1]

    _close(simulate(n, rank_program), jvp(grad(lambda v: _total(oracle, v)), (xs,), (ts,))[1])


@both
@sizes
@pytest.mark.parametrize("in_dim", [0, 2])
def test_vmap_of_grad_equals_that_of_one_process(
    program: Program, oracle: Oracle, n: int, in_dim: int
) -> None:
    xs = _inputs(n, 2)
    per_sample = vmap(grad(lambda u: _total(oracle, u)), in_dims=1, out_dims=1)(xs)

    def rank_program(group: Group) -> Tensor:
        fn = grad(lambda x: _loss(program(x, group), group.rank))
        return vmap(fn, in_dims=in_dim)(xs[group.rank].movedim(0, in_dim))

    _close(simulate(n, rank_program), per_sample)


@both
@sizes
def test_jacrev_equals_that_of_one_process(program: Program, oracle: Oracle, n: int) -> None:
    """The reverse Jacobian on a rank is that of the sum of the same output over the ranks: the
    batch dim passes through the dual.
    """
    xs = _inputs(n)

    def rank_program(group: Group) -> Tensor:
        return jacrev(lambda x: program(x, group).sin())(xs[group.rank])

    def whole(v: Tensor) -> Tensor:
        return torch.stack(oracle(list(v))).sin().sum(0)

    jacobian = jacrev(whole)(xs)  # [*y, n, *x]
    _close(simulate(n, rank_program), jacobian.movedim(jacobian.dim() - 3, 0))


@both
@sizes
def test_jacfwd_and_hessian_equal_those_of_one_process(
    program: Program, oracle: Oracle, n: int
) -> None:
    """Forward mode moves all ranks at once, each in the direction of the same basis vector."""
    xs = _inputs(n)
    origin = torch.zeros(SHAPE, dtype=torch.float64)

    def rank_program(group: Group) -> tuple[Tensor, Tensor]:
        fn = lambda x: _loss(program(x, group), group.rank)
        return jacfwd(lambda x: program(x, group).sin())(xs[group.rank]), hessian(fn)(
            xs[group.rank]
        )

    jacobians, hessians = zip(*simulate(n, rank_program), strict=True)
    _close(list(jacobians), jacfwd(lambda step: torch.stack(oracle(list(xs + step))).sin())(origin))
    _close(
        list(hessians), jacfwd(lambda step: grad(lambda v: _total(oracle, v))(xs + step))(origin)
    )


STARTS = {
    "all_reduce": start_all_reduce,
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
    "broadcast": start_broadcast,
    "permute": lambda x, g: start_permute(x, g, _rotated(g.size)),
    "all_to_all": lambda x, g: start_all_to_all(x, g, 0, 1),
}
BLOCKING = {
    **{name: CASES[name][0] for name in ("all_reduce", "all_gather", "reduce_scatter", "permute")}
}
BLOCKING |= {"broadcast": broadcast, "all_to_all": CASES["all_to_all 0 1"][0]}


@pytest.mark.parametrize("kind", STARTS)
def test_started_forms_overlap_and_agree_bitwise(kind: str) -> None:
    """Two collectives are in flight at once, inside a transform too."""
    xs = _inputs(3, 2)

    def program(group: Group) -> list[Tensor]:
        def overlapped(x: Tensor) -> Tensor:
            pending = [STARTS[kind](x, group), STARTS[kind](x * 2, group)]
            return _loss(pending[1].wait(), group.rank) + _loss(pending[0].wait(), group.rank)

        def in_turn(x: Tensor) -> Tensor:
            values = [BLOCKING[kind](x, group), BLOCKING[kind](x * 2, group)]
            return _loss(values[1], group.rank) + _loss(values[0], group.rank)

        x = xs[group.rank]
        return [
            *(vmap(grad(fn))(x) for fn in (overlapped, in_turn)),
            *(jvp(fn, (x[0],), (x[1],))[1] for fn in (overlapped, in_turn)),
            *(jacfwd(fn)(x[0]) for fn in (overlapped, in_turn)),
        ]

    for results in simulate(3, program):
        for started, blocking in zip(results[::2], results[1::2], strict=True):
            assert torch.equal(started, blocking)


def test_backward_sends_the_bytes_of_the_dual() -> None:
    def program(group: Group) -> list[tuple[str, str, int]]:
        recorder = record(group)
        x = torch.ones(6, 2, requires_grad=True)
        all_gather(reduce_scatter(x, recorder, name="a"), recorder, name="b").sum().backward()
        return [(entry.kind, entry.name, entry.sent_bytes) for entry in recorder.log]

    log = [
        ("reduce_scatter", "a", 32),
        ("all_gather", "b", 32),
        ("reduce_scatter", "b", 32),
        ("all_gather", "a", 32),
    ]
    assert simulate(3, program) == [log] * 3


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3)])
def test_collectives_take_small_shapes(shape: tuple[int, ...]) -> None:
    results = simulate(2, lambda g: all_reduce(torch.ones(shape), g))
    assert all(torch.equal(result, torch.full(shape, 2.0)) for result in results)
    if shape:
        assert (
            simulate(2, lambda g: all_gather(torch.ones(shape), g).shape[0]) == [2 * shape[0]] * 2
        )


def test_bool_and_complex_tensors_are_sent() -> None:
    assert (
        simulate(2, lambda g: all_gather(torch.tensor([True, False]), g).tolist())
        == [[True, False, True, False]] * 2
    )
    assert simulate(2, lambda g: all_reduce(torch.tensor([1 + 2j]), g).tolist()) == [[2 + 4j]] * 2


def test_a_module_works_under_functional_call() -> None:
    model = torch.nn.Linear(4, 4).double()
    weight = model.weight.detach()

    def program(group: Group) -> Tensor:
        def loss(shard: Tensor) -> Tensor:
            params = {"weight": all_gather(shard, group), "bias": model.bias.detach()}
            return (
                functional_call(model, params, (torch.ones(1, 4, dtype=torch.float64),))
                .square()
                .sum()
                / group.size
            )

        return grad(loss)(weight.chunk(group.size)[group.rank])

    whole = vjp(
        lambda w: (
            functional_call(model, {"weight": w}, (torch.ones(1, 4, dtype=torch.float64),))
            .square()
            .sum()
        ),
        weight,
    )[1]
    torch.testing.assert_close(
        torch.cat(simulate(2, program)), whole(torch.ones((), dtype=torch.float64))[0].detach()
    )


def test_a_wrong_dim_is_refused() -> None:
    group = abstract_group(2)
    with pytest.raises(OptionError, match="dim 1 of shape"):
        all_gather(torch.ones(3), group, 1)
    with pytest.raises(OptionError, match="dim 0 of shape"):
        all_gather(torch.ones(()), group)
    with pytest.raises(OptionError, match="that the 2 ranks divide; got length 3 at dim 0"):
        reduce_scatter(torch.ones(3), group)
    with pytest.raises(OptionError, match="each rank of 0 to 1 once"):
        permute(torch.ones(3), group, (0, 0))


STARTED: dict[str, Callable[[Tensor, Group], Work]] = {
    "all_reduce": start_all_reduce,
    "all_gather": start_all_gather,
    "reduce_scatter": start_reduce_scatter,
    "broadcast": start_broadcast,
    "permute": lambda x, group: start_permute(x, group, [1, 0]),
    "all_to_all": start_all_to_all,
}


@pytest.mark.parametrize("start", STARTED.values(), ids=STARTED)
def test_a_started_collective_leaves_no_graph_behind(start: Callable[..., Work]) -> None:
    """A graph and the handle of its collective do not keep each other: activations would stay."""

    def main(group: Group) -> None:
        weight = torch.ones(4, 2, requires_grad=True)
        for _ in range(3):
            start(weight * 2, group).wait().sum().backward()

    alive = []
    for _ in range(3):
        simulate(2, main)
        gc.collect()
        alive.append(sum(isinstance(x, Tensor) for x in gc.get_objects()))
    assert alive[1] == alive[2]
