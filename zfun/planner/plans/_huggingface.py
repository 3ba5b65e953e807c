"""A model of Hugging Face as a model to plan for; transformers is imported when asked for."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfun.errors import OptionError
from zfun.modules import functional
from zfun.options import PATH, integer, takes
from zfun.planner.plans._space import Model


@takes(path=PATH, rows=integer(1), length=integer(2))
def from_huggingface(path: str | Path, rows: int = 1, length: int = 1024) -> Model:
    """Return a causal language model of Hugging Face without weights, for :func:`advise`.

    Args:
        path: ``config.json``, or the folder of one.
        rows: sequences in the batch of a rank.
        length: tokens in a sequence.

    Returns:
        The model on the ``meta`` device, in float32, with a loss of recomputed blocks beside.

    Raises:
        OptionError: transformers is missing, or cannot read the file.

    Example:
        ``model = from_huggingface("config.json", rows=4, length=2048)``
    """
    module = module_of(path)
    recomputing = copy.deepcopy(module)
    recompute(recomputing)
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    return Model(
        _loss_of(module), functional(module).params, tokens, recomputed=_loss_of(recomputing)
    )


def module_of(path: str | Path) -> Any:
    """Return a causal language model of Hugging Face on the ``meta`` device."""
    if importlib.util.find_spec("transformers") is None:
        raise OptionError(
            "a config of Hugging Face is read by transformers; the package cannot be imported; "
            "install transformers"
        )
    transformers = importlib.import_module("transformers")
    try:
        # A plan reads files of this machine only.
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(
            f"a model is described by a config.json of Hugging Face; got {str(path)!r}: "
            f"{str(error).splitlines()[0]}; pass the path of the file"
        ) from error
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def recompute(module: Any) -> None:
    """Let a model of Hugging Face recompute its layers in backward."""
    # The second name is that of older versions.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switch = next(getattr(module, name) for name in names if hasattr(module, name))
    switch({"use_reentrant": False})


def _loss_of(module: Any) -> Any:
    apply = functional(module)

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return apply(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    return loss
