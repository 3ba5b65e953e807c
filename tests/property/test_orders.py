"""Ranks may use blocks in any order, recompute them, detach them, or use none: a step of stage 3
has the bits of whole parameters, and no rank waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests.conftest import examples
from zfun import optim
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(120)

WIDTH = 3

# How a loss uses some blocks, and their numbers.
Part: TypeAlias = tuple[str, tuple[int, ...]]
# One program for each rank, for each step.
Programs: TypeAlias = list[list[list[Part]]]


def fresh(num_blocks: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(num_blocks)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64) / 2
    return [{"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for _ in range(num_blocks)]


def through(blocks: Sequence[Any], x: Tensor) -> Tensor:
    for block in blocks:
        x = torch.tanh(x @ block["w"] + block["b"])
    return x


def nested(blocks: Sequence[Any], x: Tensor) -> Tensor:
    return zf.remat(through)(blocks[1:], zf.remat(through)(blocks[:1], x))


def biases(blocks: Sequence[Any], x: Tensor) -> Tensor:
    """Autograd saves nothing of these blocks."""
    for block in blocks:
        x = x + block["b"]
    return x


def mapped(blocks: Sequence[Any], x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: through(blocks, row))(x)


@torch.no_grad()
def untracked(blocks: Sequence[Any], x: Tensor) -> Tensor:
    return through(blocks, x)


USES: dict[str, Callable[[Any, Tensor, list[Tensor]], Tensor]] = {
    "plain": lambda blocks, x, aux: through(blocks, x),
    "remat": lambda blocks, x, aux: zf.remat(through)(blocks, x),
    "nested remat": lambda blocks, x, aux: zf.remat(nested)(blocks, x),
    "remat that keeps": lambda blocks, x, aux: zf.remat(through, policy=zf.policies.matmuls)(
        blocks, x
    ),
    "torch's checkpoint": lambda blocks, x, aux: checkpoint(
        through, blocks, x, use_reentrant=False
    ),
    "detached": lambda blocks, x, aux: x + through(blocks, x).detach(),
    "detached remat": lambda blocks, x, aux: x + zf.remat(through)(blocks, x).detach(),
    "detached before": lambda blocks, x, aux: through(blocks, x.detach()),
    "no_grad": lambda blocks, x, aux: x + untracked(blocks, x),
    "biases": lambda blocks, x, aux: biases(blocks, x),
    "detached biases": lambda blocks, x, aux: x + biases(blocks, x).detach(),
    "gathered only": lambda blocks, x, aux: (zf.gather(list(blocks)), x)[1],
    "dropped": lambda blocks, x, aux: (through(blocks, x), x)[1],
    "aux": lambda blocks, x, aux: aux.append(through(blocks, x)) or x,
    "side by side": lambda blocks, x, aux: sum((through([block], x) for block in blocks), x),
    "vmap": lambda blocks, x, aux: mapped(blocks, x),
    "remat of vmap": lambda blocks, x, aux: zf.remat(mapped)(blocks, x),
}


def trained(group: zf.Group, stage: int, programs: Programs, num_blocks: int, over: str) -> Any:
    shared = group
    if over != "group":
        mesh = zf.split(group, inner=2)
        shared = mesh.inner if over == "inner axis" else mesh
    step = 0

    def loss_fn(params: Any, x: Tensor) -> Any:
        aux: list[Tensor] = []
        for use, numbers in programs[step][group.rank % len(programs[step])]:
            x = USES[use]([params[number] for number in numbers], x, aux)
        return x.pow(2).mean(), aux

    z = zf.zero(
        stage,
        loss_fn,
        optim.sgd(0.1),
        shared,
        bucket_bytes=80,
    )
    state = z.init(fresh(num_blocks))
    losses = []
    for step in range(len(programs)):
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        state, info = z.step(state, torch.randn(2, WIDTH, generator=generator, dtype=torch.float64))
        losses.append(info.loss)
    return losses, z.params(state)


def check(programs: Programs, num_blocks: int, over: str = "group") -> None:
    size = 4 if over != "group" else len(programs[0])
    unused = "a loss must use its parameters"
    try:
        expected = zf.simulate(size, trained, 1, programs, num_blocks, over)
    except zf.errors.LeafError:
        with pytest.raises(zf.errors.LeafError, match=unused):
            zf.simulate(size, trained, 1, programs, num_blocks, over)
        with pytest.raises(zf.errors.LeafError, match=unused):
            zf.simulate(size, trained, 3, programs, num_blocks, over)
        return
    assert_same_bits(zf.simulate(size, trained, 3, programs, num_blocks, over), expected)


def parts(num_blocks: int) -> st.SearchStrategy[list[Part]]:
    numbers = st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=2).map(tuple)
    return st.lists(st.tuples(st.sampled_from(list(USES)), numbers), max_size=num_blocks + 1)


@st.composite
def random_programs(draw: st.DrawFn) -> tuple[Programs, int]:
    """Programs like each other: a rank has the common one, a permutation, or its own."""
    num_blocks, size = draw(st.integers(1, 6)), draw(st.sampled_from([2, 2, 3]))
    common = draw(parts(num_blocks))
    one = st.one_of(st.just(common), st.permutations(common), parts(num_blocks))
    return draw(st.lists(st.lists(one, min_size=size, max_size=size), min_size=1, max_size=3)), (
        num_blocks
    )


@given(case=random_programs())
@settings(max_examples=examples(80))
def test_random_orders(case: tuple[Programs, int]) -> None:
    check(*case)


@given(case=random_programs(), over=st.sampled_from(["mesh", "inner axis"]))
@settings(max_examples=examples(40))
def test_random_orders_over_a_mesh(case: tuple[Programs, int], over: str) -> None:
    check(*case, over)


SMALLEST: dict[str, tuple[list[Part], list[Part]]] = {
    "remat on one rank": ([("remat", (0, 1))], [("plain", (0, 1))]),
    "another order under remat": ([("remat", (0, 1, 2))], [("remat", (2, 1, 0))]),
    "detached first": (
        [("plain", (0, 3)), ("plain", (1, 4, 2))],
        [("detached", (0, 3)), ("plain", (1, 4, 2))],
    ),
    "detached last": ([("plain", (0, 1, 2, 3, 4))], [("plain", (0, 1, 2)), ("detached", (3, 4))]),
    "torch's checkpoint on one rank": (
        [("plain", (1,)), ("side by side", (2, 0))],
        [("torch's checkpoint", (1,)), ("side by side", (2, 0))],
    ),
    "aux on one rank": ([("plain", (0, 1))], [("aux", (0, 1))]),
    "gathered only": ([("plain", (0, 1, 2, 3))], [("plain", (0, 1)), ("gathered only", (2, 3))]),
    "detached biases": (
        [("biases", (0,)), ("plain", (1, 2, 3))],
        [("detached biases", (0,)), ("plain", (1, 2, 3))],
    ),
}


@pytest.mark.parametrize("over", ["group", "mesh", "inner axis"])
@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_programs(name: str, over: str) -> None:
    first, second = SMALLEST[name]
    # The ranks part in the first step, or after a step of the same program.
    check([[first, second]], 5, over)
    check([[first, first], [first, second], [second, first]], 5, over)


@pytest.mark.parametrize("runs", ["pullback", "tape"])
@pytest.mark.parametrize("paths", [([2], [3, 2, 3, 2]), ([2, 1, 1], [2], [0, 2, 0, 3])])
def test_a_rank_may_begin_backward_at_other_outputs(paths: Sequence[list[int]], runs: str) -> None:
    """In the first pass or later, with cotangents or by ``backward()`` of torch."""

    def main(group: zf.Group, sharded: bool) -> list[Any]:
        def fn(params: Any, x: Tensor) -> dict[str, Tensor]:
            return {
                str(place): through([params[number] for number in path], x)
                for place, path in enumerate(paths)
            }

        params: Any = fresh(4)
        if sharded:
            params = zf.shard(params, group, bucket_bytes=80)
        vg: Any = zf.transforms.replicate_grads(
            zf.data_parallel(
                zf.value_and_grad(zf.shard_params(fn, group) if sharded else fn), group
            ),
            group,
        )
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            x = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
            begins = [place > 0 or step == 1 or group.rank == 0 for place in range(len(paths))]
            grads: list[Any] = []
            if runs == "tape":
                out, tape = vg.record(params, x)
                tape.deliver = grads.append
                values = zip(out.values(), begins, strict=True)
                torch.stack(
                    [(y if taken else y.detach()).sum() for y, taken in values]
                ).sum().backward()
            else:
                out, pull = zf.vjp(vg, params, x)
                grads.append(
                    pull(
                        {
                            name: torch.ones_like(y) if taken else None
                            for (name, y), taken in zip(out.items(), begins, strict=True)
                        }
                    )
                )
            found.append(zf.unshard(grads[0]))
        return found

    assert_same_bits(zf.simulate(2, main, True), zf.simulate(2, main, False))


@pytest.mark.parametrize("run", [1, 2], ids=["forward", "recomputation"])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_ranks_in_another_order_hear_of_an_error(block: int, run: int) -> None:
    """One rank fails in a block, and the other needs more gathers than that rank has started."""

    def main(group: zf.Group) -> None:
        runs = [0] * 6
        step = 0

        def one(number: int, params: Any, x: Tensor) -> Tensor:
            runs[number] += 1
            if (step, group.rank, number, runs[number]) == (1, 1, block, 2 + run):
                raise ValueError("of the block")
            return through([params], x)

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            order = range(6) if step == 0 or group.rank == 1 else range(5, -1, -1)
            for number in order:
                x = zf.remat(one)(number, params[number], x)
            return x.pow(2).mean()

        z = zf.zero(3, loss_fn, optim.sgd(0.1), group, bucket_bytes=80)
        state = z.init(fresh(6))
        for step in range(2):
            if step == 0 or group.rank == 1:
                state, _ = z.step(state, torch.ones(2, WIDTH, dtype=torch.float64))
                continue
            with pytest.raises(zf.errors.PeerLost, match="rank 1 failed: ValueError: of the block"):
                z.step(state, torch.ones(2, WIDTH, dtype=torch.float64))

    with pytest.raises(ValueError, match="of the block"):
        zf.simulate(2, main)


def test_a_function_around_a_sharded_loss_does_the_same_on_every_rank() -> None:
    """The stated limit: an error names the ranks, their buckets and the remedy on every rank."""

    def main(group: zf.Group) -> None:
        sharded = zf.shard_params(lambda params, x: through(params, x).sum(), group)
        vg = zf.transforms.shard_grads(
            zf.data_parallel(
                zf.value_and_grad(
                    lambda params, x: (
                        sharded(params, x) if group.rank == 0 else sharded(params, x).detach()
                    )
                ),
                group,
            ),
            group,
        )
        params = zf.shard(fresh(5), group, bucket_bytes=80)
        try:
            # From the second call on, the gathers follow a schedule.
            for _ in range(2):
                vg(params, torch.ones(2, WIDTH, dtype=torch.float64))
        except zf.errors.CollectiveMismatch as error:
            messages.append(str(error))
            raise

    messages: list[str] = []
    sides = r"rank 0 in .*\(bucket 9: 4.b\).*; rank 1 in .*\(bucket 4: 2.w\).*; let all ranks call"
    with pytest.raises(zf.errors.CollectiveMismatch, match=sides):
        zf.simulate(2, main)
    assert len(messages) == 2
    assert all("let all ranks call" in message for message in messages)
