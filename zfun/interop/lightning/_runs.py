"""A run of a LightningModule on engines: automatic and manual optimization.

[Note: manual optimization]
A manual ``training_step`` runs forward, backward and steps in any order and on any optimizer. Each
optimizer has an engine of its own parameters, and the module has whole parameters during a hook, so
that autograd adds gradients to ``.grad`` as in plain torch. ``optimizer.step()`` sums them over the
ranks. Parameters are sharded between hooks, as the stage says.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from zfun import optim
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop._attached import StepEngine, ZeroedEngine, engines_apart
from zfun.interop._configured import zero_options
from zfun.interop.ds_config import Recipe
from zfun.interop.engine import UNBOUNDED, Engine, EngineBuffers, ParamGroups, named_leaves
from zfun.interop.engine._running import run_backward
from zfun.recipes import StepInfo
from zfun.sources import Deferred

# Lightning 2.5 does not have this one yet.
_AVERAGES: Any = getattr(of_lightning, "WeightAveraging", ())


class AutomaticRun:
    """One engine, whose calls are hooks of the module."""

    def __init__(self, module: LightningModule, engine: Engine) -> None:
        self.engines, self.module = [engine], module

    def hook(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a hook of the module."""
        return self.engines[0].run(getattr(self.module, name), *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss that is divided by the number of micro-batches already."""
        self.engines[0].backward(loss, *args, scale=1.0, **kwargs)

    def step(self, index: int) -> StepInfo | None:
        return self.engines[index].step(boundary=True)

    def close(self) -> None:
        self.engines[0].close(average=True)


class ManualRun:
    """An engine for each optimizer; see [Note: manual optimization]."""

    def __init__(self, module: LightningModule, engines: Sequence[Engine], group: Group) -> None:
        self.engines, self.module = list(engines), module
        options = engines[0].recipe.options
        self._buffers = EngineBuffers(module, "rank 0", group, "broadcast", {}, (), options)

    def hook(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a hook on whole parameters."""
        if torch.is_grad_enabled():
            self._buffers.merge(self._buffers.changed())
            for engine in self.engines:
                engine.prepare()
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.bound())
            return getattr(self.module, name)(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add gradients to the parameters of the module."""
        run_backward(loss, *args, **kwargs)

    def step(self, index: int) -> StepInfo | None:
        """Step an optimizer with the gradients of its parameters; without any, do nothing."""
        return self.engines[index].step(boundary=True)

    def close(self) -> None:
        """Let the module be a plain one."""
        self._buffers.release()
        for engine in self.engines:
            engine.close(average=True)


def build(
    module: LightningModule,
    groups: Sequence[ParamGroups],
    recipe: Recipe,
    group: Group,
    values: Mapping[str, Any],
) -> AutomaticRun | ManualRun:
    """Make a module live: with an engine for each optimizer, or one for an evaluation."""
    options: dict[str, Any] = {"zero": zero_options(recipe, group), "values": values}
    if not groups:
        return AutomaticRun(module, Engine(module, optim.sgd(0.0), **options))
    options["clip_norm"] = UNBOUNDED
    if module.automatic_optimization:
        return AutomaticRun(module, StepEngine(module, groups[0], **options))
    if recipe.precision.loss_scale is not None:
        raise OptionError(
            "manual optimization runs backward without a loss scale; got a precision of 16; pass "
            "precision='bf16-mixed', or use automatic optimization"
        )
    engines = engines_apart(module, groups, ZeroedEngine, **options)
    for engine, one in zip(engines, groups, strict=True):
        # As in torch, a step without gradients passes.
        engine.keeps_grads = engine.passes_empty_steps = True
        # Otherwise torch would look at each gradient, which sums over the ranks.
        one.optimizer.zero_grad = engine.zero_grad
    return ManualRun(module, engines, group)


def groups_of(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> list[ParamGroups]:
    """Return the groups of each optimizer of a module."""
    leaves = named_leaves(module)
    found = [ParamGroups(optimizer, leaves) for optimizer in optimizers]
    seen: dict[str, int] = {}
    for index, groups in enumerate(found):
        for name in sorted(groups.labels):
            if name in seen:
                raise OptionError(
                    "a parameter has one optimizer, because its state is sharded with it; leaf "
                    f"{name!r} is in the optimizers {seen[name]} and {index}; give each optimizer "
                    "parameters of its own",
                    leaf=name,
                )
            seen[name] = index
    return found


def take_values_of_rank_0(module: nn.Module, num_ranks: int) -> None:
    """Give all ranks the same values, as DDP does."""
    for tensor in [*module.parameters(), *module.buffers()] if num_ranks > 1 else ():
        dist.broadcast(tensor.detach(), 0)


def register_names(cls: type, registry: Any) -> None:
    """Register a strategy under the names of zfun."""
    register = functools.partial(registry.register, override=True)
    register("zfun", cls, description="zfun, stage 2 or as configured")
    for stage in (1, 2, 3):
        name, words = f"zfun_stage_{stage}", f"zfun, ZeRO stage {stage}"
        register(name, cls, description=words, stage=stage)
        words, more = f"{words}, with state in host memory", {"offload_parameters": True}
        options = {"stage": stage, "offload_optimizer": True, **(more if stage == 3 else {})}
        register(f"{name}_offload", cls, description=words, **options)


def register_elsewhere(cls: type, package: str, registry: str) -> None:
    """Register a strategy in a package of Lightning with other classes, which then refuses it.

    A program that has not imported the package needs no remedy.
    """
    strategies: Any = sys.modules.get(f"{package}.strategies")
    if strategies is not None:
        strategies.Strategy.register(cls)
        register_names(cls, getattr(strategies, registry))


def master_values(values: Mapping[str, Any], engines: Sequence[Engine]) -> dict[str, Any]:
    """Return a ``state_dict()`` of live parameters with whole master weights; all ranks call."""
    names = {id(x): (engine, name) for engine in engines for name, x in engine.leaves.items()}
    found: dict[str, Any] = {}
    for key, x in values.items():
        if id(x) in names:
            engine, name = names[id(x)]
            x = engine.gathered(name, master=True)
        found[key] = x.detach().clone() if isinstance(x, Tensor) else x
    return found


def load_values(
    module: nn.Module,
    engines: Sequence[Engine],
    values: Mapping[str, Any],
    more: Mapping[str, Deferred],
    *,
    strict: bool,
) -> None:
    """Load ``module.state_dict()``, into master weights without rounding; all ranks call.

    Of a live module, ``more`` are the values of other parameters by name.
    """
    is_whole = more.keys().isdisjoint(name for name, _ in module.named_parameters())
    module.load_state_dict(values, strict=strict and is_whole)
    own = module.state_dict(keep_vars=True) if engines else {}
    given = [(id(x), values[key]) for key, x in own.items() if key in values]
    for engine in engines:
        names = {id(x): name for name, x in engine.leaves.items()}
        others = {name: x.load() for name, x in more.items()}
        engine.replace({**others, **{names[key]: x for key, x in given if key in names}})


def check_trainer(trainer: Trainer) -> None:
    """Refuse options before anything is built."""
    for callback in getattr(trainer, "callbacks", []):
        if isinstance(callback, StochasticWeightAveraging):
            raise OptionError(
                "with a strategy of zfun no code writes parameters through detach(), as "
                "StochasticWeightAveraging does at the end of fit; got this callback; pass "
                "WeightAveraging(), which averages too"
            )
        if isinstance(callback, _AVERAGES) and trainer.precision in ("bf16-true", "16-true"):
            raise OptionError(
                "in 16 bits a module has rounded parameters, beside master weights; got "
                f"{type(callback).__name__}, which would average the rounded ones; pass "
                "EmaAveraging() of zfun.interop.lightning, which averages the master weights"
            )


def step_of(strategy: Any, groups: ParamGroups) -> Any:
    """Return ``step()`` of an optimizer for Lightning, and for a module that calls torch's own."""

    def step(closure: Any = None) -> Any:
        with torch.enable_grad():
            result = None if closure is None else closure()
        strategy.step(groups.optimizer)
        return result

    return groups.hooked(step)
