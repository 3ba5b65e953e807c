"""Experts over an axis: laws of random routers, bytes, checkpoints, and refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, jvp, vmap

import zfun as zf
from tests.conftest import FORM, examples
from tests.distributed.programs.experts import (
    batch,
    expert,
    loss_with,
    mixture_over,
    params,
    rule,
    whole_mixture,
)
from zfun.collectives import Collective, Group, UnequalAllToAll, abstract_group, exchange_rows
from zfun.errors import CollectiveMismatch, LeafError, OptionError, PlacementError, SpecMismatch
from zfun.parallel import dispatch, expert_parallel
from zfun.testing import same_bits

WIDE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=WIDE, generator=torch.Generator().manual_seed(seed))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@st.composite
def routers(draw: st.DrawFn) -> tuple[int, int, list[list[list[int]]]]:
    """Ranks, experts of a rank, and the choices of each token of each rank."""
    size, own, k = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    expert = st.integers(0, size * own - 1)
    tokens = st.lists(st.lists(expert, min_size=k, max_size=k), max_size=5)
    chosen = draw(st.lists(tokens, min_size=size, max_size=size))
    chosen[0] = chosen[0] or [[0] * k]
    return size, own, chosen


@settings(max_examples=examples(80), deadline=None)
@given(routers())
@example((3, 2, [[[0, 0]], [], [[1, 0], [0, 1]]]))  # all to the first rank
def test_tokens_meet_their_experts_wherever_these_are(
    router: tuple[int, int, list[list[list[int]]]],
) -> None:
    """Values, gradients, the order of rows, and bytes are those that the choices say."""
    size, own, choices = router
    width, k = 3, len(choices[0][0])
    chosen = [torch.tensor(tokens, dtype=torch.int64).view(-1, k) for tokens in choices]
    xs = [draw(len(x), width, seed=rank) for rank, x in enumerate(chosen)]
    weights = [draw(len(x), k, seed=10 + rank) for rank, x in enumerate(chosen)]
    experts = {"up": draw(size * own, width, width, seed=20), "bias": draw(size * own, width)}
    received: list[list[tuple[int, int]]] = [[] for _ in range(size)]

    def main(group: Group) -> Any:
        log, mine = zf.record(group), slice(group.rank * own, (group.rank + 1) * own)
        leaves = {name: leaf[mine].clone().requires_grad_() for name, leaf in experts.items()}
        x, w = (each[group.rank].clone().requires_grad_() for each in (xs, weights))

        def known(rows: Tensor, ids: Tensor) -> Tensor:
            for row, index in zip(rows.detach(), ids.tolist(), strict=True):
                source = torch.nonzero((torch.cat(xs) == row).all(1)).flatten().tolist()
                received[group.rank].extend((place, index) for place in source[:1])
            return expert(leaves, rows, ids)

        out = dispatch(known, x, chosen[group.rank], w, log, size * own)
        (out * out.detach().cos()).sum().backward()
        sent = [(entry.kind, entry.part, entry.sent_bytes) for entry in log.log]
        return out.detach(), x.grad, w.grad, {key: x.grad for key, x in leaves.items()}, sent

    whole = {name: leaf.clone().requires_grad_() for name, leaf in experts.items()}
    x, w = torch.cat(xs).requires_grad_(), torch.cat(weights).requires_grad_()
    expected = whole_mixture(whole, x, torch.cat(chosen), w)
    (expected * expected.detach().cos()).sum().backward()
    start = 0
    gradient: Any = lambda leaf: leaf.grad
    for rank, (out, dx, dw, grads, sent) in enumerate(zf.simulate(size, main)):
        stop = start + len(chosen[rank])
        close(out, expected.detach()[start:stop])
        close([dx, dw], [gradient(x)[start:stop], gradient(w)[start:stop]])
        for name, leaf in whole.items():
            close(grads[name], gradient(leaf)[rank * own : (rank + 1) * own])
        start = stop
        others, row = [other for other in range(size) if other != rank], 8 * width
        there = sum(int((chosen[rank] // own == other).sum()) for other in others)
        here = sum(int((chosen[other] // own == rank).sum()) for other in others)
        assert sent == [
            ("all_gather", "", 8 * size * own * (size - 1)),
            ("all_to_all", "dispatch", there * row),
            ("all_to_all", "combine", here * row),
            ("all_to_all", "combine", there * row),
            ("all_to_all", "dispatch", here * row),
        ]
        for index in range(own):
            places = [place for place, found in received[rank] if found == index]
            assert places == sorted(places)  # the order of the tokens of all ranks


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_an_exchange_of_rows_has_derivatives_of_every_kind() -> None:
    counts = ((1, 2), (0, 3))

    def main(group: Group) -> None:
        move = lambda x: exchange_rows(x, group, counts)
        back = lambda y: exchange_rows(y, group, ((1, 0), (2, 3)))
        x, v = draw(3, 2, seed=group.rank), draw(3, 2, seed=5 + group.rank)
        assert same_bits(jvp(move, (x,), (v,)), (move(x), move(v)))
        assert same_bits(vmap(move)(torch.stack([x, v])), torch.stack([move(x), move(v)]))
        close(grad(lambda x: (move(x) ** 3).sum())(x), back(3 * move(x) ** 2))
        twice = grad(lambda x: (grad(lambda x: (move(x) ** 3).sum())(x) * v).sum())(x)
        close(twice, 6 * x * v)

    zf.simulate(2, main)


def test_an_unequal_all_to_all_needs_the_counts_of_its_ranks() -> None:
    op = UnequalAllToAll(((1, 2), (3, 4)), 0)
    assert op.dual.dual == op
    assert op.dual == UnequalAllToAll(((1, 3), (2, 4)), 0)
    assert (op.sent, op.received, op.output_numel(3, 2), op.sent_bytes(12, 0, 2, 4)) == (
        (1, 2),
        (1, 3),
        4,
        8,
    )
    for size, numel in ((2, 4), (3, 3)):
        with pytest.raises(OptionError, match=r"the counts of . ranks, which sum to the length"):
            abstract_group(size).start(Collective(op), torch.ones(numel))

    def over_axes(group: Group) -> None:
        mesh = zf.mesh(group, dp=2, ep=2)["dp", "ep"]
        exchange_rows(torch.ones(4), mesh, ((1, 1, 1, 1),) * 4)

    with pytest.raises(OptionError, match="goes along one axis; got 2 axes"):
        zf.simulate(4, over_axes)

    def main(group: Group) -> None:
        counts = ((1, group.rank), (1, 1))  # ranks disagree
        exchange_rows(torch.ones(sum(counts[group.rank])), group, counts)

    with pytest.raises(CollectiveMismatch, match="all_to_all of counts with checksum"):
        zf.simulate(2, main)


# Training of a small mixture.
def trained(
    group: Group,
    stage: int,
    experts: int = 6,
    path: Any = None,
    count: int = 3,
    first: int = 0,
    **sizes: int,
) -> Any:
    """Train from a step on; the state of a later first step comes from the path."""
    mesh = zf.mesh(group, **sizes)
    loss = expert_parallel(loss_with(mixture_over(mesh["ep"]), experts), mesh["ep"])
    zero = zf.zero(stage, loss, rule(), mesh["dp"], bucket_bytes=1000)
    state = zero.init(params(WIDE))
    if first:
        state = zf.load(path, state).state
        if not count:
            return zero.params(state)
    seen = []
    for step in range(first, first + count):
        state, info = zero.step(state, batch(group.rank, step, WIDE))
        seen.append((info.loss, info.grad_norm))
    if path is not None and not first:
        zf.save(path, state)
    return seen, zero.params(state)


@functools.cache
def plain(experts: int) -> Any:
    """One process with the tokens of all ranks in its batch."""

    def main(group: Group) -> Any:
        zero = zf.zero(0, loss_with(whole_mixture, experts), rule(), group)
        state, seen = zero.init(params(WIDE)), []
        for step in range(3):
            tokens = torch.cat([batch(rank, step, WIDE) for rank in range(4)])
            state, info = zero.step(state, tokens)
            seen.append((info.loss, info.grad_norm))
        return seen, zero.params(state)

    return zf.simulate(1, main)[0]


# Of three experts that are chosen, all lie on the first rank of the axis.
@pytest.mark.parametrize("experts", [6, 3])
@pytest.mark.parametrize("stage", range(4) if FORM != "everyday" else (3,))
def test_unequal_batches_train_as_one_on_one_process(stage: int, experts: int) -> None:
    first, *others = zf.simulate(4, trained, stage, experts, dp=2, ep=2)
    close(first, plain(experts))
    assert all(same_bits(other, first) for other in others)
    assert same_bits(first, zf.simulate(4, trained, 0, experts, dp=2, ep=2)[0])


def test_recomputed_layers_and_leaves_that_are_gathered_change_no_number() -> None:
    """In micro-batches; recomputation changes no bit."""

    def main(group: Group, stage: int, again: Any, gathered: tuple[str, ...], **more: Any) -> Any:
        mesh = zf.mesh(group, dp=2, ep=2)
        mixture = again(mixture_over(mesh["ep"]))
        loss = expert_parallel(loss_with(mixture), mesh["ep"], gathered=gathered)
        zero = zf.zero(stage, loss, rule(), mesh["dp"], num_micro_batches=2, **more)
        state = zero.init(params(WIDE))
        state, info = zero.step(state, draw(4 + 2 * group.rank, 8, seed=group.rank))
        return info.loss, info.grad_norm, zero.params(state)

    kept = lambda fn: fn
    first = zf.simulate(4, main, 3, kept, ())[0]
    assert same_bits(zf.simulate(4, main, 2, zf.remat, ())[0], first)
    joined = zf.simulate(4, main, 3, zf.remat, ("head",))[3]
    close(joined, first)
    assert same_bits(zf.simulate(4, main, 2, kept, ("head",))[0], joined)
    narrow = zf.simulate(4, main, 3, zf.remat, ("head",), precision=torch.bfloat16)[0]
    torch.testing.assert_close(narrow[0].double(), first[0], rtol=0.05, atol=0)


@pytest.mark.parametrize("gathered", [(), ("head", "*.router")])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_of_other_leaves_is_sharded_over_data_ranks_alone(
    stage: int, gathered: tuple[str, ...]
) -> None:
    def main(group: Group) -> list[int]:
        mesh = zf.mesh(group, dp=2, ep=2)
        loss = expert_parallel(loss_with(mixture_over(mesh["ep"])), mesh["ep"], gathered=gathered)
        state = zf.zero(stage, loss, zf.optim.adamw(0.1), mesh["dp"]).init(params(WIDE))
        flats = state.params, state.opt_state.mu
        return [sum(map(torch.numel, flat.buffers)) for flat in flats]

    whole = params(WIDE)
    sizes = dict(zip(zf.tree.paths(whole), map(torch.numel, zf.tree.leaves(whole)), strict=True))
    cut = sum(size for path, size in sizes.items() if ".experts." in path or gathered)
    moments = cut // 4 + (sum(sizes.values()) - cut) // 2
    found = zf.simulate(4, main)[0]
    assert 0 <= found[1] - moments <= 32  # padding of the buckets
    assert found[0] == found[1] * (1 if stage == 3 else 2)


def test_a_plan_has_the_bytes_of_experts_that_are_chosen_alike() -> None:
    """Two layers of two exchanges each, forward and backward, but for the gradient of the batch."""

    def recipe(group: Group) -> Any:
        mesh = zf.mesh(group, dp=2, ep=2)

        def mixture(p: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            alike = torch.arange(chosen.numel(), device=x.device).view(chosen.shape) % 6
            return mixture_over(mesh["ep"])(p, x, alike, weights)

        return zf.zero(3, expert_parallel(loss_with(mixture), mesh["ep"]), rule(), mesh["dp"])

    def main(group: Group) -> int:
        log = zf.record(group)
        zero = recipe(log)
        state = zero.init(params(WIDE))
        log.clear()
        zero.step(state, draw(9, 8))
        return log.bytes_sent("experts")

    planned = zf.plan(recipe, params(WIDE), torch.empty(9, 8, dtype=WIDE), 4)
    counts, rows = 2 * 6 * 8, 7 * 9 * 8 * 8
    assert planned.bytes_sent("experts") == counts + rows
    assert zf.simulate(4, main) == [counts + rows] * 4


def test_a_checkpoint_crosses_between_meshes(tmp_path: Path) -> None:
    saved = zf.simulate(4, trained, 3, 6, tmp_path, 2, dp=2, ep=2)[0][1]
    for stage, sizes in ((1, {"dp": 2, "ep": 3}), (3, {"dp": 1, "ep": 2}), (0, {"dp": 1, "ep": 1})):
        size = sizes["dp"] * sizes["ep"]
        found = zf.simulate(size, trained, stage, 6, tmp_path, 0, 2, **sizes)
        assert all(same_bits(leaves, saved) for leaves in found)


# Wrong programs, of a leaf, three experts on an axis of two ranks, and tokens.
def product(p: Any, x: Tensor) -> Tensor:
    return (x @ p["w"]).sum()


LEAVES = {"w": torch.ones(2, 2), "experts": torch.ones(3, 2)}
X, ONES = torch.ones(4, 2), torch.ones(4, 1)


def over(axis: Group, loss: Any = product, *globs: str) -> Any:
    return expert_parallel(loss, axis, globs or ["experts"])


WRONG: dict[str, Any] = {
    "twice": lambda mesh: over(mesh["ep"], over(mesh["ep"])),
    "axes": lambda mesh: over(mesh["dp", "ep"]),
    "pipeline": lambda mesh: over(
        mesh["dp"], zf.pipeline([product] * 2, mesh["ep"], num_micro_batches=2)
    ),
    "stage": lambda mesh: zf.pipeline([product, over(mesh["ep"])], mesh["dp"], num_micro_batches=2),
    "odd": lambda mesh: zf.zero(1, over(mesh["ep"]), rule(), mesh["dp"]).init(LEAVES),
    "glob": lambda mesh: over(mesh["ep"], product, "expert.*")(LEAVES, X),
    "plans": lambda mesh: over(mesh["ep"], product, [*LEAVES][mesh["ep"].rank])(LEAVES, X),
    "inside": lambda mesh: zf.tensor_parallel(over(mesh["ep"]), mesh["dp"], {"w": "rowwise"})(
        LEAVES, X
    ),
    "data": lambda mesh: zf.zero(1, over(mesh["ep"]), rule(), mesh["dp", "ep"]),
    "flat": lambda mesh: over(mesh["ep"])(zf.shard(LEAVES, mesh["dp"]), X),
    "function": lambda mesh: over(mesh["ep"], lambda p, x: _Double.apply(p["w"]).sum())(
        {name: leaf.clone().requires_grad_() for name, leaf in LEAVES.items()}, X
    ),
    "branch": lambda mesh: over(mesh["ep"], lambda p, x: p["wv"[mesh["ep"].rank]].sum())(
        {name: torch.ones(2, requires_grad=True) for name in ("w", "v", "experts")}, X
    ).backward(),
    "shapes": lambda mesh: dispatch(product, X, ONES[1:].long(), ONES, mesh["ep"], 2),
    "weights": lambda mesh: dispatch(product, X, ONES.long(), torch.ones(4, 2), mesh["ep"], 2),
    "experts": lambda mesh: dispatch(product, X, ONES.long(), ONES, mesh["ep"], 3),
    "floats": lambda mesh: dispatch(product, X, ONES, ONES, mesh["ep"], 2),
}


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore
        return 2 * grad


@pytest.mark.parametrize(
    ("case", "kind", "match"),
    [
        ("twice", OptionError, "cut once along an axis; expert_parallel.. got the axis"),
        ("axes", OptionError, r"one axis; got <mesh: .*; pass one axis, such as mesh\['ep'\]"),
        ("pipeline", OptionError, "takes the loss of a batch; got a pipeline"),
        ("stage", OptionError, r"batches of their own.*got stage 0 without expert_parallel"),
        ("odd", LeafError, "got leaf 'experts' of shape .3, 2., .* over 2 ranks"),
        ("glob", OptionError, "got 'expert..', which matches none of w, experts; mend the glob"),
        ("plans", SpecMismatch, "plan of expert_parallel"),
        ("inside", PlacementError, "stands around tensor_parallel.*'w'"),
        ("data", OptionError, "different axes of one mesh"),
        ("flat", PlacementError, "put shard_params.. around it"),
        ("function", PlacementError, "got the lazy leaf 'w'"),
        ("branch", CollectiveMismatch, "all_reduce 'grads' .w. .* all_reduce 'grads' .v."),
        ("shapes", OptionError, "got shapes .4, 2., .3, 1. and .4, 1.; reshape"),
        ("weights", OptionError, "got shapes .4, 2., .4, 1. and .4, 2.; reshape"),
        ("experts", OptionError, "got 3 experts over 2 ranks"),
        ("floats", OptionError, "chosen of dispatch.. must be a tensor of integers"),
    ],
)
def test_wrong_programs_are_refused_by_name(case: str, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        zf.simulate(2, lambda group: WRONG[case](zf.mesh(group, dp=1, ep=2)))


def penalised(
    group: Group, stage: int, ep: int, term: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Train experts that scale tokens, with a term over the experts, and return them."""
    mesh = zf.mesh(group, dp=group.size // ep, ep=ep)

    def loss_fn(p: Any, x: Tensor) -> Any:
        halved = p["experts"] / 2  # before tokens travel
        chosen = torch.arange(len(x)).remainder(4)[:, None]
        experts = lambda rows, ids: rows * halved[ids]
        out = dispatch(experts, x, chosen, torch.ones(len(x), 1), mesh["ep"], 4)
        loss = out.square().sum()
        if term is None:  # a number that is only shown
            return loss, p["experts"].norm()
        return (loss + term(p["experts"]), {"scaled": out})

    zero = zf.zero(stage, over(mesh["ep"], loss_fn), zf.optim.adamw(0.1), mesh["dp"])
    state = zero.init({"experts": draw(4, 2)})
    for step in range(2):
        state, _ = zero.step(state, draw(5, 2, seed=step))
    return zero.params(state)["experts"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_term_over_experts_is_refused_where_tokens_have_not_met_them(stage: int) -> None:
    """A rank has a part of the experts, so a mean over ranks would count a part of the term."""
    close(zf.simulate(2, penalised, stage, 2)[0], zf.simulate(2, penalised, stage, 1)[0])
    for term in (lambda x: 0.1 * x.norm(), lambda x: x.square().mean().exp()):
        zf.simulate(2, penalised, stage, 1, term)  # all experts on each rank: right
        with pytest.raises(PlacementError, match=r"leaf 'experts', .* one rank of 2; .* decay"):
            zf.simulate(2, penalised, stage, 2, term)
