"""A map over a flat keeps all that the flat says beside its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree

import zfun as zf
from zfun import compression, optim, stores, tree
from zfun.collectives import single_group
from zfun.testing import assert_same_bits

PARAMS = {"used": torch.linspace(-1, 1, 40), "idle": torch.ones(70)}
MISSED = {"idle": None, "used": 2}
GROUP = single_group()


def flat_of(values: Any) -> zf.Flat[Any]:
    return zf.replicate(values, GROUP)


def torn_apart(value: Any) -> Any:
    leaves, spec = tree.flatten(value)
    return tree.unflatten(spec, leaves)


def through_torch(value: Any) -> Any:
    leaves, spec = torch_pytree.tree_flatten(value)
    return torch_pytree.tree_unflatten(leaves, spec)


MAPS: dict[str, Callable[[Any], Any]] = {
    "map": lambda flat: tree.map(lambda x: x, flat),
    "map of two": lambda flat: tree.map(lambda x, y: x * y, flat, flat_of(PARAMS)),
    "map in a tree": lambda flat: tree.map(torch.clone, {"a": [flat]})["a"][0],
    "flatten": torn_apart,
    "map of torch": lambda flat: torch_pytree.tree_map(lambda x: x * 2, flat),
    "flatten of torch": through_torch,
    "partition": lambda flat: tree.combine(*tree.partition(flat, lambda path, leaf: True)),
    "offload": lambda flat: zf.offload(flat, zf.stores.host()),
    "offload and back": lambda flat: stores.resident(zf.offload(flat, zf.stores.host())),
    "located": lambda flat: stores.located(lambda x: x, flat),
    "by bucket": lambda flat: stores.by_bucket(lambda x: x, flat),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_keeps_missed_steps_and_codec(name: str) -> None:
    flat, codec = flat_of(PARAMS), compression.int8()
    marked = zf.Flat(
        flat.buffers, flat.placement, flat.layout, flat.group, codec=codec, missed=MISSED
    )
    found = MAPS[name](marked)
    assert found.missed == MISSED
    assert found.codec is codec


def test_flats_are_alike_whatever_steps_their_leaves_have_missed() -> None:
    params = flat_of(PARAMS)
    grads = params.with_missed(MISSED)
    assert tree.structure(grads) == tree.structure(params)
    assert hash(tree.structure(grads)) == hash(tree.structure(params))
    assert tree.leaves_like(tree.structure(params), grads) is not None
    # A result is like the first value.
    assert not tree.map(torch.add, params, grads).missed
    assert torch_pytree.tree_structure(grads) == torch_pytree.tree_structure(params)


def test_a_bucket_in_a_store_has_the_codec_of_its_placement() -> None:
    """A codec of a sum is not one of the gather that may follow."""
    codec, flat = compression.int8(), flat_of(PARAMS)
    terms = zf.Flat(flat.buffers, zf.P, flat.layout, GROUP, codec=codec, missed=MISSED)
    found = stores.by_bucket(
        lambda one: zf.redistribute(one, zf.S, GROUP), zf.offload(terms, zf.stores.host())
    )
    assert (found.placement, found.codec, found.missed) == (zf.S, None, MISSED)


def test_a_part_of_a_chain_may_make_updates_of_its_state() -> None:
    """Its state was made of gradients that left a leaf out; those of the next step do not."""

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        sums = tree.map(torch.add, grads, state)
        return tree.map(lambda x: -0.5 * x, sums), sums

    zeros = lambda params: tree.map(torch.zeros_like, params)
    rule = optim.chain(optim.optimizer(zeros, update), optim.scale_by_adam())
    params = flat_of(PARAMS)
    grads = tree.map(torch.ones_like, params)
    state = rule.init(params)
    first, state = rule.apply(grads.with_missed({"idle": None}), state, params)
    second, _ = rule.apply(grads.with_missed({}), state, first)
    before, after = zf.unshard(first), zf.unshard(second)
    assert_same_bits(before["idle"], PARAMS["idle"])
    assert bool((before["used"] != PARAMS["used"]).all())
    assert bool((after["idle"] != before["idle"]).all())
