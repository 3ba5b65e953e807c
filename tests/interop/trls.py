"""Programs with the trainers of TRL, plain and over zfun, on any number of ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from zfun.interop.transformers import Trainer

KINDS = (
    "sft",
    "sft lora",
    "sft dora",
    "sft adalora",
    "sft modules",
    "sft parameters",
    "sft prompt",
    "dpo",
    "dpo lora",
    "reward",
    "grpo",
    "grpo lora",
)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return found


def saved_model(folder: str | Path) -> str:
    """Save a model and a tokenizer, which trainers with a reference model load by name."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)
    torch.manual_seed(0)
    reward = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SHAPE, num_labels=1)
    )
    reward.save_pretrained(Path(folder) / "reward")
    for where in (Path(folder), Path(folder) / "reward"):
        tokenizer().save_pretrained(where)
    return str(folder)


def texts(words: tuple[str, ...], length: int) -> Any:
    generator = torch.Generator().manual_seed(0)

    def text() -> str:
        ids = torch.randint(0, 61, (length,), generator=generator).tolist()
        return " ".join(f"w{i}" for i in ids)

    return datasets.Dataset.from_list([{word: text() for word in words} for _ in range(32)])


def adapter(name: str) -> Any:
    """Return the configuration of an adapter of PEFT."""
    common: dict[str, Any] = {
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
    }
    if name == "adalora":
        return peft.AdaLoraConfig(**common, total_step=10, init_r=4, target_r=2, tinit=1, tfinal=2)
    if name == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    more: dict[str, Any] = {
        "lora": {},
        "dora": {"use_dora": True},
        "modules": {"modules_to_save": ["lm_head"]},
        "parameters": {"target_parameters": ["mlp.down_proj.weight"]},
    }
    return peft.LoraConfig(**common, r=4, **more[name])


def run(
    kind: str, stage: int | None, model: str, *, native: bool = True
) -> list[tuple[float, float]]:
    """Train three steps, save the model, and return loss and norm of each step.

    The rank that saves returns a row of two sums of what the files have, too.

    Args:
        kind: one of ``KINDS``.
        stage: of zfun; ``None`` for the plain trainer.
        model: the folder of :func:`saved_model`.
        native: whether the trainer of zfun takes the stage, or TRL's own takes a configuration for
            DeepSpeed.
    """
    name = kind.split(maxsplit=1)[0]
    trainer, config = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }[name]
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer()}
    options: dict[str, Any] = {"max_length": 32}
    if name == "sft":
        given["train_dataset"] = texts(("text",), 12)
    elif name == "grpo":
        given["train_dataset"] = texts(("prompt",), 4)
        given["reward_funcs"] = lambda completions, **_: [float(len(set(x))) for x in completions]
        options = {"max_completion_length": 6, "num_generations": 4, "beta": 0.1}
    else:
        given["train_dataset"] = texts(("prompt", "chosen", "rejected"), 5)
    if name == "reward":
        given["model"] = str(Path(model) / "reward")
    if " " in kind:
        given["peft_config"] = adapter(kind.split()[1])
    cls, more = trainer, {}
    if stage is not None and native:
        cls, more = type("Sharded", (Trainer, trainer), {}), {"zero": stage}
    elif stage is not None:
        options["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {
                "stage": stage,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        }
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            folder,
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
            bf16=False,
            **options,
        )
        made = cls(args=arguments, **given, **more)
        made.remove_callback(transformers.PrinterCallback)
        made.train()
        # PEFT asks the module for some of the names and values that it saves.
        made.save_model()
        files = sorted(Path(folder).glob("*.safetensors"))
        saved = [x.double() for path in files for x in load_file(path).values()]
    rows = [
        (row["loss"], float(row["grad_norm"])) for row in made.state.log_history if "loss" in row
    ]
    sums = float(sum(x.sum() for x in saved)), float(sum(x.norm() for x in saved))
    return [*rows, sums] if saved else rows


def compare(group: Any, kinds: tuple[str, ...], model: str) -> dict[str, Any]:
    """Train every kind plainly and at every stage, in each process of a test."""
    del group
    return runs(kinds, model, native=True)


def runs(kinds: tuple[str, ...], model: str, *, native: bool) -> dict[str, Any]:
    """Train every kind plainly and at every stage."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    stages = (None, 0, 1, 2, 3)
    found: dict[str, Any] = {kind: [] for kind in kinds}
    # A configuration for stage 3 counts until the next one.
    for stage in stages:
        for kind in kinds:
            found[kind].append(run(kind, stage, model, native=native))
    return found


def check(found: dict[str, Any]) -> None:
    """Check that stages have the same bits, and the numbers of the plain trainers."""
    for kind, (expected, *stages) in found.items():
        for rows in stages:
            assert rows == stages[0], kind
        torch.testing.assert_close(
            torch.tensor(stages[0]), torch.tensor(expected), rtol=1e-5, atol=1e-5, msg=kind
        )
        assert any(loss != expected[0][0] for loss, _ in expected[1:]), kind
