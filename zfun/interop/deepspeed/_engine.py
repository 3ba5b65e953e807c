"""``DeepSpeedEngine``: the engine of zfun, with the names and the counters of DeepSpeed's."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop.deepspeed import _checkpoint
from zfun.interop.deepspeed._absent import ABSENT, refusal
from zfun.interop.deepspeed._core import made
from zfun.interop.deepspeed._getters import value_of
from zfun.interop.deepspeed._optimizer import EngineOptimizer
from zfun.interop.deepspeed._phases import Phases
from zfun.interop.deepspeed._ranks import local_rank
from zfun.interop.deepspeed._settings import Settings


class DeepSpeedEngine(Phases):
    """The engine that ``initialize`` returns.

    Attributes:
        module: the model, which is live: a call of it, or of a part, is a call of the engine.
        optimizer: the parameter groups, whose ``lr`` counts at the next step, and the moments;
            ``None`` for a model that is not trained.
        lr_scheduler: steps with the engine; ``None`` if there is none.
        training_dataloader: of ``training_data``; ``None`` if there is none.
        global_steps: boundaries so far, skipped steps included.
        global_samples: samples of these steps, over all ranks.
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
    ) -> None:
        super().__init__()
        self.module = module
        self._settings = settings
        self._group = group
        self._core = made(module, settings, group, values or {})
        optimizer = settings.optimizer
        self.optimizer = None if optimizer is None else EngineOptimizer(optimizer, self)
        self.lr_scheduler = settings.scheduler
        self.training_dataloader: DataLoader[Any] | None = None
        self.collate_fn = collate_fn
        self.is_compiled = False
        self.device = device
        self.local_rank = local_rank()
        self.global_rank, self.world_size = group.rank, group.size
        self.dp_world_size = group.size
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._was_applied = self._has_overflow = False
        self._grad_norm: float | None = None
        # The context around backward() in which no step may be taken.
        self._within: str | None = None
        self._boundary: bool | None = None
        # The step at whose end rank 0 got the weights.
        self._consolidated_at: int | None = None
        if settings.recipe.stage == 3 and hasattr(module, "save_pretrained"):
            self._core.wrap("save_pretrained", self._save_pretrained)
        if settings.recipe.stage == 3:
            module.__dict__["ds_external_parameters"] = functools.partial(iter, ())

    def __getattr__(self, name: str) -> Any:
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        settings, module = self.__dict__.get("_settings"), self.__dict__["_modules"].get("module")
        if settings is None or module is None:
            raise AttributeError(name)
        with contextlib.suppress(KeyError):
            value = value_of(name, settings.values, settings.given)
            return lambda: value
        if name in ABSENT["engine"]:
            raise refusal("engine", name, {})
        if not hasattr(module, name):
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

        ``loss.backward()`` gives the same gradients, divided by the number of micro-batches too, to
        all engines whose outputs the loss has; this method to this engine.

        Args:
            loss: a scalar. Gradients are a mean over the micro-batches and the ranks.
            retain_graph: keep the graph for another backward pass.
            scale_wrt_gas: whether the loss is divided by the number of micro-batches.

        Returns:
            The loss, divided if ``scale_wrt_gas``.
        """
        self._check_trained("backward")
        gas = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        self._core.backward(loss, scale=1.0 / gas, retain_graph=retain_graph)
        return loss.detach() / gas

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss whose ``backward()`` is :meth:`backward`, for a run with a loss scale.

        Args:
            loss: a scalar.

        Returns:
            The loss times the loss scale. Only its own method ``backward`` knows the scale: another
            way to gradients is refused.
        """
        self._check_trained("scale")
        if self.cur_scale == 1.0:
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

        scaled: Any = loss * self.cur_scale
        scaled.backward = backward
        return scaled

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the parameters, at the end of the micro-batches of a step; else count.

        Args:
            lr_kwargs: arguments of the scheduler's ``step``.
        """
        self._check_trained("step")
        if self._within is not None:
            raise OptionError(
                f"step() ends the micro-batches of a step; got a call inside {self._within}(); "
                "call step() after the block"
            )
        info = self._core.step(boundary=self.is_gradient_accumulation_boundary())
        self.micro_steps += 1
        self._was_applied = self._has_overflow = False
        if info is None:
            return
        self._grad_norm = float(info.grad_norm)
        self._was_applied, self._has_overflow = not info.skipped, info.skipped
        self.skipped_steps += info.skipped
        if not info.skipped and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        self.global_samples += self.train_batch_size() if self._settings.recipe.batch else 0

    def was_step_applied(self) -> bool:
        """Return whether the last :meth:`step` updated the parameters."""
        return self._was_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next :meth:`step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        if not self._settings.values["managed_gradient_accumulation"]:
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

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

    def state_dict(  # pyrefly: ignore[bad-override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole weights, with ``module.`` before each name; every rank must call."""
        return {f"module.{name}": value for name, value in self.module_state_dict().items()}

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the whole weights by the module's own names; every rank must call."""
        found = self._core.state_dict()
        frozen = {n for n, x in self.module.named_parameters() if not x.requires_grad}
        left_out = frozen if exclude_frozen_parameters else frozenset[str]()
        return {name: value for name, value in found.items() if name not in left_out}

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the whole weights on rank 0, and ``None`` elsewhere; every rank must call."""
        found = self.module_state_dict(exclude_frozen_parameters)
        self._consolidated_at = self.global_steps
        return found if self._group.rank == 0 else None

    def _save_pretrained(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``save_pretrained``, unless rank 0 has the weights, and this rank writes nothing.

        A script passes ``state_dict=accelerator.get_state_dict(engine)``, which is ``None`` on
        this rank, so the method would gather the weights on this rank alone.
        """
        given = inspect.signature(own).bind_partial(*args, **kwargs).arguments
        is_idle = given.get("is_main_process") is False and given.get("state_dict") is None
        if is_idle and self._group.rank != 0 and self._consolidated_at == self.global_steps:
            return None
        return own(*args, **kwargs)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Take whole weights; every rank must call.

        Args:
            state_dict: by the module's own names, such as ``checkpoint["module"]``.
            strict: whether each name of the module must be there.
            custom_load_fn: ``custom_load_fn(src=weights, dst=module)``, which writes to the module.
        """
        weights = state_dict.get("module", state_dict)
        if custom_load_fn is None:
            self._core.replace(weights, strict=strict)
            return
        with torch.no_grad():
            custom_load_fn(src=weights, dst=self.module)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the state, the counters and the scheduler; every rank must call.

        Args:
            save_dir: the directory of all checkpoints.
            tag: the name of this one, the same on every rank; by default ``global_step`` and the
                number.
            client_state: the script's own values; those of rank 0. Numbers, text, lists, dicts and
                small tensors are kept as they are, and others as a pickle.
            save_latest: whether ``latest`` names this checkpoint.
            exclude_frozen_parameters: whether ``load_checkpoint`` leaves the parameters alone that
                are not trained. They are in the checkpoint all the same.

        Returns:
            ``True``.
        """
        return _checkpoint.save(
            self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what :meth:`save_checkpoint` saved, at any stage and number of ranks.

        Args:
            load_dir: the directory of all checkpoints.
            tag: the name of the checkpoint; by default the one that ``latest`` names.
            load_module_strict: whether each name of the module must be there.
            load_optimizer_states: whether to load the optimizer's state; counters and the scheduler
                are loaded without too.
            load_lr_scheduler_states: whether to load the scheduler.
            load_module_only: whether to load the weights only; the client state is returned.
            custom_load_fn: as for :meth:`load_module_state_dict`; without the optimizer's state.

        Returns:
            The path and the client state, or ``(None, None)`` where there is no checkpoint.
        """
        return _checkpoint.load(
            self,
            load_dir,
            tag,
            _checkpoint.CheckpointParts(
                is_strict=load_module_strict,
                optimizer=load_optimizer_states and not load_module_only,
                counters=not load_module_only,
                scheduler=load_lr_scheduler_states and not load_module_only,
                custom=custom_load_fn,
            ),
        )

    def load_universal_checkpoint(self) -> bool:
        """Return ``False``: :meth:`load_checkpoint` takes any number of ranks as it is."""
        return False

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole weights in the dtype of the state as one file; every rank must call.

        Returns:
            ``True``, also where ``stage3_gather_16bit_weights_on_model_save`` is false.
        """
        weights = self.module_state_dict(exclude_frozen_parameters)
        return _checkpoint.write_weights(weights, Path(save_dir) / save_filename, self._group)

    save_fp16_model = save_16bit_model
