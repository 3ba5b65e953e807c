"""``DeepSpeedEngine``: the engine of zfun, with the names and the counters of DeepSpeed's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop.deepspeed import _checkpoint
from zfun.interop.deepspeed._absent import ABSENT, refusal
from zfun.interop.deepspeed._core import attach_optimizer, made
from zfun.interop.deepspeed._getters import value_of
from zfun.interop.deepspeed._numbers import Numbers
from zfun.interop.deepspeed._ranks import local_rank
from zfun.interop.deepspeed._settings import Settings

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(Numbers):
    """The engine that ``initialize`` returns.

    Attributes:
        module: the model. At stages 0 to 2 its parameters are the values of the state; at stage 3
            ``zero.GatheredParameters`` shows values.
        optimizer: the parameter groups, whose ``lr`` counts at the next step.
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
        dataloader: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._settings = settings
        self._group = group
        self._core = made(module, settings, group)
        self.optimizer = settings.optimizer
        if self.optimizer is not None:
            attach_optimizer(self.optimizer, self._core)
        self.lr_scheduler = settings.scheduler
        self.training_dataloader = dataloader
        self.device = device
        self.local_rank = local_rank()
        self.global_rank, self.world_size = group.rank, group.size
        self.dp_world_size = group.size
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._was_applied = False
        self._grad_norm: float | None = None
        self._in_no_sync = False
        self._boundary: bool | None = None

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Raise :class:`OptionError`, which says what to call instead of torch's method."""
        raise refusal("engine", "compile", {})

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
        """Call the model on the parameters of the state."""
        return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute the gradients of a loss of the engine's outputs, and add them up.

        Args:
            loss: a scalar. Gradients are a mean over the micro-batches and the ranks.
            retain_graph: keep the graph for another backward pass.
            scale_wrt_gas: whether the loss is divided by the number of micro-batches.

        Returns:
            The loss, divided if ``scale_wrt_gas``.
        """
        gas = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        self._core.backward(loss, scale=1.0 / gas, retain_graph=retain_graph)
        return loss.detach() / gas

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the parameters, at the end of the micro-batches of a step; else count.

        Args:
            lr_kwargs: arguments of the scheduler's ``step``.
        """
        if self.optimizer is None:
            raise OptionError(
                "step() takes the optimizer of initialize(); got an engine without one; pass "
                "optimizer=, such as torch.optim.AdamW(model.parameters(), lr=3e-4), or write the "
                "section optimizer"
            )
        if self._in_no_sync:
            raise OptionError(
                "step() ends the micro-batches of a step; got a call inside no_sync(); call "
                "step() after the block"
            )
        info = self._core.step(boundary=self.is_gradient_accumulation_boundary())
        self.micro_steps += 1
        self._was_applied = False
        if info is None:
            return
        self._grad_norm = float(info.grad_norm)
        self._was_applied = not info.skipped
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
    def no_sync(self) -> Iterator[None]:
        """Return a context in which no :meth:`backward` ends the micro-batches of a step."""
        self._in_no_sync = True
        try:
            with self._core.no_sync():
                yield
        finally:
            self._in_no_sync = False

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

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take whole weights; every rank must call.

        Args:
            state_dict: by the module's own names, such as ``checkpoint["module"]``.
            strict: whether each name of the module must be there.
        """
        self._core.replace(state_dict.get("module", state_dict), strict=strict)

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
            tag: the name of this one; by default ``global_step`` and the number.
            client_state: the script's own numbers, text, lists, dicts and small tensors.
            save_latest: whether ``latest`` names this checkpoint.
            exclude_frozen_parameters: only ``False``.

        Returns:
            ``True``.
        """
        if exclude_frozen_parameters:
            raise OptionError(
                "save_checkpoint() saves all parameters; got exclude_frozen_parameters=True; "
                "leave the argument out, and pass it to zero_to_fp32's functions"
            )
        return _checkpoint.save(self, save_dir, tag, client_state, save_latest)

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
            load_optimizer_states: whether to load the optimizer's state and the learning rates.
            load_lr_scheduler_states: whether to load the scheduler.
            load_module_only: whether to load the weights only; the client state is returned too.
            custom_load_fn: only ``None``.

        Returns:
            The path and the client state, or ``(None, None)`` where there is no checkpoint.
        """
        if custom_load_fn is not None:
            raise OptionError(
                "load_checkpoint() loads weights by their names; got custom_load_fn; leave the "
                "argument out, and call engine.load_module_state_dict() with your weights"
            )
        return _checkpoint.load(
            self,
            load_dir,
            tag,
            load_module_strict,
            has_optimizer=load_optimizer_states and not load_module_only,
            has_counters=not load_module_only,
            has_scheduler=load_lr_scheduler_states and not load_module_only,
        )

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
