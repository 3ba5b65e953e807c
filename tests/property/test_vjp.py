"""Laws 4 and 5 through ``zf.vjp``: the loss is computed outside, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests import models, vjps
from tests.conftest import examples
from zfun import tree
from zfun.testing import Composition, assert_same_bits, bucket_sizes, compositions, trees

SIZES = (1, 2, 3, 4)


def composed(
    made: Composition, group: zf.Group, fn: Any, store: Any, num_micro: int, bucket_bytes: int
) -> Callable[..., Any]:
    """Put the transforms of a composition around a function."""
    for name in made.loss:
        fn = (
            zf.shard_params(fn, group)
            if name == "shard_params"
            else zf.transforms.offload_loss(fn, store)
        )
    steps: dict[str, Callable[[Any], Any]] = {
        "shard_grads": lambda vg: zf.shard_grads(vg, group),
        "replicate_grads": lambda vg: zf.transforms.replicate_grads(vg, group),
        "offload": lambda vg: zf.transforms.offload_grads(vg, store),
        "accumulate": lambda vg: zf.accumulate(vg, num_micro),
    }
    vg = zf.data_parallel(zf.value_and_grad(fn), group, bucket_bytes=bucket_bytes)
    for name in made.grads:
        vg = steps[name](vg)
    return vg


def placed(made: Composition, group: zf.Group, params: Any, store: Any, bucket_bytes: int) -> Any:
    if not (made.flat or made.loss):
        return params
    place = zf.shard if "shard_params" in made.loss else zf.replicate
    flat = place(params, group, bucket_bytes=bucket_bytes)
    return zf.offload(flat, store) if "offload" in made.loss else flat


@settings(max_examples=examples(24))
@given(
    params=trees(nodes=models.NODES),
    size=st.sampled_from(SIZES),
    bucket_bytes=bucket_sizes(),
    num_micro=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_loss_outside_has_the_gradients_of_the_loss_inside(
    params: Any, size: int, bucket_bytes: int, num_micro: int, seed: int, data: st.DataObject
) -> None:
    """Under any composition, in the first calls and in later ones, which follow a schedule."""
    batches = models.tree_batches(3, size, 6, seed)
    made = data.draw(compositions(num_micro_batches=num_micro))
    if num_micro > 1 and "accumulate" not in made.grads:
        made = made.__class__(made.loss, (*made.grads, "accumulate"), made.optimizer, made.flat)

    def main(group: zf.Group) -> None:
        store = zf.stores.host()
        options = (store, num_micro, bucket_bytes)
        inside = composed(made, group, vjps.whole, *options)
        outside = composed(made, group, vjps.forward, *options)
        value = placed(made, group, params, store, bucket_bytes)
        for step in batches:
            batch = step[group.rank]
            _, expected = inside(value, batch)
            found = vjps.pulled(outside, value, batch, num_micro)
            assert found.placement is expected.placement
            assert_same_bits(zf.unshard(found), zf.unshard(expected))
            leaves = [leaf for leaf in tree.leaves(zf.unshard(found)) if leaf.numel()]
            assert not leaves or any(leaf.any() for leaf in leaves)

    zf.simulate(size, main)


@settings(max_examples=examples(12))
@given(
    params=trees(nodes=models.NODES),
    size=st.sampled_from(SIZES),
    made=st.lists(compositions(), min_size=2, max_size=3),
    buckets=st.lists(bucket_sizes(), min_size=1, max_size=2),
    seed=st.integers(0, 99),
)
def test_every_composition_pulls_the_same_bits(
    params: Any, size: int, made: list[Composition], buckets: list[int], seed: int
) -> None:
    """On one rank, those of plain autograd (law 4)."""
    batches = models.tree_batches(2, size, 6, seed)

    def main(group: zf.Group) -> None:
        for step in batches:
            found: list[Any] = []
            for turn, one in enumerate([Composition(), *made]):
                store, bucket_bytes = zf.stores.host(), buckets[turn % len(buckets)]
                vg = composed(one, group, vjps.forward, store, 1, bucket_bytes)
                value = placed(one, group, params, store, bucket_bytes)
                found.append(zf.unshard(vjps.pulled(vg, value, step[group.rank])))
                assert_same_bits(found[-1], found[0])
            if group.size == 1:
                assert_same_bits(found[0], plain(params, step[0]))

    zf.simulate(size, main)


def plain(params: Any, batch: torch.Tensor) -> Any:
    leaves, spec = tree.flatten(params)
    # Tied leaves are one tensor, whose gradient is the sum over the places.
    once = {id(leaf): leaf.clone().requires_grad_() for leaf in leaves}
    mine = [once[id(leaf)] for leaf in leaves]
    loss = vjps.whole(tree.unflatten(spec, mine), batch)
    grads = torch.autograd.grad(loss, mine, allow_unused=True)
    return tree.unflatten(
        spec, [torch.zeros_like(p) if g is None else g for p, g in zip(mine, grads, strict=True)]
    )
