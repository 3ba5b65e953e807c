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
# # Write your own sharding strategy
#
# ZeRO cuts buffers into equal pieces, so a rank holds parts of matrices. Some optimizers cannot run
# on such parts, because they need whole matrices: one that takes a step of fixed norm for each
# leaf, for example. In this notebook you write another strategy, in 40 lines of primitives (zfun's
# basic collectives): each leaf belongs as a whole to one rank, its *owner*, and only the owner
# keeps its optimizer state. Then you test the strategy with the laws of `zfun.testing`.

# %%
import sys
from pathlib import Path

import torch

ROOT = next(
    path
    for path in (Path.cwd(), *Path.cwd().parents, *Path(sys.argv[0]).resolve().parents)
    if (path / "notebooks" / "figures.py").exists()
)
sys.path += [str(ROOT / "notebooks")]

import figures

import zfun as zf
from zfun import tree
from zfun.collectives import all_gather, all_reduce, reduce_scatter
from zfun.optim import as_optimizer
from zfun.recipes import StepInfo, Zero, ZeroState
from zfun.testing import assert_invariant

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## Owners
#
# The leaves are dealt out from the largest on; each goes to the rank that has the least so far. All
# ranks compute the same table. The collectives take rows of equal length, so `pack` fills the
# shorter rows with zeros.


# %%
def owners_of(leaves, size):
    """Return for each rank the indices of its leaves."""
    owned, loads = [[] for _ in range(size)], [0] * size
    for index in sorted(range(len(leaves)), key=lambda i: -leaves[i].numel()):
        rank = loads.index(min(loads))
        owned[rank].append(index)
        loads[rank] += leaves[index].numel()
    return owned


def pack(leaves, mine, longest):
    """Return leaves one after the other, filled with zeros."""
    parts = [leaves[i].reshape(-1) for i in mine]
    rest = longest - sum(part.numel() for part in parts)
    return torch.cat([*parts, leaves[0].new_zeros(rest)])


def unpack(row, mine, like):
    """Return the leaves of a row by index."""
    pieces = row.split(
        [like[i].numel() for i in mine] + [row.numel() - held(like, mine)]
    )
    return {
        i: piece.view(like[i].shape) for i, piece in zip(mine, pieces, strict=False)
    }


def held(leaves, mine):
    return sum(leaves[i].numel() for i in mine)


# %% [markdown]
# ## The strategy
#
# A step is a reduce-scatter of packed gradients to the owners, an update of whole leaves, and an
# all-gather of packed parameters. ZeRO-1 uses the same collectives, over rows with other content.


# %%
def owned_leaves(loss_fn, optimizer, group):
    gradient_fn, rule = zf.value_and_grad(loss_fn), as_optimizer(optimizer)

    def init(params, *, init="check"):
        leaves = tree.leaves(params)
        mine = owners_of(leaves, group.size)[group.rank]
        return ZeroState(params, None, rule.init([leaves[i] for i in mine]), 0, 0)

    def step(state, batch):
        leaves, spec = tree.flatten(state.params)
        owned = owners_of(leaves, group.size)
        longest = max(held(leaves, mine) for mine in owned)
        loss, grads = gradient_fn(state.params, batch)
        rows = [pack(tree.leaves(grads), mine, longest) for mine in owned]
        row = reduce_scatter(torch.cat(rows), group, name="grads") / group.size
        mine = owned[group.rank]
        own_grads = list(unpack(row, mine, leaves).values())
        own = [leaves[i] for i in mine]
        updates, opt_state = rule.update(own_grads, state.opt_state, own)
        new = [x + update for x, update in zip(own, updates, strict=True)]
        row = pack([*new, leaves[0]], range(len(new)), longest)
        rows = all_gather(row, group, name="params").split(longest)
        found = {}
        for one, mine in zip(rows, owned, strict=True):
            found |= unpack(one, mine, leaves)
        params = tree.unflatten(spec, [found[i] for i in range(len(leaves))])
        loss = all_reduce(loss.detach(), group) / group.size
        info = StepInfo(loss, torch.zeros(()), skipped=False, bad_leaf=None, aux=None)
        return state._replace(params=params, opt_state=opt_state), info

    return Zero(init, step, lambda state, select=None: state.params)


