"""A run of a LightningModule on engines: automatic and manual optimization.

[Note: manual optimization]
A manual ``training_step`` runs forward, backward and steps in any order and on any optimizer. Each
optimizer has an engine of its own parameters, and the module has whole parameters during a hook, so
that autograd adds gradients to ``.grad`` as in plain torch. ``optimizer.step()`` sums them over the
ranks. Parameters are sharded between hooks, as the stage says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from zfun import optim
from zfun.collectives import Group, split
from zfun.errors import OptionError
from zfun.interop.ds_config import Recipe
from zfun.interop.engine import UNBOUNDED, Buffers, Engine, ParamGroups, named_leaves
from zfun.interop.lightning._meta import values_of
from zfun.recipes import StepInfo

__all__ = ["AutomaticRun", "ManualRun", "build", "groups_of"]


class AutomaticRun:
    """One engine, whose calls are hooks of the module.

    Args:
        module: the module.
        engine: of the module.
    """

    def __init__(self, module: LightningModule, engine: Engine) -> None:
        self.engines, self._module = [engine], module

    def hook(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a hook of the module."""
        return self.engines[0].run(getattr(self._module, name), *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss that is divided by the number of micro-batches already."""
        self.engines[0].backward(loss, *args, scale=1.0, **kwargs)

    def step(self, index: int) -> StepInfo | None:
        """Step."""
        return self.engines[index].step(boundary=True)


class ManualRun:
    """An engine for each optimizer; see [Note: manual optimization].

    Args:
        module: the module.
        engines: of the parameters of each optimizer.
        group: the ranks.
    """

    def __init__(self, module: LightningModule, engines: Sequence[Engine], group: Group) -> None:
        self.engines, self._module = list(engines), module
        self._buffers = Buffers(module, "rank 0", group, "broadcast", {})

    def hook(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run a hook on whole parameters."""
        if torch.is_grad_enabled():
            self._buffers.merge(self._buffers.changed())
            for engine in self.engines:
                engine.prepare()
        with contextlib.ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.bound())
            return getattr(self._module, name)(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add gradients to the parameters of the module."""
        loss.backward(*args, **kwargs)

    def step(self, index: int) -> StepInfo | None:
        """Step an optimizer with the gradients of its parameters; without any, do nothing."""
        engine = self.engines[index]
        if all(param.grad is None for param in engine.leaves.values()):
            return None
        return engine.step(boundary=True)


def build(
    module: LightningModule,
    groups: Sequence[ParamGroups],
    recipe: Recipe,
    group: Group,
    device: torch.device,
    seed: int,
) -> AutomaticRun | ManualRun:
    """Return the engines of a module, which is live afterwards.

    Args:
        module: with the values of rank 0 on all ranks.
        groups: of the optimizers; none for an evaluation.
        recipe: the options of ``zf.zero``.
        group: the ranks.
        device: of the state.
        seed: of values that are made for the state, equal on all ranks.

    Raises:
        OptionError: options that do not go together.
    """
    if recipe.rows is not None:
        mesh = split(group, recipe.rows)
        group = mesh if recipe.secondary else mesh.inner
    options: dict[str, Any] = {
        "zero": {
            "stage": recipe.stage,
            "precision": recipe.precision,
            "offload": recipe.offload(),
            "compression": recipe.compression,
            "schedule": recipe.schedule,
            "bucket_bytes": recipe.bucket_bytes,
        },
        "group": group,
        "values": values_of(module, device, seed),
    }
    if not groups:
        return AutomaticRun(module, Engine(module, optim.sgd(0.0), **options))
    options["clip_norm"] = UNBOUNDED
    if module.automatic_optimization:
        return AutomaticRun(module, Engine(module, groups[0], **options))
    if recipe.precision.loss_scale is not None:
        raise OptionError(
            "manual optimization runs backward without a loss scale; got a precision of 16; pass "
            "precision='bf16-mixed', or use automatic optimization"
        )
    holders = [_holder(module, one) for one in groups]
    engines: list[Engine] = []
    try:
        for held, one in zip(holders, groups, strict=True):
            engines.append(Engine(held, one, **options))
            engines[-1].keeps_grads = True
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return ManualRun(module, engines, group)


def _holder(module: nn.Module, groups: ParamGroups) -> nn.Module:
    """Return a module of the parameters of an optimizer, the same objects under the same names."""
    holder = nn.Module()
    ids = {id(param) for group in groups.groups for param in group["params"]}
    for name, param in named_leaves(module).items():
        if id(param) in ids:
            holder._parameters[name] = param
    return holder


def groups_of(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> list[ParamGroups]:
    """Return the groups of each optimizer of a module.

    Raises:
        OptionError: a parameter has two optimizers, or is none of the module's.
        NotElementwiseError: an optimizer that needs whole tensors.
    """
    leaves = named_leaves(module)
    own = {id(param) for param in module.parameters()}
    for optimizer in optimizers:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) not in own:
                raise OptionError(
                    "an optimizer steps parameters of the LightningModule; "
                    f"{type(optimizer).__name__} has a tensor of shape {tuple(param.shape)} that "
                    "is none of them; assign it to the module, and return optimizers of "
                    "self.parameters()"
                )
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
