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
# # Loops of your own: GAN, LoRA, EMA
#
# A step of zfun is a function from a state and a batch to a new state. So your loop may hold
# several states, train only a part of a tree, or keep an average of the parameters, without any
# hooks. Every loop below runs on 4 simulated ranks at stage 3 and, as a check, on one rank in plain
# data parallelism; the numbers agree.

# %%
import figures
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm

import zfun as zf
from zfun.evaluation import averaged, evaluate

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150
RANKS = 4


def values(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * shape[0] ** -0.5


def shares(rows, group):
    """Return this rank's share of a batch."""
    return rows[group.rank :: group.size]


def on_ranks_and_alone(train):
    """Run a loop at stage 3 on the ranks, and at stage 0 on one rank."""
    return zf.simulate(RANKS, train, 3)[0], zf.simulate(1, train, 0)[0]


# %% [markdown]
# ## A GAN: two states, two steps
#
# The generator maps noise to points, and the discriminator tells these from points on a ring. Each
# network has its own state. A step of one network gets the other's parameters as a part of the
# batch, so no gradient reaches them.


# %%
def network(params, x):
    return torch.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def new_network(num_in, num_out, seed):
    return {
        "in": values(num_in, 32, seed=seed),
        "bias": torch.zeros(32),
        "out": values(32, num_out, seed=seed + 1),
    }


def d_loss(params, batch):
    real, fake = batch
    return (
        F.softplus(-network(params, real)) + F.softplus(network(params, fake))
    ).mean()


def g_loss(params, batch):
    noise, d_params = batch
    return F.softplus(-network(d_params, network(params, noise))).mean()


def gan(group, stage, num_steps=300):
    g_zero = zf.zero(stage, g_loss, zf.optim.adam(5e-3, b1=0.5), group)
    d_zero = zf.zero(stage, d_loss, zf.optim.adam(5e-3, b1=0.5), group)
    g_state = g_zero.init(new_network(4, 2, seed=0))
    d_state = d_zero.init(new_network(2, 1, seed=10))
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(num_steps):
        angles = 6.2832 * torch.rand(64, 1, generator=generator)
        real = shares(torch.cat([angles.cos(), angles.sin()], 1), group)
        noise = shares(torch.randn(64, 4, generator=generator), group)
        fake = network(g_zero.params(g_state), noise)
        d_state, d_info = d_zero.step(d_state, (real, fake))
        g_state, g_info = g_zero.step(g_state, (noise, d_zero.params(d_state)))
        losses.append((d_info.loss.item(), g_info.loss.item()))
    points = network(g_zero.params(g_state), torch.randn(400, 4, generator=generator))
    return torch.tensor(losses), points


(sharded, points), (alone, _) = on_ranks_and_alone(gan)
difference = (sharded[:50] - alone[:50]).abs().max().item()
assert difference < 1e-4, difference
print(f"largest difference of losses in 50 steps: {difference:.1e}")

# %%
_ = figures.scatter(
    points.tolist(), "points of the generator, and the ring of the data"
)

# %% [markdown]
# ## LoRA: train a part of the tree
#
# `trainable=` splits the tree. Stage 3 shards the frozen matrix too, but gradients and optimizer
# state exist only for the two thin matrices. Here the pretrained matrix differs from the right one
# by a matrix of rank 4, which the adapter can learn.

# %%
WIDTH, RANK = 64, 4
TRUE = values(WIDTH, WIDTH, seed=20)
PRETRAINED = TRUE + values(WIDTH, RANK, seed=21) @ values(RANK, WIDTH, seed=22)


def lora_loss(params, x):
    y = x @ params["frozen"] + x @ params["lora_a"] @ params["lora_b"]
    return (y - x @ TRUE).square().mean()


def lora(group, stage, num_steps=150):
    zero = zf.zero(
        stage,
        lora_loss,
        zf.optim.adamw(1e-2),
        group,
        trainable=lambda path, leaf: path.startswith("lora"),
    )
    state = zero.init(
        {
            "frozen": PRETRAINED,
            "lora_a": values(WIDTH, RANK, seed=23),
            "lora_b": torch.zeros(RANK, WIDTH),
        }
    )
    generator, losses = torch.Generator().manual_seed(2), []
    for _ in range(num_steps):
        rows = torch.randn(64, WIDTH, generator=generator)
        state, info = zero.step(state, shares(rows, group))
        losses.append(info.loss.item())
    assert torch.equal(zero.params(state)["frozen"], PRETRAINED)
    moments = sum(x.numel() for x in zf.tree.leaves(state.opt_state.mu))
    return losses, moments


(losses, moments), (alone, moments_alone) = on_ranks_and_alone(lora)
assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-4
assert losses[-1] < losses[0] / 20
print(f"loss {losses[0]:.3f} -> {losses[-1]:.4f}, the frozen matrix unchanged")
print(
    f"elements of a moment: {moments} on each of {RANKS} ranks, {moments_alone} on one rank"
)
print(f"elements of the frozen matrix: {PRETRAINED.numel()}")

# %% [markdown]
# ## EMA: an average beside the state
#
# `zf.optim.ema` keeps an exponential moving average (EMA) of the parameters beside any
# optimizer, and `averaged(state)` puts it in their place. The average is sharded as the moments
# are, and nothing is sent while you train. With a large learning rate the parameters jitter around
# the minimum, and the average lies nearer to it.

# %%
TARGET = values(16, 1, seed=30)


def regression(params, batch):
    x, y = batch
    return (x @ params["w"] - y).square().mean()


def ema(group, stage, num_steps=200, decay=0.95):
    zero = zf.zero(stage, regression, zf.optim.ema(decay, zf.optim.sgd(0.1)), group)
    run = evaluate(regression, group)
    state = zero.init({"w": torch.zeros(16, 1)})
    generator, found = torch.Generator().manual_seed(3), []
    held_out = torch.randn(256, 16, generator=generator)
    for _ in range(num_steps):
        x = torch.randn(16, 16, generator=generator)
        y = x @ TARGET + torch.randn(16, 1, generator=generator)
        state, _ = zero.step(state, (shares(x, group), shares(y, group)))
        batch = held_out, held_out @ TARGET
        of_average = run(averaged(state), batch)
        found.append((run(state, batch).item(), of_average.item()))
    return found


curves, alone = on_ranks_and_alone(ema)
torch.testing.assert_close(torch.tensor(curves), torch.tensor(alone), rtol=0, atol=1e-4)
last, smooth = (sum(column[-50:]) / 50 for column in zip(*curves, strict=True))
assert smooth < last
print(
    f"held-out error, mean of 50 steps: {last:.4f} of the parameters, {smooth:.4f} of the EMA"
)

# %%
_ = figures.losses(
    {
        "the parameters": [error for error, _ in curves],
        "the average": [error for _, error in curves],
    },
    smooth=1,
    log=True,
)

# %% [markdown]
# ## All of it at every stage
#
# A loop does not depend on the stage. The last cell runs the three loops on the ranks at every
# stage, and the losses have the same bits.


# %%
def bits(value):
    return [x.item() for x in torch.as_tensor(value).flatten()]


for name, loop in tqdm({"GAN": gan, "LoRA": lora, "EMA": ema}.items(), leave=False):
    results = [zf.simulate(RANKS, loop, stage, 20)[0] for stage in range(4)]
    found = [bits(r if name == "EMA" else r[0]) for r in results]
    assert all(one == found[0] for one in found), name
    print(f"{name}: stages 0 to 3 equal to the last bit")
