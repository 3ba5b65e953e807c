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
# # Four transforms, eight ranks
#
# ZeRO's stages are four pure functions here, each of which takes a loss, a gradient function or an optimizer and
# returns one of the same type. This notebook applies them one by one to a small GPT on 8 simulated ranks. It measures
# what each rank holds and sends, compares both with ZeRO's formulae, and checks that every composition gives the same
# parameters, to the last bit.

# %%
import hashlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

ROOT = next(
    path for path in (Path.cwd(), *Path.cwd().parents, *Path(sys.argv[0]).resolve().parents) if (path / "examples" / "gpt.py").exists()
)
sys.path += [str(ROOT / "examples"), str(ROOT / "notebooks")]

import figures
from gpt import GPT, GPTConfig, init, make_loss
from text import batches, stdlib_bytes

import zfun as zf

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The model
#
# A byte-level GPT in plain PyTorch; nothing in it knows about sharding. It learns the source text of Python's standard
# library.
#
# `zf.simulate(8, fn)` calls `fn(group)` on 8 ranks, which are threads of this process. They share memory, so each rank
# makes a module of its own: `functional_call` puts parameters into a module while it runs.

# %%
RANKS = 8
CONFIG = GPTConfig(width=64, num_blocks=4, num_heads=4, length=32, batch_size=1)
TEXT = stdlib_bytes(200_000)
PARAMS = init(CONFIG)[1]


def make_loss_fn():
    with torch.device("meta"):  # the module computes with the parameters it is given, and needs none of its own
        return make_loss(GPT(CONFIG))


print(f"{sum(p.numel() for p in PARAMS.values()):,} parameters in {len(PARAMS)} tensors")

# %% [markdown]
# ## One training step, with any of the transforms
#
# The four `if`s are the whole difference between data parallelism and ZeRO-3 with offload. `zf.record` wraps the group
# and writes down every collective. `held` counts the bytes of the buffers themselves, each storage once.


# %%
def held(value):
    """Bytes of the distinct storages that a value keeps alive on this rank."""
    found = {}
    for leaf in zf.tree.leaves(value):
        tensor = leaf.get(torch.device("cpu")).wait() if isinstance(leaf, zf.stores.Stored) else leaf
        if tensor.ndim:  # a step count is no state to shard
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@dataclass
class Measured:
    """What rank 0 of one composition held after a step and sent during it."""

    held: dict
    sent: dict
    log: list
    loss: float
    digest: str
    numel: int  # of all parameters, padding included
    in_store: tuple


def train(group, transforms=(), num_steps=3):
    group = zf.record(group)
    loss_fn, optimizer = make_loss_fn(), zf.optim.adamw(1e-3)
    if "params" in transforms:
        loss_fn = zf.shard_params(loss_fn, group)
    vg = zf.data_parallel(zf.value_and_grad(loss_fn), group)
    if "grads" in transforms:
        vg = zf.shard_grads(vg, group)
    if "optimizer" in transforms:
        optimizer = zf.shard_optimizer(optimizer, group)
    if "offload" in transforms:
        optimizer = zf.offload(optimizer, zf.stores.host())

    place = zf.shard if "params" in transforms else zf.replicate
    params = place(PARAMS, group, bucket_bytes=2**18)
    state = optimizer.init(params)
    data = batches(TEXT, CONFIG.batch_size * group.size, CONFIG.length, group.rank, group.size)
    for _ in range(num_steps):
        group.clear()
        loss, grads = vg(params, next(data))
        params, state = zf.apply(optimizer, grads, state, params)

    log = list(group.log)
    sent = {name: group.bytes_sent(name) for name in ("params", "grads")}
    whole = zf.unshard(params)
    digest = hashlib.sha256(b"".join(p.numpy().tobytes() for p in whole.values())).hexdigest()
    return Measured(
        held={"params": held(params), "grads": held(grads), "optimizer": held((state.mu, state.nu))},
        sent=sent,
        log=log,
        loss=loss.item(),
        digest=digest,
        numel=sum(bucket.padded_numel for bucket in params.layout.buckets),
        in_store=("optimizer",) if "offload" in transforms else (),
    )


# %% [markdown]
# ## The formulae
#
# With Ψ parameters in float32 and Adam, a rank holds 4Ψ bytes of parameters, 4Ψ of gradients and 8Ψ
# of moments. (ZeRO's (2 + 2 + K)Ψ with K = 12 is the same count for half precision with float32 masters.) A
# transform divides its part by the number of ranks N.
#
# In a step a rank sends 2Ψ(N-1)/N elements without `shard_params` (an all-reduce, or a reduce-scatter of gradients
# and an all-gather of new parameters), and 3Ψ(N-1)/N with it: the parameters are gathered twice, forward and
# backward.

