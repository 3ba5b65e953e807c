"""Train a Llama of Hugging Face, evaluate on held-out text, and generate.

    python examples/generate.py                          # one process
    torchrun --nproc-per-node 2 examples/generate.py     # two processes, on GPUs if there are two
    python examples/generate.py --simulate 2             # two simulated ranks in one process

``apply.bind(params)`` is the model with these parameters, with all methods of the class.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import zfun as zf
from zfun.evaluation import evaluate
from zfun.reductions import mean_metrics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE, LENGTH = 32, 32  # sequences of all ranks together, characters of each
PROMPTS = ("    def ", "        if ", "import ", "return ")
SIZES: Any = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same first values on every rank
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))
    return model.to(DEVICE)


def encode(text: str) -> Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")), device=DEVICE)


def make_data(rank: int, size: int) -> list[Tensor]:
    """Python's own textwrap.py in sequences of characters; the last batch is held out."""
    rows = encode(inspect.getsource(textwrap)).unfold(0, LENGTH, LENGTH // 2)
    return [x[rank::size] for x in rows[: len(rows) // BATCH_SIZE * BATCH_SIZE].split(BATCH_SIZE)]


def loss_of(net: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens).logits[:, :-1].transpose(1, 2), tokens[:, 1:])


def generate(model: Any, prompts: tuple[str, ...]) -> Tensor:
    fixed = {"do_sample": False, "max_length": LENGTH, "pad_token_id": 0}
    return torch.cat([model.generate(encode(prompt)[None], **fixed) for prompt in prompts])


def train(group: zf.Group, stage: int = 3) -> tuple[list[float], dict[str, Any]]:
    apply = zf.functional(make_model())  # the module as a function of its parameters
    loss_fn = lambda params, batch: loss_of(partial(apply, params), batch)
    zero = zf.zero(stage, loss_fn, zf.optim.adamw(3e-3), group)
    state, losses = zero.init(apply.params), list[float]()
    *batches, held_out = make_data(group.rank, group.size)
    for batch in batches:
        state, info = zero.step(state, batch)
        losses.append(float(info.loss))  # the mean over the ranks
    metrics = {"loss": evaluate(loss_fn, group)(state, held_out)}  # no rank holds all parameters
    loss = mean_metrics([(metrics, len(held_out))], group)["loss"]
    model = apply.bind(zero.params(state)).eval()  # every rank holds all parameters
    tokens = zf.collectives.all_gather(generate(model, PROMPTS[group.rank :: group.size]), group)
    if group.rank == 0:
        print(f"loss {float(loss):.4f}", *(bytes(row.tolist()) for row in tokens), sep="\n")
    return [*losses, float(loss)], {**zero.params(state), "tokens": tokens}


if __name__ == "__main__":
    if "--simulate" in sys.argv:
        zf.simulate(int(sys.argv[-1]), train)
    else:
        train(zf.process_group())  # torchrun's ranks; one rank where there is no launcher
