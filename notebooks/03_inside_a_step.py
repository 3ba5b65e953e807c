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
# # Inside a ZeRO-3 step
#
# Parameters lie in *buckets*, flat buffers that hold some leaves each. At stage 3 each of N ranks
# holds 1/N of every bucket. Before an operation can use a leaf, the ranks gather its bucket. After
# the last use each rank frees the bucket. In backward the ranks sum the bucket's gradients, and
# each rank keeps 1/N of the sum. This notebook shows the order of these events, the bytes that they
# send, and the memory that they take, first as a plan and then in a real step on simulated ranks.

# %%
import figures
import torch
from tqdm.auto import tqdm

import zfun as zf

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The model
#
# The model has six blocks of two matrices each, and an embedding that is also the head. With
# buckets of 513 KiB each block is a bucket of its own.

# %%
WIDTH, DEPTH, VOCAB, RANKS = 256, 6, 500, 4
GENERATOR = torch.Generator().manual_seed(0)


def values(*shape):
    return torch.randn(shape, generator=GENERATOR) * shape[-1] ** -0.5


PARAMS = {
    "embed": values(VOCAB, WIDTH),
    "h": [
        {
            "norm": torch.ones(WIDTH),
            "w": values(WIDTH, WIDTH),
            "v": values(WIDTH, WIDTH),
        }
        for _ in range(DEPTH)
    ],
}
TOKENS = torch.randint(VOCAB, (8, 16), generator=GENERATOR)


def loss_fn(params, tokens):
    x = torch.nn.functional.embedding(tokens, params["embed"])
    for h in params["h"]:
        x = x + torch.tanh(x * h["norm"] @ h["w"]) @ h["v"]
    logits = x @ params["embed"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


BUCKET_BYTES = 4 * (2 * WIDTH**2 + WIDTH)
trace = zf.planner.trace(loss_fn, PARAMS, TOKENS, RANKS, bucket_bytes=BUCKET_BYTES)
for bucket in trace.buckets:
    print(bucket.label)
print("order of use in forward:", trace.forward)

# %% [markdown]
# ## The schedule
#
# `zf.planner.schedule` turns the order of use into steps, and `zf.planner.timeline` draws them.
# The times come from a model, in which forward takes one unit per element, backward two, and a
# gather half a unit. While one bucket is computed, the next is gathered (`prefetch=1`), so nearly
# all gathers are hidden. Forward uses the tied embedding first and last.

# %%
schedule = zf.planner.schedule(trace)
zf.planner.timeline(schedule).draw()

# %% [markdown]
# Without `prefetch` the computation waits for every gather. You see this waiting as gaps in the
# compute row.

# %%
zf.planner.timeline(zf.planner.schedule(trace, zf.ScheduleOptions(prefetch=0))).draw()

# %% [markdown]
# ## The price of each option
#
# Options trade memory for messages or for waiting, and none changes a bit of the result. The table
# and the figure show what each schedule itself accounts for: the bytes that a rank sends in a step,
# and the most bytes of gathered parameters that it holds at once. With a `reuse_distance` larger
# than the model, backward gathers nothing. That takes two thirds of the traffic, and the memory of
# the whole model.

# %%
EVERYTHING = sum(bucket.numel for bucket in trace.buckets)
OPTIONS = {
    "prefetch=0": zf.ScheduleOptions(prefetch=0),
    "prefetch=1, the default": zf.ScheduleOptions(),
    "prefetch=3": zf.ScheduleOptions(prefetch=3),
    "max_live: 2 blocks": zf.ScheduleOptions(max_live=5 * WIDTH**2),
    "reuse_distance=1": zf.ScheduleOptions(reuse_distance=1),
    "reuse_distance: all": zf.ScheduleOptions(reuse_distance=4 * EVERYTHING),
}
prices = {}
for name, options in OPTIONS.items():
    found = zf.planner.explain(zf.planner.schedule(trace, options))
    gathers = len([message for message in found.messages if message.name == "params"])
    prices[name] = found.peak_bytes, found.bytes_sent()
    print(
        f"{name:24} {gathers:3} gathers {found.bytes_sent():12,} bytes sent"
        f" {found.peak_bytes:12,} bytes at most"
    )

# %%
_ = figures.trade(prices)

# %% [markdown]
# ## A real step sends these messages
#
# `zf.record` lists the messages of a real step. For every set of options the recorded bytes of
# parameters and of gradients are those of the plan. After three steps, the parameters have the same
# bits under all options.


# %%
def train(group, options):
    group = zf.record(group)
    zero = zf.zero(
        3,
        loss_fn,
        zf.optim.adamw(1e-3),
        group,
        schedule=options,
        bucket_bytes=BUCKET_BYTES,
    )
    state = zero.init(PARAMS)
    for _ in range(3):
        group.clear()
        state, _ = zero.step(state, TOKENS)
    sent = {name: group.bytes_sent(name) for name in ("params", "grads")}
    return sent, zero.params(state)


reference = None
for name, options in tqdm(OPTIONS.items(), desc="options", leave=False):
    sent, params = zf.simulate(RANKS, train, options)[0]
    planned = zf.planner.explain(zf.planner.schedule(trace, options))
    assert sent == {part: planned.bytes_sent(part) for part in sent}, (name, sent)
    reference = reference or params
    assert all(map(torch.equal, zf.tree.leaves(params), zf.tree.leaves(reference)))
print(f"{len(OPTIONS)} schedules: bytes as planned, parameters equal to the last bit")

# %% [markdown]
# ## Memory over the step
#
# `zf.plan` runs the whole step on tensors without numbers and keeps, for every moment, how many
# bytes each category takes. The flat layers at the bottom are the shards of parameters and moments,
# which stay. The hills above them are gathered buckets, gradients, messages and activations.


# %%
def make(group):
    return zf.zero(3, loss_fn, zf.optim.adamw(1e-3), group, bucket_bytes=BUCKET_BYTES)


plan = zf.plan(make, PARAMS, TOKENS, RANKS)
print(plan)
plan.draw()

# %% [markdown]
# ## A profile of a real step
#
# `zf.planner.profile` notes the same events with their real times. Simulated ranks are threads
# that share the processors, so the lengths of the bars depend on this machine. Their order is the
# order of the schedule. The last bar of the compute row is the optimizer.


# %%
def profiled(group):
    zero = make(group)
    state = zero.init(PARAMS)
    for _ in range(2):  # the first step learns the order of use
        state, _ = zero.step(state, TOKENS)
    with zf.planner.profile() as found:
        zero.step(state, TOKENS)
    return found


profile = zf.simulate(RANKS, profiled)[0]
used = [step.bucket for step in profile.steps() if step.kind == "use"]
assert used == [step.bucket for step in schedule.steps if step.kind == "use"]
profile.timeline().draw()
