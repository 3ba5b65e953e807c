"""Models and trainers as guides to DeepSpeed make them, against the same without DeepSpeed."""

import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from transformers import (
    AutoModelForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from tests.interop.finetunes import SIZES, sections

transformers.logging.set_verbosity_error()
deepspeed.init_distributed()
rank, ranks = dist.get_rank(), dist.get_world_size()
folder = Path(sys.argv[1])
parts = sections(folder / "disk")
(folder / "disk").mkdir(exist_ok=True)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of tokens."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 64, (8,), generator=draw)
        return {"input_ids": ids, "labels": ids}


def arguments(zero, options):
    """Return arguments, with a configuration as a dict."""
    config = {} if zero is None else {"deepspeed": {**SIZES, "zero_optimization": zero}}
    return TrainingArguments(
        str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **config,
        **options,
    )


def trained(zero=None, times=1, **options):
    """Train a model, which is loaded after the arguments are there, with one trainer or more."""
    losses, model = [], None
    for _ in range(times):
        args = arguments(zero, options)
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(folder / "model")
        trainer = Trainer(model=model, args=args, train_dataset=Rows(), eval_dataset=Rows())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses += [row["loss"] for row in trainer.state.log_history if "loss" in row]
        losses.append(trainer.evaluate()["eval_loss"])
    return losses


def check(cases, expected, **options):
    """Compare with the run without DeepSpeed, and bit by bit with the first one."""
    first = None
    for name in cases:
        found = trained(parts[name], **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=name)
        first = first or found
        assert found == first, name


# Runs without DeepSpeed come first, because arguments with a configuration count for the process.
plain, again = trained(activation_checkpointing=True), trained(times=2)
check(parts, plain, activation_checkpointing=True)
check(("0", "1", "2", "3", "3 host"), again, times=2)

# A model that zero.Init makes, in a loop of the script.
shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
config = T5Config(vocab_size=64, decoder_start_token_id=0, **shape)


def batch(step):
    """Return a batch of all ranks."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 64, (4, 6), generator=draw)
    return {"input_ids": ids, "labels": ids.flip(1)}


torch.manual_seed(0)
model = T5ForConditionalGeneration(config)
with redirect_stdout(StringIO()) as text:
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1)
assert "offload_optimizer=none, zero_init=0" in text.getvalue()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
expected = []
for step in range(4):
    loss = model(**batch(step)).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    expected.append(loss.item())
first = None
for name, zero in parts.items():
    torch.manual_seed(0)
    with deepspeed.zero.Init(enabled=zero["stage"] == 3):
        model = T5ForConditionalGeneration(config)
    sizes = {key: 512 for key, value in zero.items() if value == "auto"}
    given = {
        "train_micro_batch_size_per_gpu": 4 // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {**zero, **sizes},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=given
    )
    losses = []
    for step in range(4):
        rows = {key: x.chunk(ranks)[rank] for key, x in batch(step).items()}
        loss = engine(**rows).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5, msg=name)
    first = first or losses
    assert losses == first, name
