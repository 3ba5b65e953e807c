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
# In zfun, ZeRO's stages are four pure functions. Each takes a loss, a gradient function or an
# optimizer and returns one of the same type. In this notebook you apply the four one by one to a
# small GPT on 8 simulated ranks (a rank is one of the processes that train together), measure the
# bytes that each rank holds and sends, and compare them with ZeRO's formulae. At the end you check
# that every composition, that is, every choice of transforms, gives the same parameters, to the
# last bit.

# %%
import hashlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

ROOT = next(
    path
    for path in (Path.cwd(), *Path.cwd().parents, *Path(sys.argv[0]).resolve().parents)
    if (path / "examples" / "gpt.py").exists()
)
sys.path += [str(ROOT / "examples"), str(ROOT / "notebooks")]

import figures
from gpt import GPTConfig, init
from text import batches, stdlib_bytes

import zfun as zf

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The model
#
# The model is a byte-level GPT in plain PyTorch that contains no code for sharding. The training
# text is the source of Python's standard library.
#
# `zf.simulate(8, fn)` calls `fn(group)` on 8 ranks, which are threads of this process. They can
# share one module, because `zf.functional` passes parameters to a module and never changes it.

# %%
RANKS = 8
CONFIG = GPTConfig(width=64, num_blocks=4, num_heads=4, length=32, batch_size=1)
TEXT = stdlib_bytes(200_000)
LOSS_FN, PARAMS = init(CONFIG)

print(
    f"{sum(p.numel() for p in PARAMS.values()):,} parameters in {len(PARAMS)} tensors"
)

# %% [markdown]
# ## One training step, with any of the transforms
#
# The four `if`s are the whole difference between data parallelism and ZeRO-3 with offload.
# `zf.record` wraps the group and records every collective. `held` counts the bytes of the buffers,
# and counts each storage once.


# %%
def held(value):
    """Return the bytes of the storages that a value keeps alive on this rank."""
    found = {}
    for leaf in zf.tree.leaves(value):
        tensor = (
            leaf.get(torch.device("cpu")).wait()
            if isinstance(leaf, zf.stores.Stored)
            else leaf
        )
        if tensor.ndim:  # skip the step count
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@dataclass
class Measured:
    """The bytes that rank 0 held after a step and sent during the step."""

    held: dict
    sent: dict
    log: list
    loss: float
    digest: str
    numel: int  # of all parameters, padding included
    in_store: tuple


def train(group, transforms=(), num_steps=3):
    group = zf.record(group)
    loss_fn, optimizer = LOSS_FN, zf.optim.adamw(1e-3)
    if "params" in transforms:
        # By default the last buckets stay gathered for backward, which sends less.
        schedule = zf.ScheduleOptions(reuse_distance=0)
        loss_fn = zf.shard_params(loss_fn, group, schedule=schedule)
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
    data = batches(
        TEXT, CONFIG.batch_size * group.size, CONFIG.length, group.rank, group.size
    )
    for _ in range(num_steps):
        group.clear()
        loss, grads = vg(params, next(data))
        params, state = zf.apply(optimizer, grads, state, params)

    log = list(group.log)
    sent = {name: group.bytes_sent(name) for name in ("params", "grads")}
    whole = zf.unshard(params)
    digest = hashlib.sha256(
        b"".join(p.numpy().tobytes() for p in whole.values())
    ).hexdigest()
    return Measured(
        held={
            "params": held(params),
            "grads": held(grads),
            "optimizer": held((state.mu, state.nu)),
        },
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
# of moments (Adam's two averages). ZeRO's (2 + 2 + K)Ψ with K = 12 is the same count for half
# precision with float32 masters. Each transform divides one of the three by the number of ranks N.
#
# In a step without `shard_params` a rank sends 2Ψ(N-1)/N elements: an all-reduce of gradients, or a
# reduce-scatter of gradients and an all-gather of new parameters. With `shard_params` it sends
# 3Ψ(N-1)/N elements, because the parameters are gathered twice, in forward and in backward.

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
    return {
        part: count / size if part in transforms else count
        for part, count in whole.items()
    }


def sent_formula(psi, size, transforms):
    once = 4 * psi * (size - 1) / size
    if "params" in transforms:
        return {"params": 2 * once, "grads": once}
    return (
        {"params": once, "grads": once}
        if "optimizer" in transforms
        else {"params": 0, "grads": 2 * once}
    )


# %% [markdown]
# ## Bytes held and sent
#
# Bars show measurements. Black marks show the formulae, where Ψ includes the padding. Both agree to
# the byte. Offload moves the optimizer state to host memory (hatched). It changes neither the
# state's size nor the traffic between ranks.

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
# ## The order of collectives
#
# This figure shows the collectives of the same step in order. The parameters lie in buckets, flat
# buffers of some leaves each. Data parallelism and ZeRO-1 reduce gradients after backward, bucket
# by bucket. ZeRO-2 reduces inside backward, last bucket first, so whole gradients of all buckets
# never exist at once. ZeRO-3 gathers each bucket in forward and again in backward, and gathers no
# new parameters at the end. With `reuse_distance=0` it keeps no gathered bucket between forward and
# backward, so it gathers the last bucket twice in a row: at the end of forward and at the start of
# backward. By default the last two stay.

# %%
_ = figures.timeline(
    {name: results[name].log for name in STAGES if name != "ZeRO-3 + offload"}
)

# %% [markdown]
# ## Scaling
#
# Whole state stays constant. Lines show the formulae for this model, points the
# measurements on 1 to 16 simulated ranks. The points lie slightly above the lines because of
# padding: each rank's piece of a bucket is a multiple of 32 elements.
#
# For a paper, `figures.export(_, "scaling")` after this cell writes the figure as `scaling.svg` and
# `scaling.pdf`. Every figure of the notebooks, and every `draw()` of zfun, can be exported so.

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
    curves[name] = (
        fine,
        [sum(held_formula(1.0, size, STAGES[name]).values()) for size in fine],
    )

_ = figures.against_ranks(curves, points)

# %% [markdown]
# ## Equal bits
#
# You can combine the four transforms in 16 ways, of which ZeRO's stages are four. All 16 give the
# same loss and the same parameters, to the last bit. There are three reasons: zfun adds over ranks
# in rank order, takes the mean in one place, and the optimizer works element by element.

# %%
subsets = [
    subset
    for k in range(5)
    for subset in itertools.combinations(("optimizer", "grads", "params", "offload"), k)
]
outcomes = {}
for subset in tqdm(subsets, desc="compositions", leave=False):
    outcomes[subset] = {
        (rank.loss, rank.digest) for rank in zf.simulate(RANKS, train, subset)
    }

distinct = set().union(*outcomes.values())
assert len(distinct) == 1, outcomes
loss, digest = distinct.pop()
print(f"{len(subsets)} compositions on {RANKS} ranks, all equal to the last bit:")
print(f"loss {loss!r}, parameters {digest[:16]}…")

# %% [markdown]
# ## One rank's view
#
# `zf.describe` lists a value's leaves: each leaf's bucket, the part of it that this rank holds, and
# the bytes.

# %%
print(
    zf.simulate(
        RANKS,
        lambda group: str(
            zf.describe(zf.shard({k: PARAMS[k] for k in list(PARAMS)[:5]}, group))
        ),
    )[2]
)
