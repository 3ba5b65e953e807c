"""``transformers.Trainer`` over the engine of zfun."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers

from zfun.checkpoint import agree, attempt
from zfun.collectives import Group, agreement_group, process_group
from zfun.errors import CheckpointError
from zfun.interop._configured import ConfiguredOptimizer
from zfun.interop._named import answering
from zfun.interop._resumed import load_parts, moments_beside
from zfun.interop.accelerate import Accelerator
from zfun.interop.deepspeed.runtime.lr_schedules import scheduler_of
from zfun.interop.ds_config import Recipe
from zfun.interop.engine import UNBOUNDED, Engine
from zfun.interop.engine._reads import live_of
from zfun.interop.transformers._files import are_own, is_own, note, weights_in
from zfun.interop.transformers._options import check_arguments, options_of, recipe_of, zero_of
from zfun.optim import Schedule
from zfun.options import DECAY, takes

_FOLDER = "zfun"


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


@takes(decay=DECAY)
class EmaCallback(transformers.TrainerCallback):
    """Let a :class:`Trainer` keep an average of the parameters; see :func:`zfun.optim.ema`.

    Evaluation, prediction, ``generate`` and ``save_model`` use the average. Training, and what
    resumes from a checkpoint, use the parameters, and the checkpoint has both.

    Args:
        decay: as for :func:`zfun.optim.ema`.

    Example:
        >>> EmaCallback(0.999).decay
        0.999
    """

    def __init__(self, decay: float | Schedule) -> None:
        self.decay = decay


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` whose training state is sharded over the ranks.

    All arguments, hooks and methods are those of ``transformers.Trainer``, and the model is your
    own: a loss may use ``self.model``, parts of it, or its parameters. At stage 3 a parameter is
    gathered where the model reads it, also in evaluation and generation. The optimizer of the
    Trainer holds the parameter groups, which schedulers and callbacks may change.

    As a mixin the class shards other trainers: ``class Sharded(Trainer, trl.SFTTrainer)``.

    Args:
        args: as for ``transformers.Trainer``, by position or by name.
        zero: a stage from 0 to 3; or a dict of ``stage`` and other options of :func:`zfun.zero`,
            such as ``offload``, ``precision`` and ``group``; or a configuration of DeepSpeed, as a
            dict, a path, or the result of :func:`zfun.interop.from_ds_config`. The arguments fill
            ``"auto"`` in a configuration. As in ``transformers`` with DeepSpeed, optimizer and
            schedule are those of the configuration if there are any. By default ``zero`` or
            ``deepspeed`` of :class:`TrainingArguments`, or 2.
        kwargs: as for ``transformers.Trainer``.

    Raises:
        OptionError: an option that does not exist, or that cannot hold together with zfun, such as
            ``fsdp=`` of the TrainingArguments.
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

    # Size, time and hash of the files of weights that this run has saved in a folder.
    _noted: tuple[str, dict[str, list[Any]]] = ("", {})
    # The checkpoint whose weights are loaded with the moments, once there is an engine.
    _waiting: Path | None = None

    def __init__(
        self,
        *args: Any,
        zero: int | Mapping[str, Any] | str | Path | Recipe | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        check_arguments(arguments)
        self._given_zero = zero_of(zero, arguments)
        super().__init__(*args, **kwargs)
        self.compute_loss: Any = functools.partial(_in_a_call, self, self.compute_loss)

    # The engine.

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found = super()._build_accelerator_args(**kwargs)
        self._mixed_precision = found.get("mixed_precision") or "no"
        # zfun.interop.accelerate computes in float16 on a CPU too.
        is_cpu_half = self._mixed_precision == "fp16" and self.args.device.type == "cpu"
        return {**found, "mixed_precision": "no"} if is_cpu_half else found

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator of zfun."""
        super().create_accelerator_and_postprocess()
        self._recipe = recipe_of(self._given_zero, self.args, self.model)
        options = options_of(self._given_zero, self._recipe, lambda: self._ranks)
        self._group: Group = options["group"]
        self.accelerator = Accelerator.of(self.accelerator, options, self._mixed_precision)
        bound = self.args.max_grad_norm if self._recipe is None else self._recipe.max_grad_norm
        # transformers clips, and callbacks may change what it has clipped.
        self.accelerator.clips_by_default = UNBOUNDED if bound and bound > 0 else None

    @functools.cached_property
    def _ranks(self) -> Group:
        return process_group(timeout_s=float(self.args.ddp_timeout))

    @property
    def engine(self) -> Engine | None:
        """The engine of the model; ``None`` before training."""
        return self.accelerator.engine_of(self.model)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer of the configuration, or else that of the arguments."""
        decays = [x.decay for x in self.callback_handler.callbacks if isinstance(x, EmaCallback)]
        self.accelerator.ema_decay = decays[0] if decays else None
        if self.optimizer is None and self._recipe is not None and self._recipe.rule is not None:
            trained = [param for param in self.model.parameters() if param.requires_grad]
            self.optimizer = ConfiguredOptimizer(trained, self._recipe.rule)
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule of the configuration, or else that of the arguments."""
        recipe = self._recipe
        if self.lr_scheduler is None and recipe and (recipe.scheduler or recipe.late):
            steps = {
                "num_steps": num_training_steps,
                "num_warmup": self.args.get_warmup_steps(num_training_steps),
            }
            # An "auto" of the schedule waits for the number of steps.
            recipe = recipe_of(self._given_zero, self.args, self.model, **steps)
            if recipe is not None and recipe.scheduler is not None:
                chosen = self.optimizer if optimizer is None else optimizer
                self.lr_scheduler = scheduler_of(recipe.scheduler, chosen)
                self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a micro-batch."""
        return super().training_step(*args, **kwargs).detach()

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        # No gradient is a DTensor, and a look at each would make all of them whole.
        return False

    # Evaluation and generation.

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict; ranks may have different numbers of batches."""
        engine = self.engine
        if engine is None:
            return super().evaluation_loop(*args, **kwargs)
        with engine.averaged(), engine.uneven() as model:
            # bf16_full_eval computes under autocast, and casts no parameters.
            model.__dict__["to"] = MethodType(_stay, model)
            try:
                return super().evaluation_loop(*args, **kwargs)
            finally:
                del model.to

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return the autocast of ``bf16`` and ``fp16``; of the full evaluation outside of train."""
        args, is_evaluation = self.args, not self.is_in_train and self.engine is not None
        if not is_evaluation or not (args.bf16_full_eval or args.fp16_full_eval):
            return self.accelerator.autocast()
        half = torch.bfloat16 if args.bf16_full_eval else torch.float16
        return torch.autocast(args.device.type, half, cache_enabled=False)

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
        engine = self.engine
        try:
            with self.compute_loss_context_manager():
                if engine is not None:
                    with engine.averaged():
                        return engine.generate(*args, **kwargs)
                with torch.no_grad():
                    return self.model.generate(*args, **kwargs)
        finally:
            self.model.train(was_training)

    def gather_model(self) -> Any:
        """Let the model be a plain one with whole values on every rank. All ranks call.

        Returns:
            The model. The next ``train()`` begins with a new state.
        """
        engine = self.engine
        if engine is not None:
            self.accelerator.forget(engine)
        return self.model

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model as ``transformers`` does. All ranks call."""
        engine = self.engine
        if engine is None:
            super().save_model(output_dir, _internal_call)
            return
        output_dir = self.args.output_dir if output_dir is None else output_dir
        with engine.averaged():
            values = engine.state_dict(keep=self.args.should_save)
        self._save(output_dir, state_dict=values)
        # An override may write other values; with an average the files have none of the state's.
        is_noted = is_own(type(self), "_save") or self.accelerator.ema_decay is not None
        if _internal_call and self.args.should_save and is_noted:
            self._noted = output_dir, weights_in(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if (engine := self.engine) is None:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            with answering(engine, state_dict):
                super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.accelerator.without_moments():
            super()._save_optimizer_and_scheduler(output_dir)
        if self.engine is not None:
            folder, weights = self._noted
            extra = note(weights if folder == output_dir else {})
            path = Path(output_dir) / _FOLDER
            self.engine.save(path, extra, step=self.state.global_step, keep=1)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / "optimizer.pt").is_file() and not (folder / _FOLDER).is_dir():
            raise CheckpointError(
                "resume_from_checkpoint names a checkpoint of zfun.interop.transformers.Trainer; "
                f"got {str(folder)!r}, whose optimizer state another Trainer has saved; make the "
                "model with from_pretrained() of this folder, and train without "
                "resume_from_checkpoint"
            )
        # An override reads the values, or writes them after this method.
        if self._has_weights(folder, is_own(type(self), "_load_from_checkpoint")):
            if self.engine is not None:
                # An average is a part of the optimizer's state.
                self._load_state(folder, moments=self.accelerator.ema_decay is not None)
                return
            if self.is_in_train:
                self._waiting = folder
                return
        self._forget_run()
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _has_weights(self, folder: Path, is_own: bool) -> bool:
        """Whether the state in a folder stands for the weights; see [Note: files of weights]."""
        if not (folder / _FOLDER).is_dir():
            return False
        are_same = self._agreed(lambda: are_own(folder, folder / _FOLDER))
        if are_same and is_own:
            return True
        if any(isinstance(x, EmaCallback) for x in self.callback_handler.callbacks):
            got = "an override that loads" if are_same else "other files"
            raise CheckpointError(
                "with EmaCallback the files of weights in a checkpoint have the average, and a "
                f"run goes on from the parameters in the folder zfun; got {got} in "
                f"{str(folder)!r}; remove the override and the files of weights, or make the "
                "model with from_pretrained() of the folder, and train without "
                "resume_from_checkpoint",
                path=str(folder),
            )
        return False

    def _agreed(self, find: Callable[[], bool]) -> bool:
        """Return what the first rank finds, or raise its error on all ranks."""
        group = agreement_group(self._group)
        found, error = attempt(find) if group.rank == 0 else (None, None)
        return agree(group, error, found)[0]

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        found = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # An override of _load_optimizer_and_scheduler() may load nothing.
        if resume_from_checkpoint is not None and self._waiting == Path(resume_from_checkpoint):
            self._load_state(self._waiting, moments=False)
        return found

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.accelerator.without_moments(), moments_beside([self.optimizer]) as beside:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._agreed(lambda: bool(beside)):
            weights = self._waiting == Path(checkpoint)
            self._load_state(checkpoint, weights=weights, moments=True)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        is_own = super()._load_best_model.__module__.startswith("transformers.")
        # An average is a part of the optimizer's state; the moments are those of the last step.
        moments = self.accelerator.ema_decay is not None
        if not (self._has_weights(best, is_own) and self._load_state(best, moments=moments)):
            self._forget_run()
            super()._load_best_model()

    def _load_state(self, checkpoint: Any, *, weights: bool = True, moments: bool) -> bool:
        """Load the state of a checkpoint, or a half of it, if there are an engine and a state."""
        folder = Path(checkpoint) / _FOLDER
        if self.engine is None or not folder.is_dir():
            return False
        load_parts(self.engine, folder, weights=weights, moments=moments)
        self._waiting = None
        return True

    def _forget_run(self) -> None:
        """Make the model whole; as in transformers, the next train() goes on with the moments."""
        if (engine := self.engine) is not None:
            # An average is the run's own.
            keeps_moments = self.accelerator.ema_decay is None
            self.accelerator.forget(engine, keeps_moments=keeps_moments)
        self.model_wrapped = self.model


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` whose training state is sharded over the ranks.

    Args:
        args: as for :class:`Trainer`.
        zero: as for :class:`Trainer`.
        kwargs: as for ``transformers.Seq2SeqTrainer``.
    """


def _stay(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``to`` of a live module; a copy moves."""
    return model if live_of(model) is not None else type(model).to(model, *args, **kwargs)


def _in_a_call(trainer: Trainer, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a loss as one call of the engine, whatever the loss uses."""
    engine = trainer.engine
    return compute(*args, **kwargs) if engine is None else engine.run(compute, *args, **kwargs)
