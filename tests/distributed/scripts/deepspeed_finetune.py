"""A script that fine-tunes a causal language model on instructions, for DeepSpeed or without."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

IGNORED = -100
PROMPT = "instruction {instruction} input {input} answer "


@dataclass
class ModelArguments:
    """The model."""

    model_name_or_path: str = field(default="")


@dataclass
class DataArguments:
    """The data."""

    data_path: str = field(default="")


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Arguments of the trainer, with two flags that older versions of it had."""

    model_max_length: int = field(default=32)
    evaluation_strategy: str = field(default="no")
    warmup_ratio: float = field(default=0.0)

    def __post_init__(self):
        self.eval_strategy = self.evaluation_strategy
        self.warmup_steps = self.warmup_ratio or self.warmup_steps
        super().__post_init__()


class Instructions(Dataset[dict[str, torch.Tensor]]):
    """Prompts with answers, of which the answers count."""

    def __init__(self, path, tokenizer, length):
        super().__init__()
        self.rows = []
        for row in json.loads(Path(path).read_text(encoding="utf-8")):
            prompt = tokenizer(PROMPT.format_map(row)).input_ids
            ids = (prompt + tokenizer(row["output"]).input_ids + [tokenizer.eos_token_id])[:length]
            labels = copy.copy(ids)
            labels[: len(prompt)] = [IGNORED] * len(prompt)
            self.rows.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@dataclass
class Collator:
    """Pads a batch."""

    tokenizer: transformers.PreTrainedTokenizerBase

    def __call__(self, rows):
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad([row["input_ids"] for row in rows], True, self.tokenizer.pad_token_id)
        labels = pad([row["labels"] for row in rows], True, IGNORED)
        mask = ids.ne(self.tokenizer.pad_token_id)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def train():
    """Train, and write the weights and the log to the folder of the run."""
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        model_max_length=training_args.model_max_length,
        padding_side="right",
    )
    model.config.use_cache = False
    data = Instructions(data_args.data_path, tokenizer, training_args.model_max_length)
    trainer = transformers.Trainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        train_dataset=data,
        data_collator=Collator(tokenizer),
    )
    trainer.train()
    trainer.save_state()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    train()
