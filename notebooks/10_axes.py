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
# # One model, six meshes
#
# ZeRO cuts the state of a model over ranks that have batches of their own. Ranks can also share a
# sample: a *tensor* axis cuts matrices, and a *pipeline* axis gives each rank some of the layers.
# In this notebook one decoder trains on 16 simulated ranks, which lie in six different meshes. You
# see which rank holds which part, that the losses are equal, how many bytes go along each axis, and
# when the ranks of a pipeline wait.

# %%
import functools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = next(
    path
    for path in (Path.cwd(), *Path.cwd().parents, *Path(sys.argv[0]).resolve().parents)
    if (path / "notebooks" / "figures.py").exists()
)
sys.path += [str(ROOT / "notebooks")]

import figures

import zfun as zf
from zfun.parallel import schedules

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The model
#
# A decoder of eight blocks, as plain functions. No line knows an axis. The number of heads follows
# from the matrices, so a rank that has half of the columns computes half of the heads.

# %%
BLOCKS, WIDTH, HEAD, VOCAB, ROWS, LENGTH = 8, 32, 8, 64, 32, 16


def make_params():
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: (
        torch.randn(shape, generator=random).double() / shape[-1] ** 0.5
    )
    block = lambda: {
        **{name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
        "up": draw(4 * WIDTH, WIDTH),
        "down": draw(WIDTH, 4 * WIDTH),
    }
    blocks = [block() for _ in range(BLOCKS)]
    return {"embed": draw(VOCAB, WIDTH), "blocks": blocks, "head": draw(VOCAB, WIDTH)}


def block(p, x):
    y = F.layer_norm(x, (WIDTH,))
    q, k, v = (
        F.linear(y, p[name]).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv"
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), p["o"])
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (WIDTH,)), p["up"])), p["down"])


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


# %% [markdown]
# ## From a mesh to a loss
#
# `stages_of(n)` cuts the blocks into n stages. A plan names the matrices that a tensor axis cuts:
# `colwise` ones by their outputs, `rowwise` ones by their inputs. `loss_over` puts the two
# transforms around the stages; axes of one rank cost nothing.


