"""The strategy for Lightning Fabric: a model and the optimizers of its parameters are engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from zfun import optim
from zfun.collectives import process_group
from zfun.errors import OptionError
from zfun.interop._attached import StepEngine, check_last, engines_of, ids_in, layers_of
from zfun.interop._configured import zero_options
from zfun.interop._together import begin
from zfun.interop.ds_config import Recipe
from zfun.interop.engine import UNBOUNDED
from zfun.interop.engine._running import run_backward
from zfun.interop.lightning import _promised, _runs
from zfun.interop.lightning._options import divided, given_config, recipe_of
from zfun.interop.lightning._plugins import Dtypes, precision_of


class ZfunFabricStrategy(DDPStrategy):
    """Train the models of Lightning Fabric with sharded state.

    ``Fabric(strategy="zfun_stage_3")`` makes this strategy, as do the other names of
    :class:`ZfunStrategy`. A model stays your own, and live. ``fabric.save`` writes a file that
    plain Fabric reads.

    Args:
        accelerator: Fabric's.
        config: a configuration of DeepSpeed, as for :class:`ZfunStrategy`.
        options: as for :class:`ZfunStrategy`; also Fabric's ``checkpoint_io`` and ``precision``,
            the plugin whose dtypes are those of the state.

    Attributes:
        engines: one for each optimizer that was set up, and for each model without one.

    Raises:
        OptionError: an argument that the strategy does not have.
    """

    def __init__(
        self,
        accelerator: Any = None,
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        **options: Any,
    ) -> None:
        own, self._options = divided(options, "precision", "checkpoint_io")
        self._config = given_config(config)
        self.engines: list[FabricEngine] = []
        super().__init__(accelerator=accelerator, **own)
        self._backward_sync_control = _EachBackward()

    @property
    def precision(self) -> Dtypes:
        """The dtypes."""
        plugin = self._precision
        return plugin if isinstance(plugin, Dtypes) else Unscaled("32-true")

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None and not isinstance(precision, Dtypes):
            name = precision_of(precision)
            precision = Scaled(name) if name.startswith("16") else Unscaled(name)
        if isinstance(precision, Scaled):
            precision.engines = self.engines
        self._precision = precision

    def recipe(self) -> Recipe:
        """Return what becomes of each option; ``print(strategy.recipe())``."""
        recipe = recipe_of(
            self._config,
            self._options,
            precision=self.precision.precision,
            world_size=self.world_size,
            accumulate=1,
            clip_norm=None,
        )
        if recipe.rule is not None or recipe.scheduler is not None:
            raise OptionError(
                "fabric.setup() takes the optimizer; got one, or a scheduler, in the configuration "
                "too; remove it there"
            )
        return recipe

    def __deepcopy__(self, memo: dict[int, Any]) -> ZfunFabricStrategy:
        """Be the strategy of a copied model too, whose calls are plain ones."""
        return self

    # Models and optimizers become engines.

    def module_to_device(self, module: nn.Module) -> None:
        # The values of a model on meta are made for the state.
        if not _promised.is_on_meta(module):
            super().module_to_device(module)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Make models without values on ``meta`` where parameters are sharded."""
        if empty_init and self.recipe().stage == 3:
            return _promised.promising()
        return super().module_init_context(empty_init)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Make a model live, with an engine for each optimizer."""
        self._make([module], optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Make a model live, for an evaluation or an optimizer that is set up later."""
        self._make([module], [])
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Train the models of an optimizer, which were set up before."""
        ids, known = ids_in(optimizer), [x for engine in self.engines for x in engine.models]
        models = [x for x in known if ids.intersection(map(id, x.parameters()))]
        if not models:
            raise OptionError(
                "an optimizer is set up after its models; got "
                f"{type(optimizer).__name__} of no model; pass a model with its optimizers to "
                "fabric.setup(model, optimizer, ...)"
            )
        self._make(models, [optimizer])
        return optimizer

    def _make(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Make engines of models, which keep those other optimizers that share no parameters."""
        ids, kept = set[int]().union(*map(ids_in, optimizers)), list[Any]()
        for one in optimizers:
            if (engine := vars(one).get("zfun_engine")) is not None and engine not in self.engines:
                engine.hand_on()
                engine.give_back()
                detach(one)
        for engine in [x for x in self.engines if layers_of(x.models) & layers_of(models)]:
            models, other = [*models, *engine.models], engine.torch_optimizer
            is_kept = other is not None and not ids & ids_in(other)
            kept += [other] if is_kept else []
            self._take_apart(engine, is_kept=is_kept or any(other is x for x in optimizers))
        models, optimizers = [*{id(x): x for x in models}.values()], [*kept, *optimizers]
        module = models[0] if len(models) == 1 else nn.ModuleList(models)
        _promised.fulfil(module)
        if not _promised.is_on_meta(module):
            _runs.take_values_of_rank_0(module, self.world_size)
        self.precision.device = self.root_device
        recipe, seed = self.recipe(), self.broadcast(torch.initial_seed())
        values = _promised.values_of(module, self.root_device, seed)
        options: dict[str, Any] = {"zero": zero_options(recipe, process_group()), "values": values}
        groups = _runs.groups_of(optimizers, module)
        bound = recipe.max_grad_norm or UNBOUNDED
        if groups:
            engines = engines_of(module, groups, FabricEngine, clip_norm=bound, **options)
        else:
            engines = [FabricEngine(module, optim.sgd(0.0), **options)]
        self.engines += engines
        for engine in engines:
            engine.models = models
        for one, engine in zip(groups, engines, strict=False):
            attach(one.optimizer, engine)

    def _take_apart(self, engine: FabricEngine, *, is_kept: bool) -> None:
        """Close an engine, whose optimizer another engine takes with its moments if it is kept."""
        engine.hand_on()
        self.engines.remove(engine)
        if is_kept:
            engine.give_back()
            detach(engine.torch_optimizer)

    # A step.

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients so far, and return their norm over all ranks before."""
        if norm_type != 2:
            raise OptionError(
                f"gradients are clipped by their L2 norm; got norm_type={norm_type}; leave "
                "norm_type out"
            )
        engine: FabricEngine = optimizer.zfun_engine  # pyrefly: ignore[missing-attribute]
        # As torch, which leaves the gradients as they are where it raises.
        if error_if_nonfinite and not (norm := engine.norm()).isfinite():
            raise RuntimeError(
                f"The total norm of gradients is {float(norm)}, so it cannot be clipped; pass "
                "error_if_nonfinite=False"
            )
        self.precision.unscale_gradients(optimizer)
        dtype = optimizer.param_groups[0]["params"][0].dtype
        return engine.clip(max_norm).to(torch.promote_types(dtype, torch.float32))

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip each element of the gradients so far."""
        self.precision.unscale_gradients(optimizer)
        optimizer.zfun_engine.clip_value(clip_val)  # pyrefly: ignore[missing-attribute]

    # Calls of all ranks.

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; a rank that is elsewhere is an error."""
        self._begin("barrier()")
        super().barrier(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a file as plain Fabric does. All ranks call."""
        self._begin("save()")
        super().save_checkpoint(*args, **kwargs)

    def _begin(self, name: str) -> None:
        if self.engines:
            begin(f"{name} of Fabric", self.engines[0].state.params.group)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return whole values, with those of master weights. All ranks call."""
        return _runs.master_values(module.state_dict(keep_vars=True), self.engines)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Take whole values, also into master weights. All ranks call."""
        _runs.load_values(module, self.engines, state_dict, {}, strict=strict)

    register_strategies = classmethod(_runs.register_names)


