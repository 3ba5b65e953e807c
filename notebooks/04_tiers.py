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
# # Offload, and three tiers of memory
#
# You can keep a training state in the device's memory, in host memory, or on a disk: these are the
# three tiers. Each part may lie in any of them: parameters, gradients, the optimizer's state,
# activations. This notebook moves parts of one model from tier to tier, counts the bytes in each
# tier, and draws how the update streams bucket by bucket. It then finds the bandwidth that a tier
# needs so that training does not wait for it, and checks that no tier changes a bit.

# %%
import tempfile

import figures
import torch
from tqdm.auto import tqdm

import zfun as zf
from zfun.planner import formulae

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150
DISK = tempfile.TemporaryDirectory()

# %% [markdown]
# ## The model and its tiers
#
# With `zf.stores.Offload` you name a store for each part. A store belongs to the process that made
# it, so every rank makes its own.

# %%
RANKS, WIDTH, DEPTH = 2, 128, 6
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "h": [
        torch.randn(WIDTH, WIDTH, generator=GENERATOR) * WIDTH**-0.5
        for _ in range(DEPTH)
    ]
}
BATCHES = [torch.randn(16, WIDTH, generator=GENERATOR) for _ in range(4)]


def loss_fn(params, x):
    y = x
    for w in params["h"]:
        y = y + torch.tanh(y @ w)
    return (y - x.flip(0)).square().mean()


def host():
    return zf.stores.host()


def nvme():
    return zf.stores.nvme(DISK.name)


# name: (store of parameters, of gradients, of the optimizer's state)
TIERS = {
    "all on the device": (None, None, None),
    "optimizer in host memory": (None, None, host),
    "gradients too": (None, host, host),
    "optimizer on the disk": (None, host, nvme),
    "all on the disk": (nvme, nvme, nvme),
}


def offload(stores):
    params, grads, optimizer = (store() if store else None for store in stores)
    return zf.stores.Offload(params=params, grads=grads, optimizer=optimizer)


def make(stores):
    return lambda group: zf.zero(
        3,
        loss_fn,
        zf.optim.adamw(1e-2),
        group,
        offload=offload(stores),
        bucket_bytes=2**16,
    )


# %% [markdown]
# ## Bytes in each tier
#
# The plan of a step says where the bytes lie between steps, and how many are on the device at the
# worst moment. `device="meta"` stands for an accelerator, so that host memory is a tier of its own.
# With everything on the disk, a rank's device holds some buckets and the activations.

# %%
plans = {
    name: zf.plan(make(stores), PARAMS, BATCHES[0], RANKS, device="meta")
    for name, stores in tqdm(TIERS.items(), desc="plans", leave=False)
}
between = {
    name: (plan.steady.device.total, plan.steady.host.total, plan.steady.disk.total)
    for name, plan in plans.items()
}
peaks = {name: plan.peak.device.total for name, plan in plans.items()}
for name, (device, in_host, disk) in between.items():
    print(f"{name:26} device {device:9,}  host {in_host:9,}  disk {disk:9,} bytes")
state_bytes = 12 * WIDTH**2 * DEPTH // RANKS
assert all(sum(tiers) >= state_bytes for tiers in between.values())

# %%
_ = figures.tiers(between, peaks)

# %% [markdown]
# ## The update as a stream
#
# An update over stores goes bucket by bucket: while one bucket is computed, it reads the next ones
# and writes the last. The steps are data, and a timeline draws them. Here a bucket takes one unit
# to compute and one unit each to read and to write. So all three rows are busy most of the time,
# and the update needs memory for a few buckets, however deep the model is.

# %%
layout = zf.layout.layout_of(PARAMS, bucket_bytes=2**16)
update = zf.planner.plan_update(layout)
print([f"{step.kind} {step.bucket}" for step in update.steps[:8]])
zf.planner.timeline(update, read_cost=1.0, write_cost=1.0).draw()

# %% [markdown]
# On a disk that is four times slower, the row of reads has no gaps, and the update takes as long
# as the disk needs for the bytes.

# %%
zf.planner.timeline(update, read_cost=4.0, write_cost=2.0).draw()

# %% [markdown]
# ## The bandwidth that a tier needs
#
# ZeRO-Infinity compares the time for the bytes with the time for the operations. For each byte that
# crosses, a step computes a number of operations, the arithmetic intensity. Multiply it by the
# bandwidth, and you get the rate at which the bytes allow operations. The figure shows which share
# of its own speed a device reaches if transfers do not overlap with computation, for a device of 70
# TFLOP/s and a sequence of 1,024 tokens. Optimizer state has four times the bytes of parameters and
# gradients, so it needs four times the bandwidth. Sharding helps here too: N ranks read N shards
# over N links at once.

# %%
PEAK = 70e12
bandwidths = [10 ** (9 + i / 16) for i in range(65)]
curves = {}
for part in ("params and grads", "optimizer"):
    for batch in (1, 8):
        ait = formulae.intensity(part, batch=batch, seq=1024)
        name = f"{part}, batch {batch}"
        curves[name] = [formulae.efficiency(ait, b, PEAK) for b in bandwidths]
_ = figures.efficiency(
    bandwidths, curves, {"NVMe": 3e9, "host link": 25e9, "HBM": 1.5e12}
)

# %% [markdown]
# ## Equal bits
#
# These are real steps on simulated ranks, with real files in a temporary directory. Every choice of
# tiers gives the same loss and parameters as the first, to the last bit.


# %%
def train(group, stores):
    zero = make(stores)(group)
    state = zero.init(PARAMS)
    for batch in BATCHES:
        state, info = zero.step(state, batch)
    return info.loss, zero.params(state)["h"]


reference = zf.simulate(RANKS, train, TIERS["all on the device"])[0]
for name, stores in tqdm(TIERS.items(), desc="tiers", leave=False):
    loss, params = zf.simulate(RANKS, train, stores)[0]
    assert torch.equal(loss, reference[0]), name
    assert all(map(torch.equal, params, reference[1])), name
print(f"{len(TIERS)} choices of tiers, all equal to the last bit: loss {loss.item()!r}")

# %% [markdown]
# ## Bytes that cross in a step
#
# A store counts its transfers. With the optimizer in host memory, each step reads and writes the
# two moments of the rank's shard once: 8 bytes down and 8 bytes up for each element of the shard.


# %%
def counted(group):
    store = zf.stores.host()
    options = zf.stores.Offload(optimizer=store)
    zero = zf.zero(3, loss_fn, zf.optim.adamw(1e-2), group, offload=options)
    state = zero.init(PARAMS)
    before = {kind: store.bytes_moved(kind, "state") for kind in ("get", "put")}
    state, _ = zero.step(state, BATCHES[0])
    return {kind: store.bytes_moved(kind, "state") - before[kind] for kind in before}


moved = zf.simulate(RANKS, counted)[0]
shard = WIDTH**2 * DEPTH // RANKS
assert moved == {"get": 8 * shard, "put": 8 * shard}, moved
print(
    f"read {moved['get']:,} bytes, wrote {moved['put']:,}: 8 + 8 bytes for each element"
)
DISK.cleanup()
