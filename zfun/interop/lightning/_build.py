"""Engines of a LightningModule, from its optimizers and a recipe."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from zfun import optim
from zfun.collectives import Group, split
from zfun.errors import OptionError
from zfun.interop._named import first_names
from zfun.interop.ds_config import Recipe
from zfun.interop.engine import Engine
from zfun.interop.lightning._module import Holder, Shell, hollow
from zfun.interop.lightning._optimizers import Groups
from zfun.interop.lightning._runs import AutomaticRun, ManualRun, Run
from zfun.optim import Optimizer
from zfun.placement import S
from zfun.recipes import ZeroState, zero
from zfun.sources import Deferred
from zfun.transforms import redistribute

__all__ = ["build"]


def build(
    module: LightningModule,
    groups: Sequence[Groups],
    recipe: Recipe,
    group: Group,
    device: torch.device,
    seed: int,
) -> Run:
    """Return the engines of a module, whose parameters have no values afterwards.

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
    is_manual = bool(groups) and not module.automatic_optimization
    if is_manual and recipe.precision.loss_scale is not None:
        raise OptionError(
            "manual optimization runs backward without a loss scale; got a precision of 16; pass "
            "precision='bf16-mixed', or use automatic optimization"
        )
    values = values_of(module, device, seed)
    params = dict(module.named_parameters())
    if not is_manual:
        shell = Shell(module)
        rule = groups[0].pure() if groups else optim.sgd(0.0)
        trained = groups[0].trained if groups else frozenset(params)
        engine = engine_of(shell, values, rule, trained, recipe, group)
        hollow(params.values())
        return AutomaticRun(shell, engine)
    holders = [Holder(module, one.trained) for one in groups]
    engines = [
        engine_of(holder, values, one.pure(), one.trained, recipe, group)
        for holder, one in zip(holders, groups, strict=True)
    ]
    for holder in holders:
        hollow(param for _, param in holder.originals)
    return ManualRun(module, holders, engines)


def engine_of(
    module: nn.Module,
    values: Mapping[str, Any],
    rule: Optimizer,
    trained: Collection[str],
    recipe: Recipe,
    group: Group,
) -> Engine:
    """Return an engine of a module whose first values are given."""
    buffers = {name for name, _ in module.named_buffers()}
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    composed = zero(
        recipe.stage,
        lambda params, batch: params,
        rule,
        group,
        precision=recipe.precision,
        trainable=lambda path, leaf: path in trained,
        # As under DDP, all ranks go on with the buffers of rank 0.
        buffers=(lambda path, leaf: "rank 0" if path in buffers else None) if buffers else None,
        offload=recipe.offload(),
        compression=recipe.compression,
        schedule=recipe.schedule,
        bucket_bytes=recipe.bucket_bytes,
    )

    first = [{name: values[name] for name in names}]

    def start(params: Any, *, init: str = "check") -> ZeroState:
        """Make the first state of the values, which may be made leaf by leaf."""
        return composed.init(first.pop() if first else params, init=init)

    def vjp(*args: Any) -> Any:
        """Shard the gradients of every micro-batch, so that all stages add in one order."""
        out, pullback, left = composed.vjp(*args)
        if recipe.stage != 1:
            return out, pullback, left
        return out, pullback.then(lambda grads: redistribute(grads, S, group)), left

    return Engine(module, None, zero=composed._replace(init=start, vjp=vjp))


def values_of(module: nn.Module, device: torch.device, seed: int) -> dict[str, Any]:
    """Return the values of parameters and buffers by name.

    Values on the ``meta`` device are made by ``reset_parameters`` when the state asks for a leaf,
    so that no rank ever holds all of them.

    Args:
        module: the module.
        device: of the state.
        seed: of random values, equal on all ranks.

    Raises:
        OptionError: a module with values on ``meta`` has no ``reset_parameters``.
    """
    found: dict[str, Any] = {}
    names = first_names(module)
    for prefix, owner in module.named_modules():
        for key, x in [*owner._parameters.items(), *owner._buffers.items()]:
            if x is None or names[id(x)] in found:
                continue
            name = names[id(x)]
            if not x.is_meta:
                found[name] = x.detach()
                continue
            if not callable(getattr(owner, "reset_parameters", None)):
                raise OptionError(
                    "remote_device='meta' makes values by reset_parameters(); leaf "
                    f"{name!r} belongs to {type(owner).__name__}, which has no such method; "
                    "write the method, or leave remote_device out",
                    leaf=name,
                )
            made = functools.partial(_made, owner, key, zlib.crc32(prefix.encode()) ^ seed)
            found[name] = Deferred(name, x.detach(), made, device)
    return found


def _made(owner: nn.Module, key: str, seed: int) -> torch.Tensor:
    """Make one value of a module, whose other values are made and dropped."""
    fresh = copy.copy(owner)
    fresh.__dict__["_parameters"] = dict(owner._parameters)
    fresh.__dict__["_buffers"] = dict(owner._buffers)
    fresh.__dict__["_modules"] = dict[str, nn.Module]()
    fresh.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        fresh.reset_parameters()  # pyrefly: ignore[not-callable]
    made = {**fresh._parameters, **fresh._buffers}[key]
    assert made is not None
    return made.detach()
