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
# # Which stage? Memory, bytes and time
#
# Each stage of ZeRO divides one more part of the training state by the number of ranks. Stage 3
# pays for this with one more gather of the parameters. In this notebook you measure the trade on 8
# simulated ranks with a small model. Then you plan the same step for a model of 1.6 billion
# parameters on up to 1,024 ranks. A plan runs the real `init` and `step` on tensors without
# numbers, so you measure and plan the same code.

# %%
import figures
import torch
from tqdm.auto import tqdm

import zfun as zf

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150
STAGES = (0, 1, 2, 3)

# %% [markdown]
# ## The model
#
# The model is a stack of two-layer networks with residual connections. `zf.remat` recomputes each
# block in backward, so that a step keeps one activation for each block. Parameters, gathers and
# computation are in bfloat16. Master weights (wide copies of the parameters, which the optimizer
# updates) and moments (Adam's two averages) are in float32.


# %%
def parameters(width, num_blocks, vocab, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        if device == "meta":
            return torch.empty(shape, device="meta")
        return torch.randn(shape, generator=generator) * shape[0] ** -0.5

    block = lambda: {"up": values(width, 4 * width), "down": values(4 * width, width)}
    return {
        "embed": values(vocab, width),
        "blocks": [block() for _ in range(num_blocks)],
    }


def mlp(layer, x):
    return x + torch.nn.functional.gelu(x @ layer["up"]) @ layer["down"]


def loss_fn(params, tokens):
    x = params["embed"][tokens]
    for layer in params["blocks"]:
        x = zf.remat(mlp)(layer, x)
    logits = x @ params["embed"].T
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), tokens.flatten()
    )


def recipe(stage, **options):
    return lambda group: zf.zero(
        stage, loss_fn, zf.optim.adamw(1e-3), group, precision=torch.bfloat16, **options
    )


# %% [markdown]
# ## Measured on 8 simulated ranks
#
# `zf.record` lists every message of a real step. At every stage, the bytes of parameters and
# gradients are those of the plan, and the losses have the same bits. Stages 1 and 2 send half as
# many bytes of parameters as stage 3, which gathers in forward and in backward.

# %%
RANKS, BUCKET_BYTES = 8, 2**15
PARAMS = parameters(64, 4, 256)
TOKENS = torch.arange(4 * 16).reshape(4, 16)


def measure(group, stage):
    group = zf.record(group)
    zero = recipe(stage, bucket_bytes=BUCKET_BYTES)(group)
    state = zero.init(PARAMS)
    for _ in range(2):
        group.clear()
        state, info = zero.step(state, TOKENS)
    sent = {name: group.bytes_sent(name) for name in ("params", "grads")}
    return sent, info.loss.item()


losses = set()
for stage in tqdm(STAGES, desc="stages", leave=False):
    sent, loss = zf.simulate(RANKS, measure, stage)[0]
    found = zf.plan(recipe(stage, bucket_bytes=BUCKET_BYTES), PARAMS, TOKENS, RANKS)
    assert sent == {name: found.bytes_sent(name) for name in sent}, (stage, sent)
    losses.add(loss)
    print(
        f"stage {stage}: sent {sent['params']:7,} bytes of parameters and"
        f" {sent['grads']:7,} of gradients, as planned"
    )
assert len(losses) == 1

# %% [markdown]
# ## Planned for 1.6 billion parameters
#
# Now the same functions run with tensors of the `meta` device, which allocate nothing. A rank has 4
# sequences of 1,024 tokens. Memory between steps falls with the stage: stages 1 and 2 divide the
# master weights and moments, and stage 3 divides the parameters too. The peak adds gradients,
# gathered buckets, messages and activations. Stage 2 differs from stage 1 only in the peak, because
# it frees whole gradients during backward.

# %%
LARGE = parameters(3200, 19, 50_000, device="meta")
LARGE_TOKENS = torch.empty(4, 1024, dtype=torch.int64, device="meta")
PSI = sum(p.numel() for p in zf.tree.leaves(LARGE))
print(f"{PSI / 1e9:.2f} billion parameters")

plans = {
    stage: zf.plan(recipe(stage), LARGE, LARGE_TOKENS, 64, device="meta")
    for stage in tqdm(STAGES, desc="stages", leave=False)
}
for stage, plan in plans.items():
    print(
        f"stage {stage}: {plan.steady.device.total / 2**30:6.2f} GiB between steps,"
        f" {plan.peak.device.total / 2**30:6.2f} GiB at most,"
        f" {plan.bytes_sent() / 2**30:6.2f} GiB sent"
    )

# %%
_ = figures.peaks({f"stage {stage}": plan.peak.device for stage, plan in plans.items()})

# %% [markdown]
# ## By number of ranks
#
# This figure shows the memory between steps, per parameter, for 1 to 1,024 ranks. Lines are the
# ZeRO paper's closed form without its gradients (2 + 12 bytes a parameter), points are plans. Only
# stage 3 goes on falling; stages 1 and 2 end at the 2 bytes of the whole parameters.

# %%
sizes = [1, 8, 64, 1024]
names = {0: "stage 0", 1: "stages 1, 2", 3: "stage 3"}
curves, points = {}, {}
cases = [(stage, size) for stage in names for size in sizes]
for stage, size in tqdm(cases, desc="group sizes", leave=False):
    plan = zf.plan(recipe(stage), LARGE, LARGE_TOKENS, size, device="meta", steps=1)
    kept = points.setdefault(names[stage], (sizes, []))[1]
    kept.append(plan.steady.device.total / PSI)
for stage, name in names.items():
    fine = [2 ** (i / 8) for i in range(81)]
    whole, divided = {0: (14, 0), 1: (2, 12), 3: (0, 14)}[stage]
    curves[name] = fine, [whole + divided / size for size in fine]
    for size, held in zip(*points[name], strict=True):
        assert abs(held - whole - divided / size) < 0.05, (name, size, held)

_ = figures.against_ranks(curves, points, made="planned")

# %% [markdown]
# ## Time
#
# If you know a machine's rates, `zf.planner.compare` forecasts the seconds of a step: between
# `at_least_s`, where computation and transfers overlap, and `at_most_s`, where nothing does. The
# rates here are examples; `zfun hw-bench` measures your machine's. At 400 GB/s, as between the GPUs
# of one host, the traffic of every stage hides behind the computation. At 25 GB/s, as between
# hosts, the network is the bottleneck with 4 sequences on a rank, and stage 3 takes a third longer
# than stage 2, because it sends a third more.

# %%
for network in (400e9, 25e9):
    machine = zf.planner.Hardware(flops_per_s=400e12, network=network, host_link=25e9)
    for stage, plan in plans.items():
        forecast = plan.on(machine)
        print(
            f"network {network / 1e9:3.0f} GB/s, stage {stage}: "
            f"{forecast.at_least_s:5.2f} to {forecast.at_most_s:5.2f} s, "
            f"bottleneck: {forecast.bottleneck}"
        )