# %%
STAGES = {
    "data parallel": (),
    "ZeRO-1": ("optimizer",),
    "ZeRO-2": ("optimizer", "grads"),
    "ZeRO-3": ("optimizer", "grads", "params"),
    "ZeRO-3 + offload": ("optimizer", "grads", "params", "offload"),
}


def held_formula(psi, size, transforms):
    whole = {"params": 4 * psi, "grads": 4 * psi, "optimizer": 8 * psi}
    return {part: count / size if part in transforms else count for part, count in whole.items()}


def sent_formula(psi, size, transforms):
    once = 4 * psi * (size - 1) / size
    if "params" in transforms:
        return {"params": 2 * once, "grads": once}
    return {"params": once, "grads": once} if "optimizer" in transforms else {"params": 0, "grads": 2 * once}


# %% [markdown]
# ## What each stage holds and sends
#
# Bars are measured, black marks are the formulae, with the padded number of parameters for Ψ. They agree to the
# byte. Offload changes where the optimizer's state is (hatched: in host memory, outside the device), not how much there
# is, and not what goes between the ranks.

# %%
results = {}
for name, transforms in tqdm(STAGES.items(), desc="stages", leave=False):
    result = results[name] = zf.simulate(RANKS, train, transforms)[0]
    result.held_formula = held_formula(result.numel, RANKS, transforms)
    result.sent_formula = sent_formula(result.numel, RANKS, transforms)
    assert result.held == result.held_formula, (name, result.held, result.held_formula)
    assert result.sent == result.sent_formula, (name, result.sent, result.sent_formula)

_ = figures.memory_and_traffic(results)

# %% [markdown]
# ## When it is sent
#
# The same step as a sequence of collectives. Data parallelism and ZeRO-1 sum gradients after backward, bucket by
# bucket. ZeRO-2 does it inside backward, last bucket first, so whole gradients never exist at once. ZeRO-3 gathers each
# bucket before its use in forward, again in backward, and has no new parameters to hand round at the end. Its last
# bucket is gathered twice in a row, at the end of forward and at the start of backward: nothing gathered is kept from
# one to the other.

# %%
_ = figures.timeline({name: results[name].log for name in STAGES if name != "ZeRO-3 + offload"})

# %% [markdown]
# ## How it scales
#
# What is not divided by N stays. Lines are the formulae for this model, points are measured on 1 to 16 simulated
# ranks. They lie a hair above: each rank's piece of a bucket is a whole number of 32 elements, and the rest is padding.

# %%
sizes = [1, 2, 4, 8, 16]
curves, points = {}, {}
psi = sum(p.numel() for p in PARAMS.values())
names = [name for name in STAGES if name != "ZeRO-3 + offload"]
cases = [(name, size) for name in names for size in sizes]
for name, size in tqdm(cases, desc="group sizes", leave=False):
    measured = zf.simulate(size, train, STAGES[name], 1)[0]
    points.setdefault(name, (sizes, []))[1].append(sum(measured.held.values()) / psi)
for name in names:
    fine = [2 ** (i / 8) for i in range(49)]
    curves[name] = (fine, [sum(held_formula(1.0, size, STAGES[name]).values()) for size in fine])

_ = figures.against_ranks(curves, points)

# %% [markdown]
# ## The same numbers from all of them
#
# There are 16 subsets of the four transforms, and stages are only four of them. All give the same loss and the same
# parameters, to the last bit: sums over ranks are taken in rank order, the mean in one place, and the optimizer works
# element by element.

# %%
subsets = [subset for k in range(5) for subset in itertools.combinations(("optimizer", "grads", "params", "offload"), k)]
outcomes = {}
for subset in tqdm(subsets, desc="compositions", leave=False):
    outcomes[subset] = {(rank.loss, rank.digest) for rank in zf.simulate(RANKS, train, subset)}

distinct = set().union(*outcomes.values())
assert len(distinct) == 1, outcomes
loss, digest = distinct.pop()
print(f"{len(subsets)} compositions on {RANKS} ranks: loss {loss!r}, parameters {digest[:16]}…, all equal to the last bit")

# %% [markdown]
# ## One rank's view
#
# `zf.describe` says what a value is made of: where each leaf lies, which part of it this rank holds, and how many bytes
# that is.

# %%
print(zf.simulate(RANKS, lambda group: str(zf.describe(zf.shard({k: PARAMS[k] for k in list(PARAMS)[:5]}, group))))[2])
