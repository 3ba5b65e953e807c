"""The options of a Trainer: those of ``zf.zero``, and those that cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop._configured import zero_options
from zfun.interop.ds_config import AutoValues, Recipe, from_ds_config, is_config
from zfun.options import shown
from zfun.recipes import Precision

_ZERO_OPTIONS = (
    *("stage", "group", "precision", "offload", "compression", "schedule", "bucket_bytes"),
    *("order", "donate", "max_skipped"),
)
_FROM_ARGUMENTS = {
    "loss_fn": "compute_loss_func= of the Trainer, or a subclass with compute_loss()",
    "optimizer": "optim= of TrainingArguments, or optimizers= of the Trainer",
    "num_micro_batches": "gradient_accumulation_steps= of TrainingArguments",
    "trainable": "requires_grad of the model's parameters",
    "buffers": "nothing, because the Trainer keeps the buffers of rank 0, as DDP does",
}
# Names of TrainingArguments whose work zfun does in another way, and the remedy.
_REFUSED = {
    "deepspeed": "pass the same configuration as zero= of the Trainer",
    "fsdp": "pass zero=3 to the Trainer, and leave fsdp= out",
    "auto_find_batch_size": "pass per_device_train_batch_size=, and leave auto_find_batch_size out",
    "parallelism_config": "zfun shards over data-parallel ranks; leave parallelism_config= out",
}


def check_arguments(args: Any) -> None:
    """Refuse arguments of transformers that cannot hold; all of them in one error."""
    if args is None:
        return
    nothing: list[Any] = [None, False, "", [], {}]
    values = {name: getattr(args, name, None) for name in _REFUSED}
    if wrong := {name: value for name, value in values.items() if value not in nothing}:
        raise OptionError(
            "zfun.interop.transformers.Trainer shards, reduces and steps by itself; got "
            + ", ".join(f"{name}={shown(value)}" for name, value in wrong.items())
            + "; "
            + "; ".join(f"for {name}, {_REFUSED[name]}" for name in wrong)
        )
    if args.n_gpu > 1:
        raise OptionError(
            f"a rank of zfun has one GPU; this process sees {args.n_gpu}; launch the script with "
            "torchrun --nproc-per-node, one process for each GPU"
        )


def zero_of(zero: Any, args: Any) -> Any:
    """Return ``zero=`` of a Trainer; by default that of the TrainingArguments, or 2."""
    if zero is None:
        zero = getattr(args, "zero", None)
    return 2 if zero is None else int(zero) if isinstance(zero, str) and zero.isdigit() else zero


def recipe_of(zero: Any, args: Any, model: Any, **steps: int) -> Recipe | None:
    """Return the recipe of a configuration, if there is one.

    TrainingArguments fill ``"auto"``, also with ``num_steps`` and ``num_warmup`` where these are
    known; other numbers must be equal.
    """
    if is_config(zero):
        auto = _auto_of(args, model, **steps)
        zero = from_ds_config(zero, auto=auto, late=() if steps else ("num_steps", "num_warmup"))
    if not isinstance(zero, Recipe):
        return None
    _check_recipe(zero, args)
    if zero.autocast is not None:
        raise OptionError(
            "a Trainer autocasts by TrainingArguments; got torch_autocast in the "
            "configuration; pass bf16=True, and leave the section out"
        )
    return zero


def options_of(zero: Any, recipe: Recipe | None, ranks: Callable[[], Group]) -> dict[str, Any]:
    """Return the options of ``zf.zero``; ``ranks`` returns the group where none is given."""
    if recipe is not None:
        precision = None if recipe.precision == Precision() else recipe.precision
        return {**zero_options(recipe, ranks()), "precision": precision}
    if isinstance(zero, Mapping):
        _check_options(zero)
        return {**zero, "group": zero.get("group") or ranks()}
    if type(zero) is not int or zero not in (0, 1, 2, 3):
        raise OptionError(
            "zero= is a stage from 0 to 3, a dict of options of zf.zero(), or a configuration of "
            f"DeepSpeed; got {shown(zero)}; pass zero=3"
        )
    return {"stage": zero, "group": ranks()}


def _auto_of(args: Any, model: Any, **steps: int) -> AutoValues:
    return AutoValues(
        world_size=args.world_size,
        micro_batch_size=args.per_device_train_batch_size,
        num_micro_batches=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm,
        dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
        hidden_size=getattr(getattr(model, "config", None), "hidden_size", None),
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **steps,
    )


def _check_options(zero: Mapping[str, Any]) -> None:
    for name in zero:
        if name in _FROM_ARGUMENTS:
            raise OptionError(
                f"a Trainer makes {name} for zf.zero(); got {name}={shown(zero[name])} in zero=; "
                f"pass {_FROM_ARGUMENTS[name]}"
            )
        if name not in _ZERO_OPTIONS:
            raise OptionError(
                f"zero= takes options of zf.zero(); got {name!r}; the options are "
                f"{', '.join(_ZERO_OPTIONS)}"
            )
    if "stage" not in zero:
        raise OptionError(
            f"zero= names a stage; got {sorted(map(str, zero))}; add 'stage': 3, or 0 to 2"
        )


def _check_recipe(zero: Recipe, args: Any) -> None:
    """Refuse a recipe whose numbers are not those of the arguments."""
    pairs = [
        ("gradient_accumulation_steps", zero.num_micro_batches, args.gradient_accumulation_steps),
        ("gradient_clipping and max_grad_norm", zero.max_grad_norm, args.max_grad_norm),
    ]
    if isinstance(zero.learning_rate, float):
        pairs.append(("learning_rate", zero.learning_rate, args.learning_rate))
    wrong = [pair for pair in pairs if pair[1] != pair[2]]
    if wrong:
        raise OptionError(
            "a configuration and TrainingArguments have the same numbers; got "
            + ", ".join(f"{name}: {theirs} and {ours}" for name, theirs, ours in wrong)
            + '; write "auto" in the configuration, and pass the numbers of TrainingArguments in '
            "auto=zfun.interop.AutoValues(...)"
        )
