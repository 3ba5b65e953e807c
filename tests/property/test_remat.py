"""remat() changes no bit, for any policy, store and surrounding transform."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim, policies, tree
from zfun.testing import assert_same_bits, bucket_sizes, compositions, train, trees
from zfun.transforms.remat._elsewhere import Elsewhere
from zfun.transforms.remat._vectors import vector_of

CHOICES = [
    policies.nothing,
    policies.everything,
    policies.matmuls,
    policies.unbatched_matmuls,
    lambda op, result: True,
]
# A policy by hash, so that any combination of kept results occurs.
PATTERNS = st.integers(0, 2**16 - 1).map(
    lambda bits: lambda op, result: bool(bits >> (hash((str(op), result.num_bytes)) % 16) & 1)
)
POLICIES = st.one_of(st.sampled_from(CHOICES), PATTERNS)


def step(carry: Tensor, leaf: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Use one leaf of a tree in views, in-place writes, a random mask, and products."""
    x = leaf.double().reshape(-1)
    waves = torch.cos(torch.arange(x.numel(), dtype=torch.float64) * 0.37)
    mask = (
        torch.rand(x.shape, generator=options["generator"], dtype=torch.float64) > 0.25
    ).double()
    grown = (x * waves * mask).expand(2, -1).t()
    square = grown @ grown.t() / max(1, x.numel())
    out = carry + torch.tanh(square.sum().mul_(0.5) + carry) / options["scale"]
    return out, {"norm": (x * x).sum() / max(1.0, math.sqrt(x.numel()))}


def loss_of(run: Any) -> Any:
    def loss_fn(params: Any, batch: Tensor) -> Tensor:
        # A seed per rank and micro-batch, the same in every run.
        generator = torch.Generator().manual_seed(int(batch.sum().abs() * 1e6) % 2**31)
        carry = torch.tanh(batch.double().mean())
        for leaf in tree.leaves(params):
            carry, aux = run(carry, leaf, {"generator": generator, "scale": 2})
            carry = carry + 0.05 * aux["norm"]
        return carry

    return loss_fn


@settings(max_examples=examples(8))
@given(
    params=trees(nodes=models.NODES),
    size=st.sampled_from([1, 2, 3]),
    policy=POLICIES,
    stored=st.booleans(),
    bucket_bytes=bucket_sizes(),
    num_micro_batches=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_remat_is_right_for_any_tree_policy_store_and_composition(
    params: Any,
    size: int,
    policy: Any,
    stored: bool,
    bucket_bytes: int,
    num_micro_batches: int,
    seed: int,
    data: st.DataObject,
) -> None:
    composition = data.draw(compositions(num_micro_batches=num_micro_batches))
    batches = models.tree_batches(2, size, 4, seed)

    def main(group: zf.Group, run: Any, chosen: Any) -> Any:
        options = {"num_micro_batches": num_micro_batches, "bucket_bytes": bucket_bytes}
        return train(
            chosen, group, loss_of(run), optim.sgd(0.05, momentum=0.8), params, batches, **options
        )[:2]

    run = zf.remat(step, policy=policy, store=zf.stores.host() if stored else None)
    expected = zf.simulate(size, main, step, dataclasses.replace(composition, remat=False))
    assert_same_bits(zf.simulate(size, main, run, composition), expected)


@settings(max_examples=examples(8))
@given(
    size=st.sampled_from([1, 2, 3]),
    stage=st.sampled_from([0, 1, 2, 3]),
    policy=POLICIES,
    stored=st.booleans(),
    compute=st.sampled_from([None, torch.bfloat16]),
    frozen=st.booleans(),
    partial=st.booleans(),
)
def test_remat_is_right_for_any_stage_and_precision(
    size: int, stage: int, policy: Any, stored: bool, compute: Any, frozen: bool, partial: bool
) -> None:
    """Combine frozen leaves, a compute dtype, offload, and activations in parts."""

    def block(layer: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ layer["w"] + layer["b"])

    def main(group: zf.Group, remat: bool) -> Any:
        store = zf.stores.host() if stored else None
        run = (
            zf.remat(block, policy=policy, store=store, shard_over=group if partial else None)
            if remat
            else block
        )

        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for layer in params["h"]:
                x = run(layer, x)
            return (x @ params["out"]).pow(2).mean()

        precision = zf.Precision(compute=compute)
        trainable = (lambda path, _: not path.startswith("h.1")) if frozen else None
        z = zf.zero(
            stage,
            loss_fn,
            optim.sgd(0.05),
            group,
            bucket_bytes=300,
            precision=precision,
            trainable=trainable,
        )
        state, losses = z.init(models.mlp(dtype=torch.float32)), []
        for batches in models.mlp_batches(2, size, dtype=torch.float32):
            state, info = z.step(state, batches[0 if partial else group.rank])
            losses.append(info.loss)
        return z.params(state), losses

    assert_same_bits(zf.simulate(size, main, True), zf.simulate(size, main, False))


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Draw views of a tensor: permuted, sliced, expanded, overlapping, with any offset."""
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    base = torch.arange(
        4000, dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.int8]))
    )
    offset, strides = (
        draw(st.integers(0, 9)),
        draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape))),
    )
    if draw(st.booleans()):
        return base.as_strided(shape, strides, offset)
    x = base[offset : offset + math.prod(shape)].reshape(shape)
    return x.permute(draw(st.permutations(range(len(shape))))).expand(
        draw(st.integers(1, 3)), *[-1] * len(shape)
    )


@settings(max_examples=examples(150))
@given(strided(), st.booleans())
def test_a_saved_activation_is_restored_with_values_strides_and_alignment(
    x: Tensor, stored: bool
) -> None:
    """Values, strides and alignment return; an empty or overlapping tensor stays in place."""
    elsewhere, vector = Elsewhere(zf.stores.host() if stored else None, None), vector_of(x)
    found = elsewhere.restore(elsewhere.keep(x))
    assert_same_bits(found, x)
    if vector is None:
        assert found is x
        return
    assert vector.numel() == len(set(x.flatten().tolist()))
    assert all(a == b for a, b, n in zip(found.stride(), x.stride(), x.shape, strict=True) if n > 1)
    assert found.data_ptr() % 64 == x.storage_offset() * x.element_size() % 64