# %% [markdown]
# ## The law
#
# `assert_invariant` compares the strategy with plain autograd in float64. It uses AdamW, and an
# optimizer that takes a step of fixed norm along each leaf's gradient. ZeRO's `shard_optimizer`
# refuses the second one, because it mixes the elements of a leaf.


# %%
def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * shape[0] ** -0.5


PARAMS = {
    "layers": [
        {"w": values(16, 16, seed=i), "b": values(16, seed=10 + i)} for i in range(5)
    ],
    "out": values(16, 40, seed=20),
}
BATCH = values(12, 16, seed=30)


def loss_fn(params, batch):
    for layer in params["layers"]:
        batch = torch.tanh(batch @ layer["w"] + layer["b"])
    return (batch @ params["out"]).square().mean()


def by_norm(grads, state, params):
    return tree.map(lambda g: -0.01 * g / g.norm(), grads), state


fixed_norm = zf.optim.optimizer(lambda params: (), by_norm)


def check(optimizer, strategy=owned_leaves):
    make = lambda group: strategy(loss_fn, optimizer, group)
    assert_invariant(loss_fn, PARAMS, BATCH, optimizer, make)


check(zf.optim.adamw(0.01))
check(fixed_norm)
try:
    zf.simulate(2, lambda group: zf.shard_optimizer(fixed_norm, group))
except zf.errors.NotElementwiseError as error:
    print(str(error).split(";")[0])
else:
    raise SystemExit("an optimizer that mixes elements was not refused")

# %% [markdown]
# ## A mistake, found
#
# A first draft may forget a division, and take the sum of the gradients for their mean. AdamW
# almost hides a factor that all gradients share, but float64 shows the small rest. The message
# names the first leaf that differs and the likely cause.


# %%
def first_draft(loss_fn, optimizer, group):
    sums = lambda params, batch: group.size * loss_fn(params, batch)
    return owned_leaves(sums, optimizer, group)


try:
    check(zf.optim.adamw(0.01), first_draft)
except AssertionError as error:
    print(error)
else:
    raise SystemExit("the mistake was not found")

# %% [markdown]
# ## Balance
#
# Whole leaves do not divide evenly. The bars show how many elements each of 4 ranks owns, one block
# for each leaf, and the padding up to the longest row. The black line is ZeRO's cut.

# %%
RANKS = 4
LEAVES, PATHS = tree.leaves(PARAMS), tree.paths(PARAMS)
OWNED = owners_of(LEAVES, RANKS)
_ = figures.owned(
    [{PATHS[i]: LEAVES[i].numel() for i in mine} for mine in OWNED],
    sum(leaf.numel() for leaf in LEAVES) / RANKS,
)

# %% [markdown]
# ## Bytes
#
# A rank sends its row of gradients to every other rank, and its row of parameters too. That makes
# 2 (N-1) times the longest row. `zf.record` measures the same, and beside it what ZeRO-1 sends.


# %%
def sent(group, make):
    recorded = zf.record(group)
    zero = make(recorded)
    state = zero.init(PARAMS)
    rows = BATCH.chunk(group.size)[group.rank]
    for _ in range(2):  # the first step also agrees on an order
        recorded.clear()
        state, _ = zero.step(state, rows)
    return sum(recorded.bytes_sent(name) for name in ("params", "grads"))


def own_strategy(group):
    return owned_leaves(loss_fn, zf.optim.adamw(0.01), group)


def stage_1(group):
    return zf.zero(1, loss_fn, zf.optim.adamw(0.01), group)


sizes = (1, 2, 3, 4, 6)
measured = {
    name: [max(zf.simulate(size, sent, make)) for size in sizes]
    for name, make in (("owned leaves", own_strategy), ("ZeRO-1", stage_1))
}
for size, count in zip(sizes, measured["owned leaves"], strict=True):
    longest = max(held(LEAVES, mine) for mine in owners_of(LEAVES, size))
    assert count == 2 * 4 * (size - 1) * longest, (size, count)
_ = figures.bytes_by_size(sizes, measured)

# %%
print(
    "owned leaves: equal to plain autograd on 1, 2, 3 and 4 ranks, bytes as in the formula"
)