class _EachBackward(_BackwardSyncControl):
    """Sums over the ranks in each backward pass, so that all stages add in one order."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


class Unscaled(Dtypes):
    """The dtypes of a run without a loss scale."""

    # By this mark loss.backward() stays right for Fabric too.
    @functools.wraps(Precision.backward)
    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward for all engines whose outputs the tensor has."""
        run_backward(tensor, *args, **kwargs)


class Scaled(Dtypes):
    """The dtypes of 16 bits, for which the engine scales the loss."""

    engines: Sequence[FabricEngine] = ()

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Take the loss scale out of the gradients, before code reads them."""
        optimizer.zfun_engine.unscale()  # pyrefly: ignore[missing-attribute]

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward for one engine, that of the model if there are several."""
        found = [x for x in self.engines if x.torch_optimizer is not None]
        if model is not None:
            found = [x for x in found if model in x.module.modules()]
        if len(found) != 1:
            raise OptionError(
                "with a loss scale, backward is that of one model with one optimizer; got "
                f"{len(found)}; pass model= to fabric.backward() where each model has one, or use "
                "precision='bf16-mixed'"
            )
        found[0].backward(tensor, *args, scale=1.0, **kwargs)


class FabricEngine(StepEngine):
    """An engine of Fabric.

    Attributes:
        models: those that Fabric has set up, of which the engine has parameters.
        torch_optimizer: whose steps are those of the engine, if there is one.
    """

    models: Sequence[nn.Module] = ()
    torch_optimizer: Any = None
    # Fabric compiles models as a whole; blocks are compiled inside of the call.
    run = torch.compiler.disable(StepEngine.run)


class _Stepped:
    """The methods of an optimizer whose steps are those of an engine."""

    zfun_engine: FabricEngine

    def _own_step(self, closure: Any = None) -> Any:
        check_last(self.zfun_engine)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.zfun_engine.step(boundary=True)
        return loss

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the engine."""
        groups: Any = self.zfun_engine._groups
        return groups.hooked(self._own_step)(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zfun_engine.zero_grad(set_to_none)

    # A scheduler that wraps step() looks for its mark, and torch, which adds hooks, for another.
    step._wrapped_by_lr_sched = step.hooked = True  # pyrefly: ignore[missing-attribute]


def attach(optimizer: Any, engine: FabricEngine) -> None:
    """Let an optimizer of torch, which stays the same object, step an engine."""
    cls = type(optimizer)
    # A scheduler has put a step of its own here.
    optimizer.__dict__.pop("step", None)
    optimizer.torch_class = cls
    optimizer.__class__ = type(cls.__name__, (_Stepped, cls), {})
    optimizer.zfun_engine, engine.torch_optimizer = engine, optimizer


def detach(optimizer: Any) -> None:
    """Let the steps of an optimizer be its own again."""
    optimizer.__class__ = optimizer.torch_class
    del optimizer.torch_class, optimizer.zfun_engine
