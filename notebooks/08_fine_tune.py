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
# # Fine-tune a Hugging Face model from a ds_config
#
# In this notebook you take a DeepSpeed configuration as it is, read what zfun makes of each key,
# and train a GPT-2 of `transformers` with it on 2 simulated ranks. Then you evaluate and generate
# with sharded parameters, save the state, and go on at another stage. For a real model, use
# `GPT2LMHeadModel.from_pretrained(...)` instead of the small model made here.

# %%
import inspect
import json
import tempfile
import textwrap
from pathlib import Path

import figures
import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import zfun as zf
from zfun.evaluation import evaluate
from zfun.interop import AutoValues, from_ds_config
from zfun.reductions import mean_metrics

torch.set_num_threads(1)
figures.plt.rcParams["figure.dpi"] = 150

# %% [markdown]
# ## The configuration
#
# `auto` stands for values that a trainer knows. Here you pass them as `AutoValues`. `print(recipe)`
# shows one line for each key: mapped to an option, ignored with a reason, or refused.

# %%
FOLDER = Path(tempfile.mkdtemp())
FILE = FOLDER / "ds_config.json"
FILE.write_text(
    json.dumps(
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": False},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.01},
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "offload_optimizer": {"device": "cpu"},
            },
        }
    )
)
RANKS, STEPS, LENGTH = 2, 120, 32
AUTO = AutoValues(
    world_size=RANKS,
    hidden_size=64,
    learning_rate=3e-3,
    num_steps=STEPS,
    num_warmup=5,
)
recipe = from_ds_config(FILE, auto=AUTO)
print(recipe)

# %% [markdown]
# ## The model and the data
#
# The text is the source of Python's `textwrap` module, with one blank for each run of blanks, or
# the model would learn to indent first. A token is a byte, and the last sequences are held out.
# `zf.functional` turns the module into a function of its parameters.

# %%
torch.manual_seed(0)
MODEL = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=128,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
)
APPLY = zf.functional(MODEL)
SOURCE = " ".join(inspect.getsource(textwrap).split())
TEXT = torch.tensor(list(SOURCE.encode("ascii", "replace")))
ROWS = TEXT.unfold(0, LENGTH, LENGTH // 2)
TRAIN, HELD_OUT = ROWS[:-64], ROWS[-64:]


def loss_fn(params, tokens):
    logits = APPLY(params, tokens).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])


def batches(group, first, last):
    generator = torch.Generator().manual_seed(0)
    for step in range(last):
        picked = torch.randint(len(TRAIN), (recipe.batch.train,), generator=generator)
        if step >= first:
            yield TRAIN[picked][group.rank :: group.size]


# %% [markdown]
# ## Training
#
# `recipe.zero(loss_fn, group)` composes the configuration's stage. A step splits each batch into as
# many micro-batches as the configuration says.


# %%
def train(group):
    zero = recipe.zero(loss_fn, group)
    state = zero.init(APPLY.params)
    losses = []
    bar = tqdm(
        batches(group, 0, STEPS), total=STEPS, disable=group.rank > 0, leave=False
    )
    for batch in bar:
        state, info = zero.step(state, batch)
        losses.append(info.loss.item())
        if len(losses) == STEPS // 2:
            zf.save(FOLDER / "half", state)
    held_out = HELD_OUT[group.rank :: group.size]
    loss = evaluate(loss_fn, group)(state, held_out)
    metrics = mean_metrics([({"loss": loss}, len(held_out))], group)
    return losses, float(metrics["loss"]), zero.params(state)


losses, held_out, params = zf.simulate(RANKS, train)[0]
assert losses[-1] < 0.8 * losses[0]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, held out {held_out:.3f}")

# %%
_ = figures.losses({"training": losses}, smooth=5)

# %% [markdown]
# ## Generation
#
# `APPLY.bind(params)` is the module with these parameters. It has all methods of its class, such as
# `generate`. After so few steps it writes letters in the order of the text, and hardly a word.

# %%
torch.manual_seed(0)
prompt = torch.tensor([list(b"def ")] * 3)
rows = (
    APPLY.bind(params)
    .eval()
    .generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_length=LENGTH,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        pad_token_id=0,
    )
)
written = [bytes(row.tolist()).decode() for row in rows]
print(*written, sep="\n")
assert all(len(set(text)) > 5 for text in written)

# %% [markdown]
# ## Go on at another stage
#
# A checkpoint names leaves, and knows nothing of ranks or stages, so you can go on with a run at
# another stage. Here you resume from the middle. At stage 3 the losses have the same bits as in the
# unbroken run. At stage 1 they differ by rounding: only stage 3 keeps small leaves apart, so at
# stage 1 the leaves lie in other buckets, and the gradient norm, which the step clips by, is
# rounded differently.


# %%
def resume(group, stage):
    values = from_ds_config(
        {**json.loads(FILE.read_text()), "zero_optimization": {"stage": stage}},
        auto=AUTO,
    )
    zero = values.zero(loss_fn, group)
    state = zf.load(FOLDER / "half", zero.init(APPLY.params)).state
    losses = []
    for batch in batches(group, STEPS // 2, STEPS):
        state, info = zero.step(state, batch)
        losses.append(info.loss.item())
    return losses


again = {stage: zf.simulate(RANKS, resume, stage)[0] for stage in (3, 1)}
assert again[3] == losses[STEPS // 2 :]
difference = max(
    abs(a - b) for a, b in zip(again[1], losses[STEPS // 2 :], strict=True)
)
assert difference < 1e-4, difference
print(f"resumed at stage 3: {len(again[3])} losses equal to the last bit")
print(f"resumed at stage 1: losses differ by at most {difference:.1e}")
