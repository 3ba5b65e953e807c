"""Meshes: collectives match those of a group, and all compositions give the same bits."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim, tree
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
    gather_values,
)
from zfun.testing import assert_padding, assert_round_trip, assert_same_bits

# (number of rows, ranks per row)
MESHES = [(2, 2), (2, 3), (3, 2)]


def by_rows_first(terms: list[Tensor], num_rows: int, inner: int) -> Tensor:
    """Sum terms in mesh order: over each row in rank order, and then over the rows."""
    rows = [
        functools.reduce(torch.add, [terms[i * num_rows + o] for i in range(inner)])
        for o in range(num_rows)
    ]
    return functools.reduce(torch.add, rows)


def expected(op: Op, inputs: list[Tensor], num_rows: int, inner: int) -> list[Tensor]:
    """Return the results of a collective, from the definition."""
    size = len(inputs)
    match op:
        case AllGather():
            return [torch.cat(inputs)] * size
        case ReduceScatter():
            return list(by_rows_first(inputs, num_rows, inner).view(size, -1))
        case AllReduce():
            return [by_rows_first(inputs, num_rows, inner)] * size
        case Broadcast(root):
            return [inputs[root]] * size
        case Reduce(root):
            total = by_rows_first(inputs, num_rows, inner)
            return [total if rank == root else torch.zeros_like(total) for rank in range(size)]
        case AllToAll():
            return [torch.cat([x.view(size, -1)[rank] for x in inputs]) for rank in range(size)]
        case Permute():
            return [inputs[source] for source in op.sources]
        case _:
            raise AssertionError(op)


def the_ops(size: int, pick: int) -> list[Op]:
    rotation = tuple((rank + pick) % size for rank in range(size))
    return [
        AllGather(),
        ReduceScatter(),
        AllReduce(),
        Broadcast(pick % size),
        Reduce(pick % size),
        AllToAll(),
        Permute(rotation),
    ]


@given(
    num_rows=st.integers(1, 3),
    inner=st.integers(1, 3),
    length=st.sampled_from([0, 1, 3, 700]),
    pick=st.integers(0, 8),
    order=st.permutations(range(7)),
    orders_differ=st.booleans(),
)
@settings(max_examples=examples(25))
def test_collectives_over_a_mesh_equal_those_of_the_group(
    num_rows: int, inner: int, length: int, pick: int, order: list[int], *, orders_differ: bool
) -> None:
    """Start all collectives before the first wait, and wait in a different order on each rank."""
    size = num_rows * inner
    ops = [the_ops(size, pick)[place] for place in order]

    def main(group: zf.Group) -> tuple[int, list[Tensor], list[Tensor]]:
        mesh = zf.split(group, inner=inner)
        generator = torch.Generator().manual_seed(group.rank)
        inputs = [torch.randn(size * length, generator=generator) for _ in ops]
        pending = [mesh.start(Collective(op), x) for op, x in zip(ops, inputs, strict=True)]
        for handle in reversed(pending) if orders_differ and group.rank % 2 else pending:
            handle.wait()
        return mesh.rank, inputs, [handle.wait() for handle in pending]

    ranks = sorted(zf.simulate(size, main), key=lambda result: result[0])
    assert [rank for rank, _, _ in ranks] == list(range(size))
    for index, op in enumerate(ops):
        wanted = expected(op, [inputs[index] for _, inputs, _ in ranks], num_rows, inner)
        for rank, (_, inputs, outputs) in enumerate(ranks):
            assert_same_bits(outputs[index], wanted[rank], f"{op} on rank {rank}")
            assert (
                inputs[index].numel() == 0 or outputs[index].data_ptr() != inputs[index].data_ptr()
            )


@pytest.mark.parametrize(("num_rows", "inner"), MESHES)
def test_dual_ops_over_a_mesh_are_adjoint(num_rows: int, inner: int) -> None:
    """Check <A x, y> = <x, A* y> exactly, in integers, also with results over the input."""

    def main(group: zf.Group) -> None:
        mesh = zf.split(group, inner=inner)
        generator = torch.Generator().manual_seed(group.rank)
        for op in the_ops(mesh.size, 1):
            x = torch.randint(-9, 9, (2 * mesh.size,), generator=generator)
            y = torch.randint(-9, 9, (op.output_numel(x.numel(), mesh.size),), generator=generator)
            there = (mesh.start(Collective(op), x).wait() * y).sum()
            back = (mesh.start(Collective(op.dual), y).wait() * x).sum()
            assert (
                gather_values(there, mesh, "there").sum() == gather_values(back, mesh, "back").sum()
            ), op
        for numel in (3, 2000):
            x = torch.randint(-9, 9, (numel,), generator=generator)
            total = mesh.start(Collective(AllReduce()), x).wait()
            assert mesh.start(Collective(AllReduce()), x, x).wait() is x
            assert_same_bits(x, total)
        whole = torch.randint(-9, 9, (2 * mesh.size,), generator=generator)
        piece = whole.view(mesh.size, 2)[mesh.rank]
        gathered = mesh.start(Collective(AllGather()), piece.clone()).wait()
        mesh.start(Collective(AllGather()), piece, whole).wait()
        assert_same_bits(whole, gathered)

    zf.simulate(num_rows * inner, main)


class Places(NamedTuple):
    """The group over which each part of the state is sharded; ``None`` for none."""

    params: str | None
    grads: str | None
    optimizer: str | None
    secondary: bool = False
    flat: str | None = None


def run(
    group: zf.Group, inner: int | None, places: Places, batches: Any, bucket_bytes: int = 300
) -> Any:
    """Run the usual loop on a mesh, or on the group if ``inner`` is ``None``."""
    mesh = group if inner is None else zf.split(group, inner=inner)
    named = {"all": mesh, "inner": mesh.inner if isinstance(mesh, zf.collectives.Mesh) else mesh}
    loss, params = models.mlp_loss, models.mlp(num_layers=2)
    if places.params:
        loss = zf.shard_params(
            loss, named[places.params], schedule=zf.ScheduleOptions(secondary=places.secondary)
        )
        params = zf.shard(params, named[places.params], bucket_bytes=bucket_bytes)
    elif places.flat:
        params = zf.replicate(params, named[places.flat], bucket_bytes=bucket_bytes)
    vg = zf.data_parallel(zf.value_and_grad(loss), mesh, bucket_bytes=bucket_bytes)
    if places.grads:
        vg = zf.shard_grads(vg, named[places.grads])
    # SGD, because Adam would hide a norm or a mean that is wrong by a factor.
    optimizer = optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.05, momentum=0.8))
    if places.optimizer:
        optimizer = zf.shard_optimizer(
            optimizer, named[places.optimizer], bucket_bytes=bucket_bytes
        )
    state, losses = optimizer.init(params), []
    for step in batches:
        value, grads = vg(params, step[group.rank])
        losses.append(float(value))
        params, state = zf.apply(optimizer, grads, state, params)
    assert_padding((params, state))
    return (zf.unshard(params) if isinstance(params, zf.Flat) else params), losses


def all_places() -> list[Places]:
    found = [
        Places(params, grads, rule)
        for params, grads, rule in itertools.product((None, "inner", "all"), repeat=3)
    ]
    found += [
        Places("all", grads, rule, secondary=True)
        for grads, rule in ((None, None), ("all", "all"), ("inner", "all"))
    ]
    return found + [
        Places(None, grads, None, flat=flat)
        for grads in (None, "inner")
        for flat in ("inner", "all")
    ]


@pytest.mark.parametrize(("num_rows", "inner"), MESHES)
def test_all_compositions_over_a_mesh_have_equal_bits(num_rows: int, inner: int) -> None:
    """Law 5 on two axes: the same bits on one mesh, and the group's result up to rounding."""
    size = num_rows * inner
    batches = models.mlp_batches(2, size)
    compositions = all_places()[::2] if (num_rows, inner) == (2, 2) else all_places()[::4]
    first: Any = None
    for turn, places in enumerate(compositions):
        results = zf.simulate(size, run, inner, places, batches, (300, 2**20)[turn % 2])
        first = first or results[0]
        for rank, result in enumerate(results):
            assert_same_bits(result, first, f"rank {rank} under {places} and {compositions[0]}")
    flat = zf.simulate(size, run, None, Places("all", "all", "all"), batches)[0]
    for x, y, before in zip(
        tree.leaves(first),
        tree.leaves(flat),
        tree.leaves((models.mlp(num_layers=2), [0.0] * 2)),
        strict=True,
    ):
        torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=1e-12, atol=1e-13)
        assert not torch.equal(torch.as_tensor(x), torch.as_tensor(before))


