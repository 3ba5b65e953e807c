"""Named axes: collectives over any axes match their definition, and stages compose with them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim
from zfun.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    global_ranks,
    start_reduce_scatter_over,
    sum_group,
)
from zfun.planner._price import price_of_gather, price_of_sum
from zfun.testing import assert_same_bits

MOST_RANKS = 12


@st.composite
def axes(draw: st.DrawFn, least: int = 2, most: int = 4) -> dict[str, int]:
    """Draw names and sizes of axes, of at most 12 ranks together."""
    sizes: dict[str, int] = {}
    for name in draw(st.permutations("abcd"))[: draw(st.integers(least, most))]:
        sizes[name] = draw(st.integers(1, min(4, MOST_RANKS // math.prod(sizes.values()))))
    return sizes


def subsets(names: Any) -> list[tuple[str, ...]]:
    return [x for count in range(1, len(names) + 1) for x in itertools.combinations(names, count)]


def added(terms: list[Tensor], sizes: list[int]) -> Tensor:
    """Add the terms of a group over one axis after the other, the innermost one first."""
    for size in sizes:
        rest = len(terms) // size
        terms = [functools.reduce(torch.add, terms[place::rest]) for place in range(rest)]
    return terms[0]


def expected(op: Op, inputs: list[Tensor], sizes: list[int], rank: int) -> Tensor:
    """Return the result of a rank, from the definition of the collective."""
    size = len(inputs)
    match op:
        case AllGather():
            return torch.cat(inputs)
        case AllReduce():
            return added(inputs, sizes)
        case ReduceScatter():
            return added(inputs, sizes).view(size, inputs[0].numel() // size)[rank]
        case Broadcast(root):
            return inputs[root]
        case Reduce(root):
            total = added(inputs, sizes)
            return total if rank == root else torch.zeros_like(total)
        case AllToAll():
            return torch.cat([x.view(size, x.numel() // size)[rank] for x in inputs])
        case Permute():
            return inputs[op.sources[rank]]
        case _:
            raise AssertionError(op)


def ops_of(size: int, pick: int) -> list[Op]:
    root, turned = pick % size, tuple((rank + pick) % size for rank in range(size))
    some: list[Op] = [AllGather(), ReduceScatter(), AllReduce(), AllToAll()]
    return [*some, Broadcast(root), Reduce(root), Permute(turned)]


@given(
    sizes=axes(),
    calls=st.lists(
        st.tuples(
            st.integers(0, 14), st.integers(0, 6), st.integers(0, 11), st.sampled_from([0, 1, 350])
        ),
        min_size=1,
        max_size=9,
    ),
    dtype=st.sampled_from([torch.float32, torch.int64]),
    stream=st.sampled_from(list(Stream)),
    orders_differ=st.booleans(),
)
@settings(max_examples=examples(30))
def test_collectives_over_any_axes_equal_their_definition(
    sizes: dict[str, int],
    calls: list[tuple[int, int, int, int]],
    dtype: torch.dtype,
    stream: Stream,
    *,
    orders_differ: bool,
) -> None:
    """Start collectives of several groups of a mesh before the first wait; ranks wait in different
    orders.
    """
    chosen = subsets(sizes)
    names_of = [chosen[which % len(chosen)] for which, *_ in calls]

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, **sizes)
        generator = torch.Generator().manual_seed(group.rank)
        inputs, pending = [], []
        for names, (_, kind, pick, length) in zip(names_of, calls, strict=True):
            over = mesh[names]
            op = ops_of(over.size, pick)[kind]
            # A permutation goes along one axis, or all.
            if isinstance(op, Permute) and len(names) > 1 and over.size < group.size:
                with pytest.raises(zf.ZfunError, match="goes along no axis of several"):
                    over.start(Collective(op), torch.zeros(1))
                op = AllReduce()
            numel = length * over.size
            x = torch.randn(numel, generator=generator).mul_(1000.0).to(dtype)
            inputs.append(x.clone())
            pending.append((over, op, over.start(Collective(op, stream=stream), x)))
        for _, _, work in reversed(pending) if orders_differ and group.rank % 2 else pending:
            work.wait()
        return inputs, [
            (global_ranks(over), over.rank, op, work.wait()) for over, op, work in pending
        ]

    ranks = zf.simulate(math.prod(sizes.values()), main)
    for rank, (_, results) in enumerate(ranks):
        for index, (members, place, op, result) in enumerate(results):
            assert members[place] == rank
            inner_first = [sizes[name] for name in reversed(sizes) if name in names_of[index]]
            terms = [ranks[member][0][index] for member in members]
            wanted = expected(op, terms, inner_first, place)
            assert_same_bits(result, wanted, f"{op} over {names_of[index]} on rank {rank}")


@pytest.mark.parametrize("stream", list(Stream))
def test_a_chain_of_three_axes_does_not_wait_for_another_order(stream: Stream) -> None:
    """All hops of earlier calls start before a call that needs their axes, whoever waits when."""

    def main(group: zf.Group) -> list[float]:
        mesh = zf.mesh(group, a=2, b=2, c=2)
        overs = [mesh["a", "b", "c"], mesh["c"], mesh["a", "c"], mesh["b", "c"], mesh["a"]]
        ops: list[Op] = [AllGather(), AllReduce(), ReduceScatter()]
        pending = []
        for turn, (over, op) in enumerate(itertools.product(overs, ops)):
            x = torch.ones(8 * 300)
            pending.append(over.start(Collective(op, str(turn), stream=stream), x))
            # Ranks differ in whether they wait at once.
            if (turn + group.rank) % 3 == 0:
                pending[-1].wait()
        turned = pending[group.rank :] + pending[: group.rank]
        for work in turned:
            work.wait()
        return [float(work.wait().sum()) for work in pending]

    first, *others = zf.simulate(8, main)
    assert all(other == first for other in others)


def trained(group: zf.Group, stage: int, over: zf.Group, batches: Any, **options: Any) -> Any:
    z = zf.zero(
        stage,
        models.mlp_loss,
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05)),
        over,
        bucket_bytes=300,
        **options,
    )
    state, infos = z.init(models.mlp(num_layers=2)), []
    for batch in batches:
        state, info = z.step(state, batch)
        infos.append((info.loss, info.grad_norm, info.skipped))
    return z.params(state), infos


@given(
    sizes=axes(most=3),
    pick=st.integers(0, 2),
    stage=st.integers(0, 3),
    num_micro_batches=st.sampled_from([1, 2]),
)
@settings(max_examples=examples(10))
def test_stages_over_one_axis_are_independent_along_the_others(
    sizes: dict[str, int], pick: int, stage: int, num_micro_batches: int
) -> None:
    """Each replica trains on its own batches, and has the bits of a run on a plain group."""
    name = list(sizes)[pick % len(sizes)]
    size = math.prod(sizes.values())
    batches = models.mlp_batches(2, size)
    options = {"num_micro_batches": num_micro_batches}

    def main(group: zf.Group) -> Any:
        over = zf.mesh(group, **sizes)[name]
        mine = [step[group.rank] for step in batches]
        return global_ranks(over), trained(group, stage, over, mine, **options)

    found = zf.simulate(size, main)
    for members in {tuple(members) for members, _ in found}:

        def plain(group: zf.Group, members: tuple[int, ...] = members) -> Any:
            mine = [step[members[group.rank]] for step in batches]
            return trained(group, stage, group, mine, **options)

        for member, wanted in zip(members, zf.simulate(len(members), plain), strict=True):
            assert_same_bits(found[member][1], wanted, f"rank {member} along {name}")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hybrid_sharding_along_axes_equals_a_split(stage: int) -> None:
    batches = models.mlp_batches(2, 8)

    def named(group: zf.Group) -> Any:
        mesh = zf.mesh(group, rep=2, dp=2, tp=2)
        # Both tp ranks of a place have the batch of that place.
        mine = [step[group.rank // 2] for step in batches]
        return trained(group, stage, mesh.group("dp", replicate="rep"), mine)

    def rows(group: zf.Group) -> Any:
        mine = [step[group.rank] for step in batches]
        return trained(group, stage, zf.split(group, inner=2).inner, mine)

    wanted = zf.simulate(4, rows)
    for rank, result in enumerate(zf.simulate(8, named)):
        assert_same_bits(result, wanted[rank // 2], f"rank {rank}")


CUTS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("a", "b", "c"), ()),
    (("b", "c"), ("a",)),
    (("c",), ("a", "b")),
]


def test_all_cuts_over_three_axes_have_equal_bits() -> None:
    batches = models.mlp_batches(2, 8)

    def main(group: zf.Group) -> Any:
        mine = [step[group.rank] for step in batches]
        found = []
        for stage, secondary, (names, replicate) in [
            (0, False, CUTS[0]),
            (3, True, CUTS[0]),
            *((stage, False, cut) for stage in (2, 3) for cut in CUTS),
        ]:
            over = zf.mesh(group, a=2, b=2, c=2).group(*names, replicate=replicate)
            schedule = zf.ScheduleOptions(secondary=secondary)
            found.append((names, trained(group, stage, over, mine, schedule=schedule)))
        return found

    first, *others = zf.simulate(8, main)
    for names, result in [*first, *itertools.chain(*others)]:
        assert_same_bits(result, first[0][1], f"cut over {names}")


@given(path=st.lists(st.tuples(st.sampled_from([zf.R, zf.P, zf.S]), st.integers(0, 2)), max_size=5))
@settings(max_examples=examples(8))
def test_redistribution_along_axes_keeps_values(path: list[tuple[Any, int]]) -> None:
    def main(group: zf.Group) -> None:
        mesh = zf.mesh(group, a=2, b=1, c=2)
        groups = [mesh.group(*names, replicate=others) for names, others in CUTS]
        assert [sum_group(over) for over in groups] == [groups[0]] * 3
        params = {"w": torch.arange(1.0, 300.0), "b": torch.arange(7.0)}
        value = zf.replicate(params, groups[0])
        for placement, which in path:
            over = groups[0] if placement is zf.P else groups[which]
            value = zf.redistribute(value, placement, over)
            assert (value.placement, value.group) == (placement, over)
        assert_same_bits(zf.unshard(value), params)

    zf.simulate(4, main)


@pytest.mark.parametrize("codec", [None, zf.compression.int8(block=32)])
@pytest.mark.parametrize("numel", [24, 24 * 500])
@pytest.mark.parametrize(("names", "replicate"), CUTS)
def test_prices_of_three_axes_equal_the_messages(
    names: tuple[str, ...], replicate: tuple[str, ...], numel: int, codec: Any
) -> None:
    def main(group: zf.Group) -> None:
        recorded, x = zf.record(group), torch.ones(numel)
        over = zf.mesh(recorded, a=2, b=3, c=2).group(*names, replicate=replicate)
        total, gather = Collective(ReduceScatter()), Collective(AllGather())
        if codec is None:
            start_reduce_scatter_over(over, total, x).wait()
            over.start(gather, x[: numel // over.size]).wait()
        else:
            zf.compression.start_over(total, x, over, codec).wait()
            zf.compression.start(gather, x[: numel // over.size], over, codec).wait()
        hops = price_of_sum(numel, 4, over, codec)
        hops += price_of_gather(numel // over.size, 4, over, codec)
        found = [(entry.kind, entry.axis, entry.sent_bytes) for entry in recorded.log]
        assert found == [tuple(hop) for hop in hops]

    zf.simulate(12, main)
