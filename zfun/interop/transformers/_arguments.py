"""Arguments of a run, with the sharding among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` that say how the training state is sharded.

    ``deepspeed``, also ``--deepspeed FILE`` on a command line, is read by zfun.

    Attributes:
        zero: as ``zero=`` of :class:`zfun.interop.transformers.Trainer`.

    Example:
        >>> from transformers import HfArgumentParser
        >>> words = ["--output_dir", "out", "--zero", "3", "--use_cpu", "--report_to", "none"]
        >>> HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)[0].zero
        '3'
    """

    zero: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "stage from 0 to 3, or a configuration of DeepSpeed"}
    )

    def __post_init__(self) -> None:
        # transformers would import DeepSpeed for its own field.
        if self.deepspeed is not None and self.zero is None:
            self.zero, self.deepspeed = self.deepspeed, None
        super().__post_init__()
