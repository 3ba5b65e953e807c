"""``DeepSpeedEngine``: the engine of zfun, with the names and the counters of DeepSpeed's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop.deepspeed import _answers
from zfun.interop.deepspeed._absent import ABSENT, refusal
from zfun.interop.deepspeed._answers import batch_of
from zfun.interop.deepspeed._checkpoint import SavedEngine
from zfun.interop.deepspeed._core import EngineOptimizer, made, offload_of
from zfun.interop.deepspeed._dtypes import set_dtypes
from zfun.interop.deepspeed._ranks import local_rank
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed.runtime import DeepSpeedDataLoader, in_order
from zfun.interop.ds_config import Batch
from zfun.interop.ds_config._optimizers import rates_of
from zfun.recipes import StepInfo

_TIMER_METHODS = ("update_epoch_count", "start", "stop")


class Norm(float):
    """A norm, which scripts ask for ``item()``: DeepSpeed has a tensor at stages 1 to 3."""

    def item(self) -> float:
        return float(self)


class DeepSpeedEngine(SavedEngine):
    """The engine that ``initialize`` returns.

    DeepSpeed's methods without arguments that return a size, a number or a value of the
    configuration, such as ``get_lr()`` and ``zero_optimization_stage()``, are there too.

    Attributes:
        config: the configuration as written; another value changes nothing.
        module: the model, which is live: a call of it, or of a part, is a call of the engine.
        optimizer: the parameter groups, whose ``lr`` counts at the next step, and the moments;
            ``None`` for a model that is not trained.
        lr_scheduler: steps with the engine; ``None`` if there is none.
        training_dataloader: of ``training_data``; ``None`` if there is none.
        data_parallel_group: of ``torch.distributed``, or that of the ``mpu`` or of the pipeline.
        global_steps: boundaries so far, skipped steps included.
        global_samples: samples of these steps, over all ranks; without
            ``managed_gradient_accumulation``, those of the calls of :meth:`backward`.
        micro_steps: calls of :meth:`step` so far.
        skipped_steps: steps whose gradients were not finite.
        loaded_checkpoint_tag: of the last :meth:`load_checkpoint`.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        group: Group,
        *,
        device: torch.device,
        collate_fn: Any = None,
        values: Mapping[str, Any] | None = None,
        loss: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._settings = settings
        self.config = settings.config
        self._group = self._ranks = group
        self.data_parallel_group: Any = group
        set_dtypes(module, settings.values)
        self._core = made(module, settings, group, values or {}, loss)
        optimizer = settings.optimizer
        at_rest = offload_of(module) if settings.recipe.stage == 3 else None
        self.optimizer: Any = at_rest if optimizer is None else EngineOptimizer(optimizer, self)
        self.lr_scheduler = settings.scheduler
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.collate_fn = collate_fn
        self.is_compiled = False
        # Scripts count epochs there; nothing is timed.
        self.tput_timer = SimpleNamespace(**dict.fromkeys(_TIMER_METHODS, lambda *args, **kw: None))
        self.device = device
        self.local_rank = local_rank()
        self.global_rank, self.world_size = group.rank, group.size
        self.dp_world_size = group.size
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._was_applied = self._has_overflow = False
        self._grad_norm: Norm | None = None
        # The context around backward() in which no step may be taken.
        self._within: str | None = None
        # Calls of backward() since the last step.
        self._num_backward = 0
        self._boundary: bool | None = None
        self._consolidated_at = None
        if hasattr(module, "save_pretrained"):
            self._core._live.wrap("save_pretrained", self._save_pretrained)
        if settings.recipe.stage == 3:
            module.__dict__["ds_external_parameters"] = functools.partial(iter, ())

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        module = self.__dict__["_modules"].get("module")
        if module is None or "_settings" not in self.__dict__:
            raise AttributeError(name)
        if name in ABSENT["engine"] or not hasattr(module, name):
            raise refusal("engine", name, dict.fromkeys(dir(type(self))))
        return getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, under autocast where the configuration has ``torch_autocast``."""
        dtype = self._settings.recipe.autocast
        if dtype is None:
            return self.module(*args, **kwargs)
        with torch.autocast(self.device.type, dtype):
            return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute the gradients of a loss of the engine's outputs, and add them up.

        Gradients are a mean over the micro-batches, if ``scale_wrt_gas``, and over the ranks.
        ``loss.backward()`` gives the same gradients to all engines whose outputs the loss has; this
        method to this engine. Returns the loss, divided if ``scale_wrt_gas``.
        """
        self._check_trained("backward")
        self._num_backward += 1
        gas = self._settings.recipe.num_micro_batches if scale_wrt_gas else 1
        self._core.backward(loss, scale=1.0 / gas, retain_graph=retain_graph)
        return loss.detach() / gas

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss whose ``backward()`` is :meth:`backward`, for a run with a loss scale.

        Only its own method ``backward`` knows the scale: another way to gradients is refused.
        """
        self._check_trained("scale")
        if self._core.loss_scale == 1.0:
            return loss

        def backward(
            gradient: Tensor | None = None, retain_graph: bool | None = None, **options: Any
        ) -> None:
            if gradient is not None or any(options.values()):
                raise OptionError(
                    "a scaled loss is a scalar, and takes retain_graph only; got another argument "
                    "of backward(); call engine.backward(loss)"
                )
            self.backward(loss, retain_graph=bool(retain_graph))

        scaled: Any = loss * self._core.loss_scale
        scaled.backward = backward
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update parameters and scheduler at the end of the micro-batches of a step; else count."""
        self._check_trained("step")
        if self._within is not None:
            raise OptionError(
                f"step() ends the micro-batches of a step; got a call inside {self._within}(); "
                "call step() after the block"
            )
        with self._inside("step"):
            info = self._core.step(boundary=self.is_gradient_accumulation_boundary())
            self.micro_steps += 1
            self._was_applied = False
            if info is not None:
                self._count(info, lr_kwargs)

    def _count(self, info: StepInfo, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a step, and step the scheduler."""
        self._grad_norm = Norm(info.grad_norm)
        self._was_applied, self._has_overflow = not info.skipped, bool(info.skipped)
        self.skipped_steps += self._has_overflow
        if not info.skipped and self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            except TypeError:
                # As in DeepSpeed, for a scheduler whose step() takes a number, as Megatron's.
                self.lr_scheduler.step(self.train_batch_size())
        self.global_steps += 1
        batch = self._settings.recipe.batch
        if batch is not None:
            is_whole = self.managed_gradient_accumulation()
            micros = batch.accumulation if is_whole else self._num_backward
            self.global_samples += batch.train // batch.accumulation * micros
        self._num_backward = 0

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` updated the parameters."""
        return self._was_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next :meth:`step` updates the parameters.

        Without ``managed_gradient_accumulation`` each one does, and the answer is for code that a
        step runs.
        """
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return self._within == "step"
        return (self.micro_steps + 1) % self._settings.recipe.num_micro_batches == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next calls of :meth:`step` update the parameters."""
        self._boundary = is_boundary

    gradient_accumulation_boundary = is_gradient_accumulation_boundary

    @contextlib.contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        if self._within is not None:
            raise OptionError(
                f"{name}() stands alone; got a block inside {self._within}(); leave one of the "
                "two out"
            )
        self._within = name
        try:
            yield
        finally:
            self._within = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for calls of :meth:`backward` without :meth:`step`, at each stage."""
        return self._inside("no_sync")

    def coalesce_grad_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for several calls of :meth:`backward` before one :meth:`step`.

        The numbers are those without the context. Each backward pass sends its own buckets.
        """
        return self._inside("coalesce_grad_reduction")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were added up."""
        self._core.zero_grad()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Switch to training, as ``nn.Module.train`` does."""
        super().train(mode)
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``module.generate`` on the parameters of the state, without gradients."""
        return self._core.generate(*args, **kwargs)

    def destroy(self) -> None:
        """Do nothing: the state is freed with the engine."""

    def empty_partition_cache(self) -> None:
        """Do nothing: no gathered parameter outlives a call."""

    # Between steps: compilation, loaders, places and sizes.

    def _check_trained(self, method: str) -> None:
        if not self._core.has_module:
            raise OptionError(
                f"{method}() trains the model of the engine; got an engine whose model a later "
                "initialize() has taken; use the engine that the later call returned"
            )
        if self._settings.optimizer is None:
            raise OptionError(
                f"{method}() trains a model; got an engine of initialize() without an optimizer; "
                "pass optimizer=, or write a section optimizer into the configuration"
            )

    def compile(  # pyrefly: ignore[bad-override]
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the blocks of the model with ``torch.compile``.

        Raises:
            OptionError: ``schedule`` or ``compiled_autograd_enabled``: DeepCompile is not there.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise OptionError(
                "engine.compile() compiles blocks with torch.compile; got schedule or "
                "compiled_autograd_enabled; leave them out: collectives overlap without"
            )
        if not self.is_compiled:
            self._core.compile(**{**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return the loader of this rank's share of a dataset.

        The order is random, unless the ``route`` is ``"eval"`` or ``"predict"``. Sizes and
        ``collate_fn`` are by default those of ``initialize``, a ``data_sampler`` gives the samples
        of this rank, and no processes read.

        Raises:
            OptionError: another route than ``"train"``, ``"eval"``, ``"predict"`` or ``"encode"``.
        """
        ranks = (self._group.size, self._group.rank)
        ordered = in_order(route, dataset, *ranks)
        return DeepSpeedDataLoader(
            dataset,
            batch_of(self).micro if batch_size is None else batch_size,
            pin_memory,
            0,
            self.tput_timer if route == "train" else None,
            self.collate_fn if collate_fn is None else collate_fn,
            num_local_io_workers,
            ordered if data_sampler is None else data_sampler,
            *ranks,
            self._settings.values["dataloader_drop_last"],
        )

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move parts of the state to host memory, until :meth:`reload_states`.

        A call needs the parameters, and a step needs the optimizer's state too. Of ``include``,
        ``hp_params`` and ``optim_states`` move together; gradients stay where they are.

        Raises:
            OptionError: another device than ``"cpu"`` or ``"none"``, or no optimizer.
        """
        self._check_trained("offload_states")
        if device == "none":
            return
        if device != "cpu":
            raise OptionError(
                f"offload_states() moves to host memory; got device={device!r}; pass 'cpu', or "
                "write offload_optimizer with device 'nvme' into the configuration"
            )
        chosen = lambda *names: include is None or any(name in include for name in names)
        optimizer = chosen("hp_params", "optim_states")
        self._core.offload(params=chosen("lp_params"), optimizer=optimizer, pin=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state back that :meth:`offload_states` has moved."""
        self._core.reload()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in () if self.optimizer is None else self.optimizer.param_groups:
            group |= dict.fromkeys(rates_of(group), lr)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take another number of micro-batches for each step, for a size over all ranks.

        Raises:
            OptionError: no whole number of micro-batches.
        """
        batch = batch_of(self)
        accumulation, rest = divmod(train_batch_size, batch.micro * batch.world_size)
        if rest or accumulation < 1:
            raise OptionError(
                "a step has a whole number of micro-batches on every rank; got train_batch_size "
                f"{train_batch_size} for {batch.world_size} ranks with {batch.micro} samples each; "
                f"pass a multiple of {batch.micro * batch.world_size}"
            )
        self._resize(batch._replace(train=train_batch_size, accumulation=accumulation))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Take another number of samples for each micro-batch of a rank from now on."""
        batch = batch_of(self)
        train = micro_batch_size * batch.accumulation * batch.world_size
        self._resize(batch._replace(train=train, micro=micro_batch_size))

    def _resize(self, batch: Batch) -> None:
        recipe = replace(self._settings.recipe, batch=batch, num_micro_batches=batch.accumulation)
        self._settings = replace(self._settings, recipe=recipe)
        self._core.accumulate = batch.accumulation
        self._core.plain_scale = 1.0 / batch.accumulation


_answers.write(DeepSpeedEngine)
