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
# # Compressed communication and convergence
#
# zfun can send parameters and gradients in 8 or 4 bits, and the momentum of 1-bit Adam in one bit.
# The fewer the bits, the less accurate is each message. In this notebook you train one small
# language model with each codec (a way to encode numbers) on 4 simulated ranks, and compare the
# bytes of a step and the loss.

# %%
import inspect
import textwrap

import figures
import torch
from tqdm.auto import tqdm

import zfun as zf

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The task
#
# A network predicts a text's next byte from the eight bytes before it. The text is the source of
# Python's own `textwrap` module, so the notebook downloads nothing.

# %%
TEXT = torch.tensor(list(inspect.getsource(textwrap).encode("ascii", "replace")))
RANKS, CONTEXT, WIDTH, STEPS = 4, 8, 64, 120
GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "embed": torch.randn(128, 16, generator=GENERATOR) / 4,
    "up": torch.randn(CONTEXT * 16, 4 * WIDTH, generator=GENERATOR) / 11,
    "down": torch.randn(4 * WIDTH, 128, generator=GENERATOR) / 16,
}
print(
    f"{len(TEXT):,} bytes of text, {sum(p.numel() for p in PARAMS.values()):,} parameters"
)


def loss_fn(params, batch):
    x = params["embed"][batch[:, :-1]].flatten(1)
    logits = torch.relu(x @ params["up"]) @ params["down"]
    return torch.nn.functional.cross_entropy(logits, batch[:, -1])


def batches(rank, size):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(
            len(TEXT) - CONTEXT - 1, (32 * size,), generator=generator
        )
        rows = starts[rank::size, None] + torch.arange(CONTEXT + 1)
        yield TEXT[rows]


# %% [markdown]
# ## Codecs
#
# Error feedback keeps the rounding error of each message and adds it to the next message of the
# same bucket, so that small gradients arrive late instead of never. A codec with feedback holds
# state, so each rank makes its own.


# %%
def int4_with_feedback():
    return zf.compression.int4(feedback=zf.compression.error_feedback())


CODECS = {
    "exact": lambda: None,
    "8-bit parameters": lambda: zf.compression.Compression(
        params=zf.compression.int8()
    ),
    "8-bit gradients": lambda: zf.compression.Compression(grads=zf.compression.int8()),
    "4-bit gradients": lambda: zf.compression.Compression(grads=zf.compression.int4()),
    "4-bit gradients, feedback": lambda: zf.compression.Compression(
        grads=int4_with_feedback()
    ),
    "8-bit and 4-bit, feedback": lambda: zf.compression.Compression(
        params=zf.compression.int8(), grads=int4_with_feedback()
    ),
}


def train(group, compression, optimizer=None, stage=3):
    group = zf.record(group)
    zero = zf.zero(
        stage,
        loss_fn,
        optimizer or zf.optim.adamw(3e-3),
        group,
        compression=compression(),
    )
    state = zero.init(PARAMS)
    losses, sent = [], 0
    for batch in batches(group.rank, group.size):
        before = group.bytes_sent()
        state, info = zero.step(state, batch)
        losses.append(info.loss.item())
        sent = group.bytes_sent() - before
        group.clear()
    return losses, sent, zero.params(state)


# %%
runs = {}
for name, codec in tqdm(CODECS.items(), desc="codecs", leave=False):
    runs[name] = zf.simulate(RANKS, train, codec)[0][:2]

# %% [markdown]
# 1-bit Adam is an optimizer and not a codec. After a warm-up of exact steps, here 40, the ranks
# average only the signs of the momentum, and keep the rounding errors for the next step. Stage 3
# has no place for these errors, so this run uses stage 1.

# %%
one_bit = zf.optim.onebit_adam(3e-3, freeze_step=40)
runs["1-bit Adam, stage 1"] = zf.simulate(RANKS, train, CODECS["exact"], one_bit, 1)[0][
    :2
]

# %% [markdown]
# ## Bytes and loss
#
# The table shows the bytes of the last step, and the mean loss of the last 20 steps. The ratio is
# to the exact run at stage 3. The curves of all runs would lie on each other, so the lower panel of
# the figure shows how much higher each loss is than that of the exact run.

# %%
exact_bytes = runs["exact"][1]
ends = {name: sum(losses[-20:]) / 20 for name, (losses, _) in runs.items()}
for name, (_, sent) in runs.items():
    print(
        f"{name:28} {sent:9,} bytes ({exact_bytes / sent:4.1f} x fewer)  loss {ends[name]:.3f}"
    )
assert runs["8-bit and 4-bit, feedback"][1] < exact_bytes / 4
assert ends["8-bit and 4-bit, feedback"] < runs["exact"][0][0] / 1.5

# %%
_ = figures.differences({name: losses for name, (losses, _) in runs.items()}, "exact")

# %% [markdown]
# ## The error of one message
#
# The figure shows the relative error of an 8-bit and a 4-bit message of 4,096 normally distributed
# numbers, by block size. Each block has one float32 scale, so smaller blocks cost bytes and reduce
# the error.

# %%
x = torch.randn(4096, generator=GENERATOR)
errors = {}
for bits, codec in ((8, zf.compression.int8), (4, zf.compression.int4)):
    for block in (64, 256, 1024):
        chosen = codec(block=block)
        found = zf.simulate(
            2, lambda group, codec=chosen: zf.compression.all_gather(x, group, codec)
        )[0][:4096]
        errors[bits, block] = ((found - x).norm() / x.norm()).item()
        print(
            f"{bits} bits, blocks of {block:4}: "
            f"{chosen.message_bytes(4096) / 4096:.3f} bytes a number, "
            f"error {errors[bits, block]:.2%}"
        )
assert errors[8, 256] < errors[4, 256] / 10

# %% [markdown]
# ## Every rank has the same parameters
#
# Compression rounds messages, but every rank decodes the same messages. So a compressed run is
# reproducible, and stages agree where they send the same numbers: stages 1, 2 and 3 with 8-bit
# gradients end with the same bits.

# %%
ends_of = [
    zf.simulate(RANKS, train, CODECS["8-bit gradients"], None, stage)[0][2]
    for stage in tqdm((1, 2, 3), desc="stages", leave=False)
]
assert all(torch.equal(ends_of[0][k], other[k]) for other in ends_of for k in other)
print("stages 1, 2 and 3 with 8-bit gradients: parameters equal to the last bit")
