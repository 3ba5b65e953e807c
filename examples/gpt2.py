"""Train a GPT-2 of Hugging Face on lines of text: padding, micro-batches, checkpointing.

    python examples/gpt2.py                          # one process
    torchrun --nproc-per-node 2 examples/gpt2.py     # two processes, on GPUs if there are two
    python examples/gpt2.py --simulate 2             # two simulated ranks in one process

Lines differ in length, so ranks and micro-batches differ in their numbers of tokens.
``zf.weighted_mean`` gives the mean over all tokens of a step, wherever the tokens are.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

import zfun as zf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, LENGTH = 32, 64  # lines of all ranks together, tokens of a line at most
SIZES: Any = {"vocab_size": 128, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
OPTIONS: Any = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
DROPOUT: Any = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)  # the same first values on every rank
    model: Any = GPT2LMHeadModel(GPT2Config(**SIZES, **OPTIONS, **DROPOUT))
    model.to(DEVICE)
    model.activation_checkpointing_enable()  # backward computes the activations again
    return model


def make_data(rank: int, size: int) -> Any:
    """Lines of Python's own textwrap.py, in which each character is a token."""
    tokens = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="\0"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = FastTokenizer(tokenizer_object=tokens, pad_token="\0", unk_token="\0")
    lines = [line for line in inspect.getsource(textwrap).splitlines() if line.strip()]
    lines = lines[: len(lines) // BATCH_SIZE * BATCH_SIZE]  # equally many for all ranks
    data: Any = [tokenizer(x, truncation=True, max_length=LENGTH) for x in lines[rank::size]]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return DataLoader(data, batch_size=BATCH_SIZE // size, collate_fn=collate)


def loss_of(net: Any, batch: Any) -> zf.transforms.WeightedMean:
    logits = net(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]  # the label of padding is -100, which cross_entropy ignores
    total = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum")
    return zf.weighted_mean(total, (labels != -100).sum())


def train(group: zf.Group, stage: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    apply = zf.functional(make_model())  # the module as a function of its parameters
    loss_fn = lambda params, batch: loss_of(partial(apply, params), batch)
    zero = zf.zero(stage, loss_fn, zf.optim.adamw(1e-3), group, num_micro_batches=4)
    state, losses = zero.init(apply.params), list[float]()
    for batch in make_data(group.rank, group.size):
        state, info = zero.step(state, batch.to(DEVICE))
        losses.append(float(info.loss))  # the mean over the tokens of all ranks
        if group.rank == 0:
            print(f"step {state.step}  loss {losses[-1]:.4f}")
    return losses, zero.params(state)


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        zf.simulate(int(sys.argv[-1]), train)
    else:
        train(zf.process_group())  # torchrun's ranks; one rank where there is no launcher