# %%
def run_stage(params, x, batch, stage, n):
    first, last = stage == 0, stage == n - 1
    x = F.embedding(batch, params["embed"]) if first else x
    for i in range(stage * BLOCKS // n, (stage + 1) * BLOCKS // n):
        x = block(params["blocks"][i], x)
    if not last:
        return x
    return loss_of(F.linear(F.layer_norm(x, (WIDTH,)), params["head"]), batch)


def stages_of(n):
    leaves = [
        [f"blocks.{i}.*" for i in range(s * BLOCKS // n, (s + 1) * BLOCKS // n)]
        for s in range(n)
    ]
    leaves[0].append("embed")
    leaves[-1].append("head")
    stages = [functools.partial(run_stage, stage=s, n=n) for s in range(n)]
    return stages, leaves


PLAN = {
    **{f"*.{name}": "colwise" for name in ("q", "k", "v", "up")},
    **{f"*.{name}": "rowwise" for name in ("o", "down")},
    "embed": "embedding_rowwise",
    "head": "colwise_gather_output",
}


def loss_over(axes, micro_batches):
    stages, leaves = stages_of(axes["pp"].size)
    cut = [zf.tensor_parallel(stage, axes["tp"], PLAN) for stage in stages]
    return zf.pipeline(cut, axes["pp"], num_micro_batches=micro_batches, leaves=leaves)


# %% [markdown]
# ## Six meshes of 16 ranks
#
# All meshes train on the same 32 rows per step, which the data ranks divide. Within a mesh, the
# last axis has neighbours: put the tensor axis there, because it sends the most, and on real
# machines neighbours are in one host. ZeRO-1 runs over the data axis; each axis is recorded.

# %%
MESHES = [
    {"pp": 1, "dp": 16, "tp": 1},
    {"pp": 1, "dp": 4, "tp": 4},
    {"pp": 4, "dp": 4, "tp": 1},
    {"pp": 2, "dp": 4, "tp": 2},
    {"pp": 4, "dp": 2, "tp": 2},
    {"pp": 8, "dp": 2, "tp": 1},
]
STEPS = 2


def batch_of(step):
    random = torch.Generator().manual_seed(step)
    first, stride = torch.randint(1, 6, (2, ROWS, 1), generator=random)
    return (first + stride * torch.arange(LENGTH)) % VOCAB


def train(group, sizes):
    mesh = zf.mesh(group, **sizes)
    axes = {name: zf.record(mesh[name]) for name in mesh.names}
    micro_batches = min(4, ROWS // sizes["dp"])
    optimizer = zf.optim.chain(zf.optim.clip_by_global_norm(1.0), zf.optim.adamw(1e-2))
    zero = zf.zero(1, loss_over(axes, micro_batches), optimizer, axes["dp"])
    state, losses = zero.init(make_params()), []
    for step in range(STEPS):
        for axis in axes.values():
            axis.clear()
        batch = batch_of(step).chunk(sizes["dp"])[mesh.coordinates["dp"]]
        state, info = zero.step(state, batch)
        losses.append(info.loss.item())
    sent = {name: axis.bytes_sent() for name, axis in axes.items()}
    sent["activations"] = axes["tp"].bytes_sent("activations")
    held = sum(x.numel() for x in state.params.buffers)
    return losses, zero.params(state), sent, held


runs = {
    " ".join(f"{name}={n}" for name, n in sizes.items()): zf.simulate(16, train, sizes)
    for sizes in MESHES
}

# %% [markdown]
# ## Which rank holds which part
#
# A panel is a mesh, and its rectangle the whole model: blocks from left to right, columns of the
# matrices from top to bottom. The pipeline axis cuts the blocks, the tensor axis the columns. The
# data ranks share such a part, and ZeRO-1 cuts the optimizer's state of it once more, so each of
# the 16 ranks has one cell. The number is the rank, and the colour its place along the data axis.

# %%
_ = figures.cells(MESHES, BLOCKS)

# %% [markdown]
# The parameters of a rank are those of all cells beside each other in its stage: some layers, and
# some columns. So the elements that a rank holds are those of the model over `pp * tp`; stages with
# the embedding or the head hold a little more.

# %%
whole = sum(leaf.numel() for leaf in zf.tree.leaves(make_params()))
print(f"{'mesh':18} {'of 1 / (pp tp)':>15} {'a rank holds at most':>21}")
for (name, ranks), sizes in zip(runs.items(), MESHES, strict=True):
    most = max(held for *_, held in ranks)
    share = 1 / (sizes["pp"] * sizes["tp"])
    print(f"{name:18} {share:15.3f} {most / whole:21.3f}")
    assert share <= most / whole < 1.6 * share

# %% [markdown]
# ## Equal losses
#
# Six meshes, one curve. The runs differ by the rounding of float64 alone, because each mesh adds
# the same numbers in another order; all 16 ranks of a mesh see one loss, and `zero.params(state)`
# is the whole tree.

# %%
first = runs[next(iter(runs))][0]
for name, ranks in runs.items():
    losses, params, *_ = ranks[0]
    assert all(one[0] == losses for one in ranks)
    torch.testing.assert_close(losses, first[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(params, first[1], rtol=0, atol=1e-9)
    print(f"{name:18} {'  '.join(f'{loss:.10f}' for loss in losses)}")

# %% [markdown]
# ## Bytes along each axis
#
# `zf.record` counts what a rank sends along each axis in the last step. Data ranks exchange
# gradients and parameters: with ZeRO-1 about 2 (N - 1) / N of what a rank holds, whatever the
# batch. A tensor axis sends activations in every block, and a pipeline only between stages.

# %%
most = {
    name: {
        axis: max(sent[axis] for *_, sent, _ in ranks) for axis in ("pp", "dp", "tp")
    }
    for name, ranks in runs.items()
}
_ = figures.by_axis(most)

# %% [markdown]
# The closed form of a tensor axis: four sums of activations in a block (after `o` and `down`, and
# of the gradients at `q` and `up`), each of 2 (N - 1) / N of the bytes of the rows of a data rank;
# and one for the embedding, one at the head and a gather of the logits.

# %%
sizes = {"pp": 1, "dp": 4, "tp": 4}
tokens = ROWS // sizes["dp"] * LENGTH
activations, logits = tokens * WIDTH * 8, tokens * VOCAB * 8
expected = ((4 * BLOCKS + 2) * 2 * activations + logits) * 3 // 4
(_, _, sent, _), *_ = runs["pp=1 dp=4 tp=4"]
print(f"activations: sent {sent['activations']:,} bytes, closed form {expected:,}")
print(f"and {sent['tp'] - sent['activations']:,} bytes for the norm of the gradients")
assert sent["activations"] == expected

# %% [markdown]
# ## When a pipeline waits
#
# A schedule is a list of actions for each rank, so it can be drawn before a run. Four ranks and
# eight micro-batches, where backward takes twice as long as forward:

# %%
schedules.draw(schedules.one_forward_one_backward(4, 8))

# %% [markdown]
# Two stages on each rank make the ramp half as long, for twice as many messages:

# %%
schedules.draw(schedules.interleaved(4, 8, 2))

# %% [markdown]
# And the gradients of the parameters, which no other rank waits for, fill the gaps:

# %%
schedules.draw(schedules.zero_bubble(4, 8))

# %% [markdown]
# More micro-batches make any gap small beside the step:

# %%
print("micro-batches    1f1b   interleaved   zero-bubble   in flight on rank 0")
for m in (4, 8, 16, 32):
    lists = (
        schedules.one_forward_one_backward(4, m),
        schedules.interleaved(4, m, 2),
        schedules.zero_bubble(4, m),
    )
    shares = [schedules.bubble(one) for one in lists]
    in_flight = [schedules.activations_in_flight(one)[0] for one in lists]
    print(f"{m:13}{shares[0]:8.3f}{shares[1]:14.3f}{shares[2]:14.3f}   {in_flight}")
    assert abs(shares[0] - 3 / (m + 3)) < 1e-12
    assert abs(shares[2] - 3 / (3 * m + 3)) < 1e-12

# %% [markdown]
# ## A plan for 1,024 ranks
#
# `zf.plan` runs one rank's part of a step on tensors that have shapes and no numbers, so the same
# functions, with matrices 256 times wider, need neither 1,024 ranks nor their memory. All meshes
# get 1,024 sequences of 4,096 tokens. The bytes are of the rank that needs most, activations
# included.

# %%
WIDTH, HEAD, VOCAB, LENGTH, SEQUENCES = 8192, 128, 131_072, 4096, 1024


def planned(sizes):
    empty = lambda *shape: torch.empty(shape, device="meta")
    square, wide = empty(WIDTH, WIDTH), empty(4 * WIDTH, WIDTH)
    leaves = {**dict.fromkeys("qkvo", square), "up": wide, "down": wide.T}
    block = lambda: {name: torch.empty_like(leaf) for name, leaf in leaves.items()}
    blocks = [block() for _ in range(BLOCKS)]
    params = {
        "embed": empty(VOCAB, WIDTH),
        "blocks": blocks,
        "head": empty(VOCAB, WIDTH),
    }
    rows = SEQUENCES // sizes["dp"]  # a micro-batch is one sequence
    recipe = lambda axes: zf.zero(
        1,
        loss_over(axes, rows),
        zf.optim.adamw(1e-4),
        axes["dp"],
        precision=torch.bfloat16,
    )
    ids = torch.empty(rows, LENGTH, dtype=torch.int64, device="meta")
    plan = zf.plan(recipe, params, ids, 1024, mesh=sizes, device="meta", fold=True)
    return plan.stages or (plan,)


print(f"{'mesh':18}{'peak, GB':>10}{'sent: pp':>10}{'dp':>8}{'tp':>8}{'waits':>8}")
for pp, tp in ((1, 1), (1, 8), (2, 8), (8, 8)):
    sizes = {"pp": pp, "dp": 1024 // (pp * tp), "tp": tp}
    plans = planned(sizes)
    sent = {
        axis: max(plan.bytes_sent(axis=axis) for plan in plans) / 1e9 for axis in sizes
    }
    peak = max(plan.peak.device.total for plan in plans) / 1e9
    waits = max(plan.pipeline.bubble if plan.pipeline else 0 for plan in plans)
    name = " ".join(f"{axis}={n}" for axis, n in sizes.items())
    print(
        f"{name:18}{peak:10.1f}{sent['pp']:10.1f}{sent['dp']:8.1f}{sent['tp']:8.1f}{waits:8.2f}"
    )

# %% [markdown]
# ## Closed forms
#
# The closed forms need no plan either. Take a model of 70 billion parameters (80 blocks of width
# 8,192) in bfloat16 with float32 master weights and AdamW, and steps of 4 million tokens in
# sequences of 4,096. At stage 1 a rank holds 2 bytes of parameters and 4 of gradients for each
# element of its part, and 12 bytes of state, which the data ranks divide. It sends gradients and
# parameters of its part along `dp`, activations of 2 bytes along `tp` in each block, and along `pp`
# at the ends of its stage.

# %%
PARAMS, LAYERS, FEATURES, TOKENS, SEQUENCE = 70e9, 80, 8192, 2**22, 4096


def closed_form(pp, dp, tp):
    part = PARAMS / (pp * tp)
    tokens = TOKENS / dp
    micro_batches = tokens / SEQUENCE  # one sequence each
    ring = lambda n: (n - 1) / n
    activations = 2 * tokens * FEATURES
    return {
        "GB": (2 + 4 + 12 / dp) * part / 1e9,
        "dp GB": ring(dp) * (4 + 2) * part / 1e9,
        "tp GB": ring(tp) * 2 * 4 * activations * LAYERS / pp / 1e9,
        "pp GB": (2 * activations if pp > 1 else 0) / 1e9,
        "waits": (pp - 1) / (micro_batches + pp - 1),
    }


print(
    f"{'pp':>4}{'dp':>6}{'tp':>4}{'state, GB':>12}{'sent: dp':>10}{'tp':>8}{'pp':>8}{'waits':>8}"
)
for pp, tp in ((1, 1), (1, 8), (4, 8), (8, 8), (16, 4), (16, 8)):
    dp = 1024 // (pp * tp)
    row = closed_form(pp, dp, tp)
    print(
        f"{pp:4}{dp:6}{tp:4}{row['GB']:12.1f}{row['dp GB']:10.1f}{row['tp GB']:8.1f}"
        f"{row['pp GB']:8.1f}{row['waits']:8.2f}"
    )

# %% [markdown]
# Data ranks alone would hold 421 GB each. A tensor axis of 8, which fits into a host, leaves 53 GB,
# and sends 52 GB along `dp`, between hosts; the 301 GB along `tp` stay within the host. A pipeline
# divides the part and what goes along `dp`, and sends little itself. Its price is the share of
# waits, which more micro-batches or another schedule make smaller. The
# guide "Which axes do I need?" has the order in which to choose.

# %%
print("six meshes, one loss")
