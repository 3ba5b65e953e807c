"""``transformers.Trainer`` over the functions of ``zf.zero``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zfun.collectives import process_group
from zfun.errors import CheckpointError, OptionError
from zfun.interop.ds_config import Recipe
from zfun.interop.transformers._options import (
    check_arguments,
    check_launcher,
    check_recipe,
    group_of,
    options_of,
    precision_of,
    read,
    size_of,
)
from zfun.interop.transformers._run import Run
from zfun.recipes import StepInfo

__all__ = ["Trainer"]

_FOLDER = "zfun"


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` whose training state is sharded over the ranks.

    All arguments, hooks and methods are those of ``transformers.Trainer``. Each optimizer step is
    one step of :func:`zfun.zero`: at stage 3 parameters are gathered where a layer uses them, also
    in evaluation and generation. The optimizer of the Trainer holds the parameter groups, which
    schedulers and callbacks may change; the pure optimizer takes the numbers from there.

    ``bf16=True`` and ``fp16=True`` compute under ``torch.autocast``, as in ``transformers``; a
    ``precision`` in ``zero=`` replaces both.

    Args:
        args: as for ``transformers.Trainer``, by position or by name.
        zero: a stage from 0 to 3; or a dict of ``stage`` and other options of :func:`zfun.zero`,
            such as ``offload``, ``precision`` and ``group``; or a configuration of DeepSpeed, as a
            dict, a path, or the result of :func:`zfun.interop.from_ds_config`. The arguments fill
            ``"auto"`` in a configuration. Optimizer and schedule are those of the arguments.
        kwargs: as for ``transformers.Trainer``.

    Raises:
        OptionError: an option that does not exist, or that cannot hold together with zfun, such as
            ``deepspeed=`` and ``fsdp=`` of the TrainingArguments.
        ConfigError: a configuration with mistakes, or with other numbers than the arguments.

    Example:
        >>> import tempfile, torch, transformers
        >>> config = transformers.GPT2Config(
        ...     vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1
        ... )
        >>> rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     arguments = transformers.TrainingArguments(
        ...         folder, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True
        ...     )
        ...     model = transformers.GPT2LMHeadModel(config)
        ...     trainer = Trainer(model, arguments, train_dataset=rows, zero=3)
        ...     trainer.train().global_step
        {...}
        2
    """

    def __init__(
        self, *args: Any, zero: int | Mapping[str, Any] | str | Path | Recipe, **kwargs: Any
    ) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        check_arguments(arguments)
        self._run: Run | None = None
        self._bound: Any = None
        self._info: StepInfo[Any] | None = None
        self._micro_batches: list[tuple[Any, Any, float]] = []
        super().__init__(*args, **kwargs)
        check_launcher(self)
        zero = read(zero, self.args, self.model)
        check_recipe(zero, self.args)
        self._options = options_of(zero)
        timeout_s = float(self.args.ddp_timeout)
        self._group = group_of(zero, self._options, lambda: process_group(timeout_s=timeout_s))
        if size_of(self._group) != self.args.world_size:
            raise OptionError(
                "the ranks of the group are the processes of the Trainer; got a group of "
                f"{size_of(self._group)} for {self.args.world_size} processes; launch the script "
                "with torchrun, and make the group after TrainingArguments"
            )
        self._autocasts = self._options.get("precision") is None
        self._options["precision"] = precision_of(self._options, self.args)

    # The places where transformers would wrap the model, compute a gradient and step.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the autocast of ``bf16`` and ``fp16``."""
        args = self.args
        in_full = self._bound is not None and (args.bf16_full_eval or args.fp16_full_eval)
        if not (in_full or (self._autocasts and (args.bf16 or args.fp16))):
            return contextlib.nullcontext()
        is_bf16 = args.bf16_full_eval if in_full else args.bf16
        # The cache of casts keeps gathered parameters alive.
        return torch.autocast(
            args.device.type, torch.bfloat16 if is_bf16 else torch.float16, cache_enabled=False
        )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if not training and self._run is None:
            return super()._wrap_model(model, training, dataloader)
        if not training:
            return self._bound
        # An earlier train() may have ended with an error between two steps.
        self._micro_batches.clear()
        if isinstance(model, _Held) and self._run is not None and self._run.module is self.model:
            return model
        self._run = Run(
            self.model,
            self.optimizer,
            self._loss_of,
            self._group,
            self._options,
            self.args.max_grad_norm,
        )
        return _Held(self.model)

    def _loss_of(self, model: Any, batch: tuple[Any, Any, float]) -> Tensor:
        inputs, num_items, divisor = batch
        with self.compute_loss_context_manager():
            # compute_loss() may take labels out of the inputs.
            loss = self.compute_loss(model, copy.copy(inputs), num_items_in_batch=num_items)
        return loss if divisor == 1 else loss / divisor

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Keep a micro-batch; take a step of all kept ones where the optimizer steps next."""
        self.model.train()
        divisor = self._divisor(num_items_in_batch)
        self._micro_batches.append((self._prepare_inputs(inputs), num_items_in_batch, divisor))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches = list(self._micro_batches)
        self._micro_batches.clear()
        assert self._run is not None, "training begins with _wrap_model()"
        self._info = self._run.step(batches)
        self.optimizer._is_overflow = self._info.skipped
        return self._info.loss.detach()

    def _divisor(self, num_items_in_batch: Any) -> float:
        """Return by how much the loss of a micro-batch is divided, so that the sum is the mean."""
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = (
                self.model_accepts_loss_kwargs and num_items_in_batch is not None
            ) or self.compute_loss_func is not None
        return 1.0 if is_scaled else float(self.current_gradient_accumulation_steps)

    def _clip_grad_norm(self, model: Any) -> Any:
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return None if self._info is None else self._info.grad_norm

    # Evaluation and generation.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict with the parameters of the state."""
        if self._run is None:
            return super().evaluation_loop(*args, **kwargs)
        self.model.eval()
        with self._run.bound() as self._bound:
            # bf16_full_eval computes under autocast, and casts no parameters.
            self._bound.to = lambda *args, **kwargs: self._bound
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                self._bound = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate`` of the model with the parameters of the state. All ranks call.

        Args:
            args: as for ``model.generate``; ranks may pass different prompts.
            kwargs: as for ``model.generate``.

        Returns:
            The result of ``model.generate``, on each rank for the rank's own prompts.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with self._generating() as model, torch.no_grad(), self.compute_loss_context_manager():
                return model.generate(*args, **kwargs)
        finally:
            self.model.train(was_training)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[Any]:
        if self._run is None:
            yield self.model
            return
        # PEFT generates by a model inside of the model, which bound() does not see.
        is_peft = hasattr(self.model, "get_base_model")
        with self._run.whole() if is_peft else self._run.bound() as model:
            yield model

    def gather_model(self) -> Any:
        """Give ``trainer.model`` the values of the state, whole on every rank. All ranks call.

        Returns:
            The model.
        """
        if self._run is not None:
            self._run.gather()
        return self.model

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model as ``transformers`` does. All ranks call."""
        if self._run is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        self._save(output_dir, state_dict=self._run.state_dict(keep=self.args.should_save))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._run is not None:
            self._run.save(Path(output_dir) / _FOLDER, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / _FOLDER).is_dir():
            # _load_optimizer_and_scheduler() loads the parameters too.
            return
        if (folder / "optimizer.pt").is_file():
            raise CheckpointError(
                "resume_from_checkpoint names a checkpoint of zfun.interop.transformers.Trainer; "
                f"got {str(folder)!r}, whose optimizer state another Trainer has saved; make the "
                "model with from_pretrained() of this folder, and train without "
                "resume_from_checkpoint"
            )
        self._drop_run()
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._run is not None and checkpoint is not None:
            folder = Path(checkpoint) / _FOLDER
            if folder.is_dir():
                self._run.load(folder)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint) / _FOLDER
        if self._run is not None and folder.is_dir():
            self._run.load(folder)
            return
        self._drop_run()
        super()._load_best_model()

    def _drop_run(self) -> None:
        """Make the model whole, and let the next train() begin with a new state."""
        if self._run is not None:
            self._run.gather()
            self._run = None
            self.model_wrapped = self.model


class _Held(nn.Module):
    """Stands for the model in the loop of transformers, so that accelerate does not wrap it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