@pytest.mark.parametrize("inner", [1, 4])
def test_a_mesh_of_one_axis_is_the_group(inner: int) -> None:
    batches = models.mlp_batches(2, 4)
    for places in (
        Places("inner", "inner", "inner"),
        Places("all", "all", "all", secondary=True),
        Places(None, None, "inner"),
    ):
        on_mesh = zf.simulate(4, run, inner, places, batches)
        without = zf.simulate(
            4, run, None, Places(places.params, places.grads, places.optimizer), batches
        )
        assert_same_bits(on_mesh, without, str(places))


@given(
    path=st.lists(
        st.sampled_from(
            [(zf.R, "inner"), (zf.R, "all"), (zf.P, "all"), (zf.S, "inner"), (zf.S, "all")]
        ),
        max_size=5,
    )
)
@settings(max_examples=examples(15))
def test_redistribution_over_a_mesh_keeps_values(
    path: list[tuple[zf.placement.Placement, str]],
) -> None:
    """Law 3 on two axes: no chain of placements and groups changes a value."""

    def main(group: zf.Group) -> None:
        mesh = zf.split(group, inner=2)
        named = {"inner": mesh.inner, "all": mesh}
        params = {"w": torch.arange(1.0, 300.0), "b": torch.arange(7.0)}
        whole = zf.replicate(params, mesh)
        value = whole
        for placement, name in path:
            value = zf.redistribute(value, placement, named[name])
            assert (value.placement, value.group) == (placement, named[name])
        assert_same_bits(zf.unshard(value), params)
        for name, axis in named.items():
            shards = zf.redistribute(value, zf.S, axis)
            assert_same_bits(shards.buffers, zf.shard(params, axis).buffers, name)
            assert shards.buffers[0].numel() * axis.size == whole.buffers[0].numel()
            assert_round_trip(params, axis)

    zf.simulate(6, main)


