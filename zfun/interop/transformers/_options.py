"""The options of a Trainer: those of ``zf.zero``, and those that cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zfun import optim
from zfun.collectives import mesh_of, split
from zfun.errors import OptionError
from zfun.interop.ds_config import AutoValues, Recipe, from_ds_config, is_config
from zfun.options import shown
from zfun.recipes import Precision

__all__ = [
    "check_arguments",
    "check_launcher",
    "check_recipe",
    "group_of",
    "options_of",
    "precision_of",
    "read",
    "size_of",
]

_ZERO_OPTIONS = (
    "stage",
    "group",
    "precision",
    "offload",
    "compression",
    "schedule",
    "bucket_bytes",
    "order",
    "donate",
    "max_skipped",
)
_FROM_ARGUMENTS = {
    "loss_fn": "compute_loss_func= of the Trainer, or a subclass with compute_loss()",
    "optimizer": "optim= of TrainingArguments, or optimizers= of the Trainer",
    "num_micro_batches": "gradient_accumulation_steps= of TrainingArguments",
    "trainable": "requires_grad of the model's parameters",
    "buffers": "nothing, because the Trainer finds the running statistics of the model",
}
# Names of TrainingArguments whose work zfun does in another way, and the remedy.
_REFUSED = {
    "deepspeed": ("pass the same configuration as zero= of the Trainer"),
    "fsdp": "pass zero=3 to the Trainer, and leave fsdp= out",
    "torch_compile": "compile the loss, as the page 'Compile' shows, and leave torch_compile= out",
    "auto_find_batch_size": "pass per_device_train_batch_size=, and leave auto_find_batch_size out",
    "parallelism_config": "zfun shards over data-parallel ranks; leave parallelism_config= out",
}


def check_arguments(args: Any) -> None:
    """Refuse arguments of transformers that cannot hold; all of them in one error."""
    if args is None:
        return
    wrong = {
        name: value
        for name in _REFUSED
        if (value := getattr(args, name, None)) not in (None, False)
    }
    wrong = {name: value for name, value in wrong.items() if value not in ("", [], {})}
    if wrong:
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


def check_launcher(trainer: Any) -> None:
    """Refuse a strategy that a configuration of accelerate has chosen."""
    found = [name for name in ("deepspeed", "fsdp") if getattr(trainer, f"is_{name}_enabled")]
    if found:
        raise OptionError(
            "zfun.interop.transformers.Trainer shards, reduces and steps by itself; got "
            f"{found[0]} from the configuration of accelerate; launch the script with torchrun, "
            "or with a configuration of accelerate without deepspeed and fsdp"
        )


def read(zero: Any, args: Any, model: Any) -> Any:
    """Read a configuration of DeepSpeed with the numbers of the arguments; return others as given.

    Args:
        zero: ``zero=`` of a Trainer.
        args: TrainingArguments, which fill ``"auto"``; other numbers must be equal.
        model: the model, for its hidden size.
    """
    if not is_config(zero):
        return zero
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    auto = AutoValues(
        world_size=args.world_size,
        micro_batch_size=args.per_device_train_batch_size,
        num_micro_batches=args.gradient_accumulation_steps,
        max_grad_norm=args.max_grad_norm,
        dtype=dtype,
        hidden_size=getattr(getattr(model, "config", None), "hidden_size", None),
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        num_warmup=args.get_warmup_steps(args.max_steps) if args.max_steps > 0 else None,
        num_steps=args.max_steps if args.max_steps > 0 else None,
    )
    return from_ds_config(zero, auto=auto)


def options_of(zero: Any) -> dict[str, Any]:
    """Return the options of ``zf.zero`` that ``zero=`` of a Trainer means."""
    if isinstance(zero, Recipe):
        if zero.autocast is not None:
            raise OptionError(
                "a Trainer autocasts by TrainingArguments; got torch_autocast in the "
                "configuration; pass bf16=True, and leave the section out"
            )
        return {
            "stage": zero.stage,
            "precision": zero.precision if zero.precision != Precision() else None,
            "compression": zero.compression,
            "schedule": zero.schedule,
            "bucket_bytes": zero.bucket_bytes,
            "offload": zero.offload(),
        }
    if isinstance(zero, Mapping):
        return _checked(zero)
    if type(zero) is not int or zero not in (0, 1, 2, 3):
        raise OptionError(
            "zero= is a stage from 0 to 3, a dict of options of zf.zero(), or a configuration of "
            f"DeepSpeed; got {shown(zero)}; pass zero=3"
        )
    return {"stage": zero}


def _checked(zero: Mapping[str, Any]) -> dict[str, Any]:
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
    return dict(zero)


def check_recipe(zero: Any, args: Any) -> None:
    """Refuse a recipe whose numbers are not those of the arguments."""
    if not isinstance(zero, Recipe):
        return
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


def group_of(zero: Any, options: dict[str, Any], make: Any) -> Any:
    """Take the group out of the options; make one where there is none."""
    group = options.pop("group", None)
    group = make() if group is None else group
    if isinstance(zero, Recipe) and zero.rows is not None:
        mesh = split(group, zero.rows)
        return mesh if zero.secondary else mesh.inner
    return group


def precision_of(options: Mapping[str, Any], args: Any) -> Precision | Any:
    """Return the precision: with fp16 of the arguments, a loss scale beside autocast."""
    given = options.get("precision")
    if given is None and args.fp16:
        return Precision(loss_scale=optim.dynamic_loss_scale())
    return given


def size_of(group: Any) -> int:
    """Return the number of ranks that get batches of their own."""
    return mesh_of(group).size
