"""The values that a caller knows and a configuration leaves to ``"auto"``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from zfun.errors import OptionError
from zfun.interop.ds_config._mistakes import nearest
from zfun.interop.ds_config.table._keys import BETAS, DTYPE_NAME
from zfun.options import ITERABLE, integer, number, one_of, takes

_DTYPE = one_of(torch.float32, torch.bfloat16, torch.float16, example="torch.bfloat16")


@takes(
    world_size=integer(1) | None,
    train_batch_size=integer(1) | None,
    micro_batch_size=integer(1) | None,
    num_micro_batches=integer(1) | None,
    max_grad_norm=number(0) | None,
    dtype=_DTYPE | None,
    hidden_size=integer(1) | None,
    learning_rate=number(0) | None,
    betas=BETAS.kind | None,
    eps=number(0) | None,
    weight_decay=number(0) | None,
    num_warmup=integer(0) | None,
    num_steps=integer(1) | None,
)
@dataclass(frozen=True, slots=True)
class AutoValues:
    """The values of a run that fill ``"auto"`` in a configuration; ``None`` is not known.

    A value that is known must also equal the number that the configuration has in its place.

    Attributes:
        world_size: ranks that each take a batch of their own; those of an expert axis do.
        train_batch_size: samples of one step, over all ranks.
        micro_batch_size: samples that a rank computes at a time.
        num_micro_batches: micro-batches of one step of a rank (gradient accumulation).
        max_grad_norm: the bound of the gradient's norm; 0 for none.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
        hidden_size: of the model; the largest one, if there are several.
        learning_rate: of the optimizer, and the peak of a warm-up.
        betas: decays of Adam's moments.
        eps: of Adam.
        weight_decay: of the optimizer.
        num_warmup: steps of the warm-up.
        num_steps: all steps of the run.

    Example:
        >>> AutoValues(hidden_size=768, learning_rate=3e-4).world_size is None
        True
    """

    world_size: int | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    max_grad_norm: float | None = None
    dtype: torch.dtype | None = None
    hidden_size: int | None = None
    learning_rate: float | None = None
    betas: Sequence[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    num_warmup: int | None = None
    num_steps: int | None = None


@takes(settings=ITERABLE)
def parse_auto_values(settings: Iterable[str]) -> AutoValues:
    """Read values of a run from text, as a command line has them.

    Args:
        settings: such as ``"hidden_size=768"``, ``"dtype=bf16"`` and ``"betas=[0.9, 0.95]"``.

    Returns:
        The values.

    Raises:
        OptionError: a name does not exist, or a value is of another kind.

    Example:
        >>> parse_auto_values(["world_size=8", "dtype=bf16"]).dtype
        torch.bfloat16
    """
    names = [field.name for field in fields(AutoValues)]
    found: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=") if isinstance(setting, str) else ("", "", "")
        if name not in names:
            near = nearest(name, names)
            remedy = f"did you mean {near!r}?" if near else f"it is one of {', '.join(names)}"
            raise OptionError(f"a value of a run is NAME=VALUE; got {setting!r}; {remedy}")
        if name == "dtype" and DTYPE_NAME.kind.accepts(text):
            found[name] = DTYPE_NAME.read(text)
            continue
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return AutoValues(**found)
