"""``accelerate.Accelerator`` with sharded training state; needs ``pip install zfun[transformers]``.

A model and the optimizer of its parameters become one :class:`zfun.interop.Engine`. The model stays
the user's own, and the optimizer keeps its parameter groups; ``optimizer.step()`` is the step of
the engine. :mod:`zfun.interop.transformers` trains through this class too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import accelerate
import torch
from accelerate.utils import DynamoBackend, convert_outputs_to_fp32
from torch import Tensor, nn

from zfun import optim
from zfun.collectives import Group, process_group, sum_group
from zfun.errors import OptionError
from zfun.interop._attached import (
    StepEngine,
    check_whole,
    clip_together,
    engines_of,
    ids_in,
    layers_of,
    leaves_of_each,
)
from zfun.interop._named import apart, gathered_once
from zfun.interop._refused import check_options, refuse_alone
from zfun.interop._resumed import load_parts, moments_beside, own_values_of
from zfun.interop._together import begin
from zfun.interop._wrapped import attach, detach, engine_in, groups_of, release, set_free
from zfun.interop.engine import UNBOUNDED, Engine, compile_blocks
from zfun.interop.engine._running import run_backward
from zfun.recipes import Precision

_FOLDER = "zfun"
_HALF = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` whose training state is sharded over the ranks.

    All arguments and methods are those of ``accelerate.Accelerator``. ``mixed_precision`` computes
    under autocast, as in ``accelerate``; a ``precision`` in ``zero=`` replaces it.

    Args:
        args: as for ``accelerate.Accelerator``.
        zero: a stage from 0 to 3, or a dict of ``stage`` and other options of :func:`zfun.zero`,
            such as ``offload``, ``precision`` and ``group``.
        kwargs: as for ``accelerate.Accelerator``.

    Raises:
        OptionError: an option that does not exist, or a plugin of ``accelerate`` that shards too.

    Example:
        >>> accelerator = Accelerator(cpu=True, zero=2)
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        >>> accelerator.backward(model(torch.ones(1, 2)).sum())
        >>> norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> round(float(norm), 4)
        1.7321
    """

    def __init__(self, *args: Any, zero: int | Mapping[str, Any] = 2, **kwargs: Any) -> None:
        wanted = kwargs.get("mixed_precision")
        # accelerate computes in float16 on GPUs alone.
        is_cpu_half = wanted == "fp16" and (kwargs.get("cpu") or not torch.cuda.is_available())
        super().__init__(*args, **{**kwargs, **({"mixed_precision": "no"} if is_cpu_half else {})})
        self._take(zero, "fp16" if is_cpu_half else self.mixed_precision)

    @classmethod
    def of(
        cls, accelerator: Any, zero: int | Mapping[str, Any], mixed_precision: str = "no"
    ) -> Accelerator:
        """Make this class of an ``accelerate.Accelerator``, which stays the same object.

        Args:
            accelerator: of ``accelerate``; nothing was prepared yet.
            zero: as for the class.
            mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        """
        accelerator.__class__ = cls
        accelerator._take(zero, mixed_precision)
        return accelerator

    def _take(self, zero: int | Mapping[str, Any], mixed_precision: str) -> None:
        check_options(self)
        if mixed_precision not in _HALF:
            raise OptionError(
                f"mixed_precision is one of {', '.join(map(repr, _HALF))} under zfun; got "
                f"{mixed_precision!r}; pass 'bf16'"
            )
        options = dict(zero) if isinstance(zero, Mapping) else {"stage": zero}
        self._half = _HALF[mixed_precision] if options.get("precision") is None else None
        scaler = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
        if self._half is torch.float16 and scaler.pop("enabled", True):
            options["precision"] = Precision(loss_scale=optim.grad_scaler(**scaler))
        self.scaler: Any = None
        self.clips_by_default: float | None = UNBOUNDED
        self.ema_decay: float | optim.Schedule | None = None
        self._zero_options = options
        self._ranks: Group | None = options.pop("group", None)
        self._has_moments = True
        self._waiting: list[nn.Module] = []
        # The hooks that refuse gradients of models that wait.
        self._guards: list[Any] = []
        # Each engine with its optimizer and models, which free_memory() does not drop.
        self._engines: dict[StepEngine, tuple[Any, list[nn.Module]]] = {}

    # Models and optimizers become engines.

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Place a model, and set autocast; it is sharded when its optimizer is prepared too."""
        if self.engine_of(model) is not None:
            return model
        release(model, self._engines)  # by engines of an earlier run
        plugin, had_amp = self.state.dynamo_plugin, self.native_amp
        backend, plugin.backend, self.native_amp = plugin.backend, DynamoBackend.NO, False
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        try:
            if is_new and backend != DynamoBackend.NO:
                compile_blocks(model, **{**plugin.to_kwargs(), "backend": backend.value.lower()})
            if is_new and self._half is not None:
                # unwrap_model(keep_fp32_wrapper=False) of accelerate asks for it.
                model._original_forward = model.forward
                model.forward = self._half_forward(model.forward)
            model = super().prepare_model(model, device_placement, evaluation_mode=True)
        finally:
            plugin.backend, self.native_amp = backend, had_amp
        if self.num_processes > 1 and not (evaluation_mode or hasattr(model, "module")):
            vars(model)["module"] = model  # as DDP has it; no part of the model
        if not evaluation_mode:
            self._waiting.append(model)
            self._pair()
            self._guard()
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Take an optimizer, whose parameter groups stay the user's."""
        is_wrapped = getattr(optimizer, "_is_accelerate_prepared", False)
        inner = optimizer.optimizer if is_wrapped else optimizer
        if engine_in(inner) not in self._engines:
            set_free(inner)  # from an earlier run, or another optimizer of its parameters
        found = super().prepare_optimizer(optimizer, device_placement=device_placement)
        self._pair()
        self._guard()
        return found

    def _guard(self) -> None:
        """Refuse gradients of the models that wait for an optimizer, which no engine sums."""
        self._unguard()
        self._guards = [
            param.register_post_accumulate_grad_hook(refuse_alone)
            for model in self._waiting
            for param in model.parameters()
            # One that another model shares may have an engine.
            if param.requires_grad and param.is_leaf and type(param) is nn.Parameter
        ]

    def _unguard(self) -> None:
        for hook in self._guards:
            hook.remove()
        self._guards.clear()

    def _pair(self) -> None:
        """Make engines of the models whose optimizers are known."""
        self._unguard()
        for optimizer in self._optimizers:
            engine = engine_in(optimizer.optimizer)
            if engine is not None and not self._lacks_model(engine):
                continue
            ids = ids_in(optimizer)
            known = [*self._waiting, *(x for _, its in self._engines.values() for x in its)]
            models = [x for x in known if ids.intersection(map(id, x.parameters()))]
            if models := models or self._waiting[:1]:
                self._join(models, optimizer)

    def _lacks_model(self, engine: StepEngine) -> bool:
        """Whether an engine has parameters of a model that has come after the optimizer."""
        extra = set(map(id, engine.extra.values())) if engine in self._engines else set[int]()
        return any(id(x) in extra for model in self._waiting for x in model.parameters())

    def _join(self, models: list[nn.Module], optimizer: Any) -> None:
        """Make engines of models, which keep those other optimizers that share no parameters."""
        ids, others = ids_in(optimizer), list[Any]()
        for engine, (other, its) in [*self._engines.items()]:
            if layers_of(its) & layers_of(models):
                engine.hand_on()
                del self._engines[engine]
                models += its
                is_same = other.optimizer is optimizer.optimizer
                # Of two optimizers of one parameter the loop goes on with the new one, and steps of
                # the old one are refused.
                is_kept = not is_same and not ids & ids_in(other)
                others += [other] if is_kept else []
                if is_same or is_kept:
                    set_free(other.optimizer)
        models = [*{id(x): x for x in models}.values()]
        self._waiting = [x for x in self._waiting if all(x is not model for model in models)]
        self._make(models, [*others, optimizer])

    def forget(self, engine: Any, *, keeps_moments: bool = False) -> None:
        """Let the model of an engine be a plain one. All ranks call.

        The next prepare() brings the optimizer back, with its model. Until then it is a plain one
        without moments, or keeps them as they are, sharded.
        """
        optimizer, _ = self._engines.pop(engine)
        if keeps_moments:
            engine.free()
        else:
            engine.close()
            detach(optimizer.optimizer)
        self._optimizers = [x for x in self._optimizers if x is not optimizer]

    def _make(self, models: list[nn.Module], optimizers: Sequence[Any]) -> None:
        """Make an engine of models and their optimizer, or one for each of several."""
        if self._ranks is None:
            self._ranks = process_group()
        if sum_group(self._ranks).size != self.num_processes:
            raise OptionError(
                "the ranks of the group are the processes of the Accelerator; got a group of "
                f"{sum_group(self._ranks).size} for {self.num_processes} processes; launch the "
                "script with torchrun, and make the group after the Accelerator"
            )
        whole = models[0] if len(models) == 1 else nn.ModuleList(models)
        options: dict[str, Any] = {
            "zero": self._zero_options,
            "group": self._ranks,
            "clip_norm": self.clips_by_default,
            "init": "broadcast",
        }
        groups = [
            groups_of(optimizer, whole, own, self.ema_decay)
            for optimizer, own in zip(optimizers, leaves_of_each(whole, optimizers), strict=True)
        ]
        engines = engines_of(whole, groups, StepEngine, **options)
        for engine, optimizer, its in zip(engines, optimizers, groups, strict=True):
            attach(optimizer, engine, its, lambda: self._has_moments)
            self._engines[engine] = optimizer, models

    def engine_of(self, model: Any = None) -> Engine | None:
        """Return the engine of a model, of the first one by default; ``None`` if there is none."""
        for engine, (_, models) in self._engines.items():
            if model is None or any(x is model for x in (engine.module, *models)):
                return engine
        return None

    def free_memory(self, *objects: Any) -> Any:
        """Forget prepared objects; the engine of a model stays with the model."""
        self._waiting.clear()
        self._unguard()
        return super().free_memory(*objects)

    # A step.

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward; gradients are means over the ranks, and sums over micro-batches."""
        if len(self._engines) > 1 and any(x.state.loss_scale is not None for x in self._engines):
            raise OptionError(
                "with a loss scale, an Accelerator has one optimizer; got "
                f"{len(self._engines)}; pass mixed_precision='bf16'"
            )
        loss = loss / self.gradient_accumulation_steps
        kwargs.pop("learning_rate", None)
        if len(self._engines) == 1 and not kwargs.keys() - {"inputs", "retain_graph"}:
            next(iter(self._engines)).backward(loss, scale=1.0, **kwargs)
        else:
            run_backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Do nothing: each backward pass sums over the ranks, so that all stages have one order."""
        yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Do nothing, as ``accelerate`` on CPUs; on GPUs, where it joins, refuse uneven inputs."""
        if self.multi_device and not (self.even_batches and even_batches is not False):
            raise OptionError(
                "each step needs all ranks, so they train on equally many batches; got "
                "join_uneven_inputs() with even_batches=False; leave even_batches out, here and in "
                "DataLoaderConfiguration, or evaluate in uneven() of accelerator.engine_of(model)"
            )
        with contextlib.nullcontext() if self.multi_device else super().join_uneven_inputs(()):
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip the gradients so far, and return their norm over all ranks before.

        Args:
            parameters: all of a model.
            max_norm: the bound; infinity asks for the norm alone, and 0 makes them zero.
            norm_type: 2.

        Raises:
            OptionError: a part of the parameters, or those of two models; another ``norm_type``;
                or, with a loss scale, parameters without an engine.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engines = self._engines_to_clip(chosen, "clip_grad_norm_()")
        if not engines:
            return super().clip_grad_norm_(chosen, max_norm, norm_type)
        if norm_type != 2:
            raise OptionError(
                f"gradients are clipped by their L2 norm; got norm_type={norm_type}; leave "
                "norm_type out"
            )
        self.unscale_gradients()
        return clip_together(engines, max_norm).float()

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients so far, as :meth:`clip_grad_norm_` clips the norm."""
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engines = self._engines_to_clip(chosen, "clip_grad_value_()")
        if not engines:
            super().clip_grad_value_(chosen, clip_value)
        self.unscale_gradients()
        for engine in engines:
            engine.clip_value(clip_value)

    def _engines_to_clip(self, chosen: Sequence[Tensor], name: str) -> list[StepEngine]:
        """Return the engines that have these parameters."""
        ids = set(map(id, chosen))
        if found := [x for x in self._engines if ids.intersection(map(id, x.module.parameters()))]:
            check_whole(found, chosen, name)
            return found
        scale = max((engine.loss_scale for engine in self._engines), default=1.0)
        if scale != 1.0:
            raise OptionError(
                f"an engine takes the loss scale, here {scale}, out of its own gradients; got "
                f"{name} of parameters without an engine; pass the module and its optimizer to "
                "prepare(), or use mixed_precision='bf16'"
            )
        return []

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Take the loss scale out of the gradients, before code reads them. All ranks call."""
        for engine in self._engines:
            if engine.loss_scale != 1.0:
                engine.unscale()

    def _half_forward(self, forward: Any) -> Any:
        """Return a forward under autocast, which a copy of the model binds to the copy."""
        own = getattr(forward, "__func__", forward)
        half = functools.wraps(own)(convert_outputs_to_fp32(self._autocast()(own)))
        return half if own is forward else MethodType(half, forward.__self__)

    def _autocast(self, handler: Any = None) -> Any:
        handler = self.autocast_handler if handler is None else handler
        is_on = handler is None or handler.enabled
        # The cache of casts would keep gathered parameters alive.
        return torch.autocast(self.device.type, self._half, is_on, cache_enabled=False)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Compute in the dtype of ``mixed_precision``, unless a handler is disabled."""
        with contextlib.nullcontext() if self._half is None else self._autocast(autocast_handler):
            yield

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; a rank that is elsewhere is an error."""
        self._begin("wait_for_everyone()")
        super().wait_for_everyone()

    def _begin(self, name: str) -> None:
        if self._engines and self._ranks is not None:
            begin(f"{name} of an Accelerator", self._ranks)

    # Checkpoints.

    @contextlib.contextmanager
    def without_moments(self) -> Iterator[None]:
        """Let states of optimizers have the groups alone, as files beside a sharded state."""
        self._has_moments = False
        try:
            yield
        finally:
            self._has_moments = True

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Return whole values, none a view of a bucket. All ranks call.

        As those of ``accelerate``, they may be the values that the model trains on; clone them to
        keep them.
        """
        own = [x for x, (_, its) in self._engines.items() if any(y is model for y in its)]
        with gathered_once(own, "get_state_dict() or save_model() of an Accelerator"):
            return apart(super().get_state_dict(model, unwrap))

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save as ``accelerate`` does, and the sharded state beside. All ranks call.

        Hooks may read a model on one rank alone.
        """
        self._begin("save_state()")
        with self.without_moments(), gathered_once(self._engines):
            found = super().save_state(output_dir, *args, **kwargs)
        for index, engine in enumerate(self._engines):
            engine.save(Path(found) / f"{_FOLDER}_{index}", keep=1)
        return found

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` saved, at any stage and number of ranks. All ranks call."""
        self._begin("load_state()")
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            folder = Path(self.project_dir) / "checkpoints"
            input_dir = str(max(folder.glob("checkpoint_*"), key=lambda x: int(x.name[11:])))
        models = {id(x): x for x in self._models if self.engine_of(x) is not None}.values()
        # Hooks may read on one rank alone; without any, no rank needs all values at a time.
        own = self._engines if self._load_model_state_pre_hook else ()
        with contextlib.ExitStack() as stack:
            stack.enter_context(gathered_once(own))
            stack.enter_context(own_values_of(models))
            stack.enter_context(self.without_moments())
            new = stack.enter_context(moments_beside(self._optimizers))
            super().load_state(input_dir, *args, **kwargs)
        # The models have the values of their files, or what hooks have loaded in place of these.
        for index, (engine, (optimizer, _)) in enumerate(self._engines.items()):
            path = Path(input_dir) / f"{_FOLDER}_{index}"
            if not path.is_dir():
                raise OptionError(
                    "load_state() takes a folder of zfun.interop.accelerate.Accelerator; got "
                    f"{str(input_dir)!r}, which has no {path.name}; load the weights into the "
                    "model before prepare(), and begin with a new optimizer"
                )
            if optimizer.optimizer in new:
                load_parts(engine, path, weights=False, moments=True)