# torch triggers this warning at the first import for forward-mode derivatives.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("axis", ["inner", "all"])
def test_functional_derivatives_over_a_mesh_equal_those_of_one_process(axis: str) -> None:
    """Compare torch.func through a gather with the same loss over all ranks' batches."""
    batches = torch.cat(models.mlp_batches(1, 4)[0])

    def main(group: zf.Group) -> Any:
        mesh = zf.split(group, inner=2)
        over = mesh.inner if axis == "inner" else mesh
        params = zf.shard(models.mlp(), over, bucket_bytes=300)
        tangent = zf.shard(models.mlp(seed=4), over, bucket_bytes=300)
        loss = zf.shard_params(lambda p, b: models.mlp_loss(p, b) / 4, over)
        gradient = lambda p: torch.func.grad(loss)(p, batches.view(4, -1, 5)[group.rank])
        product = torch.func.jvp(gradient, (params,), (tangent,))[1]
        native = zf.value_and_grad(loss)(params, batches.view(4, -1, 5)[group.rank])[1]
        assert native.placement is zf.S
        assert native.group is over
        return zf.unshard(gradient(params)), zf.unshard(product), zf.unshard(native)

    gradient = lambda p: torch.func.grad(models.mlp_loss)(p, batches)
    product = torch.func.jvp(gradient, (models.mlp(),), (models.mlp(seed=4),))[1]
    wanted = (gradient(models.mlp()), product, gradient(models.mlp()))
    for found in zf.simulate(4, main):
        for x, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)
