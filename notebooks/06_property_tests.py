# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Property-based testing of your own transform
#
# A transform of gradients that is right on one rank may be wrong on shards, where each rank holds
# only a part. In this notebook you write such a transform, let `assert_invariant` find the mistake,
# and repair it. Then hypothesis draws trees, group sizes and bucket sizes for the repaired one.

# %%
import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm.auto import tqdm

ROOT = next(
    path
    for path in (Path.cwd(), *Path.cwd().parents, *Path(sys.argv[0]).resolve().parents)
    if (path / "notebooks" / "figures.py").exists()
)
sys.path += [str(ROOT / "notebooks")]

import figures

import zfun as zf
from zfun import tree
from zfun.flat import leaf_spans
from zfun.testing import (
    assert_invariant,
    bucket_sizes,
    group_sizes,
    tensors,
    trees,
)

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## A transform that is wrong on shards
#
# The transform bounds the norm of each leaf's gradient. Under plain autograd, gradients are a tree
# of whole leaves. Under `shard_grads` they are a `Flat`: buffers with this rank's part of the
# leaves. `leaf_spans` tells where the leaves lie in the buffers. The mistake: the norm below covers
# only the part of a leaf that lies on this rank.

# %%
BOUND = 0.05


def clip_parts(gradient_fn):
    def clipped(params, batch):
        value, grads = gradient_fn(params, batch)
        if not isinstance(grads, zf.Flat):
            return value, tree.map(lambda g: g * factor(g.square().sum()), grads)
        buffers = [buffer.clone() for buffer in grads.buffers]
        for span in leaf_spans(grads):
            part = buffers[span.bucket][span.start : span.stop]
            part *= factor(part.square().sum())  # the squares of this rank alone
        return value, grads.with_buffers(buffers)

    return clipped


def factor(squares):
    return min(1.0, BOUND / max(squares.sqrt().item(), 1e-12))


# %% [markdown]
# ## The smallest case, the leaf and the cause
#
# `assert_invariant` trains in plain PyTorch and on simulated ranks, with the transform in both, and
# compares each step. The transform is right on one rank, and at stages 0 and 1, where every rank
# holds whole gradients. So the smallest case that fails has `shard_grads` and two ranks.


# %%
def loss_fn(params, batch):
    hidden = torch.tanh(batch @ params["in"] + params["bias"])
    return (hidden @ params["out"]).square().mean()


def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


PARAMS = {
    "in": values(16, 12, seed=0),
    "bias": values(12, seed=1),
    "out": values(12, 9, seed=2),
}
BATCH = values(12, 16, seed=3)

try:
    assert_invariant(loss_fn, PARAMS, BATCH, zf.optim.sgd(0.1), transform=clip_parts)
except AssertionError as error:
    print(error)
else:
    raise SystemExit("the mistake was not found")

# %% [markdown]
# ## Where the error lies
#
# The picture shows the relative error of each leaf's gradient in the first step, by the number of
# ranks. A leaf that lies on one rank as a whole has no error. So a test with small leaves or few
# ranks may pass by luck.


# %%
def gradients(group, transform):
    gradient_fn = zf.data_parallel(zf.value_and_grad(loss_fn), group)
    gradient_fn = transform(zf.shard_grads(gradient_fn, group))
    rows = BATCH.tensor_split(group.size)[group.rank]
    return zf.unshard(gradient_fn(PARAMS, rows)[1])


def errors(transform, sizes):
    _, right = transform(zf.value_and_grad(loss_fn))(PARAMS, BATCH)
    table = {}
    for size in tqdm(sizes, desc="group sizes", leave=False):
        found = zf.simulate(size, gradients, transform)[0]
        table[size] = {
            name: float((found[name] - g).norm() / g.norm())
            for name, g in right.items()
        }
    return table


SIZES = (1, 2, 3, 4, 6, 12)
_ = figures.errors_by_leaf(errors(clip_parts, SIZES), "clip_parts: relative error")

# %% [markdown]
# ## The repaired transform
#
# Each rank sums the squares of its parts, and the ranks exchange one number for each leaf.


# %%
def clip_leaves(gradient_fn):
    def clipped(params, batch):
        value, grads = gradient_fn(params, batch)
        if not isinstance(grads, zf.Flat):
            return value, tree.map(lambda g: g * factor(g.square().sum()), grads)
        buffers = [buffer.clone() for buffer in grads.buffers]
        parts = [buffers[s.bucket][s.start : s.stop] for s in leaf_spans(grads)]
        squares = torch.stack([part.double().square().sum() for part in parts])
        if grads.placement is zf.S:
            squares = zf.reductions.gather_values(grads, squares, "squares").sum(0)
        for part, total in zip(parts, squares, strict=True):
            part *= factor(total)
        return value, grads.with_buffers(buffers)

    return clipped


assert_invariant(loss_fn, PARAMS, BATCH, zf.optim.sgd(0.1), transform=clip_leaves)
repaired = errors(clip_leaves, SIZES)
assert max(error for row in repaired.values() for error in row.values()) < 1e-12
print(f"largest error on {SIZES} ranks is below 1e-12")

# %% [markdown]
# ## Any tree, any number of ranks, any bucket
#
# The model above is one example. Hypothesis draws others: nested trees with scalars, empty and tied
# leaves, group sizes, and bucket sizes. If a case fails, hypothesis reduces it to the smallest
# tree.


# %%
def any_loss(params, batch):
    total = batch.mean()
    for leaf in tree.leaves(params):
        waves = torch.cos(torch.arange(leaf.numel()) + total)
        total = torch.tanh(total + leaf.reshape(-1) @ waves) + leaf.square().sum()
    return total


drawn = []


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    trees(tensors(max_dims=2), max_leaves=4),
    group_sizes(),
    bucket_sizes(),
    st.integers(0, 99),
)
def test_clip_leaves(params, size, bucket_bytes, seed):
    batch = values(5, seed=seed)  # every rank has the same rows
    right = tree.leaves(clip_leaves(zf.value_and_grad(any_loss))(params, batch)[1])

    def on_ranks(group):
        gradient_fn = zf.value_and_grad(any_loss)
        gradient_fn = zf.data_parallel(gradient_fn, group, bucket_bytes=bucket_bytes)
        gradient_fn = clip_leaves(zf.shard_grads(gradient_fn, group))
        return zf.unshard(gradient_fn(params, batch)[1])

    for found in zf.simulate(size, on_ranks):
        for x, y in zip(tree.leaves(found), right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
    drawn.append((size, sum(leaf.numel() for leaf in right)))


test_clip_leaves()
_ = figures.drawn_cases(drawn)

# %%
print(f"{len(drawn)} drawn cases: the repaired transform agrees with plain autograd")
