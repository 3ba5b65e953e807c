"""The engine of zfun beneath the names, and the marks that DeepSpeed's parameters have."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zfun import optim
from zfun.collectives import Group, broadcast, split
from zfun.errors import OptionError
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed.runtime.zero._owners import (
    Owner,
    adopt,
    deferred_of,
    is_partitioned,
    marks_of,
    told,
)
from zfun.interop.engine import Engine

__all__ = ["made"]


def made(module: nn.Module, settings: Settings, group: Group) -> Engine:
    """Return the engine of zfun for the options, with the module's values of rank 0.

    Args:
        module: is live afterwards; some parameters may be in pieces.
        settings: the options.
        group: the ranks.
    """
    recipe = settings.recipe
    if recipe.rows is not None:
        mesh = split(group, recipe.rows)
        group = mesh if recipe.secondary else mesh.inner
    cut = {name: p for name, p in module.named_parameters() if is_partitioned(p)}
    if cut:
        plain = {name: p for name, p in module.named_parameters() if name not in cut}
        plain |= dict(module.named_buffers())
        with torch.no_grad():
            for name, value in broadcast(
                {name: x.detach() for name, x in plain.items()}, group, 0, name="parameters"
            ).items():
                plain[name].copy_(value)
    nothing = {} if settings.groups is not None else {"trainable": lambda name, leaf: False}
    engine = Engine(
        module,
        settings.groups or optim.sgd(0.0),
        zero={
            **nothing,
            "stage": recipe.stage,
            "precision": recipe.precision,
            "offload": recipe.offload(),
            "compression": recipe.compression,
            "schedule": recipe.schedule,
            "bucket_bytes": recipe.bucket_bytes,
        },
        group=group,
        accumulate=recipe.num_micro_batches,
        clip_norm=(recipe.max_grad_norm or None) if settings.groups is not None else None,
        init="check" if cut else "broadcast",
        values={name: deferred_of(name, param) for name, param in cut.items()},
    )
    engine.plain_scale = 1.0 / recipe.num_micro_batches
    owner = Values(engine, group)
    for name, param in engine.leaves.items():
        adopt(param, owner, name, is_hidden=recipe.stage == 3)
        told(param)._zfun_engine = weakref.ref(engine), name
        if recipe.stage == 3:
            engine.mark(name, **marks_of(param))
    return engine


class Values(Owner):
    """The owner of parameters whose values are in a state.

    Args:
        engine: of the state.
        group: the ranks.
    """

    def __init__(self, engine: Engine, group: Group) -> None:
        self.group = group
        self._engine = weakref.ref(engine)
        self._names = {id(param): name for name, param in engine.leaves.items()}

    def _named(self, params: Sequence[nn.Parameter]) -> tuple[Engine, list[str]]:
        engine = self._engine()
        if engine is None:
            raise OptionError(
                "the values of a parameter are with an engine; got one whose engine is gone; keep "
                "the engine"
            )
        return engine, [self._names[id(param)] for param in params]

    def gathered(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the whole values; every rank must call."""
        engine, names = self._named(params)
        return [value.clone() for value in engine.gathered_all(names)]

    def put(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        """Take new whole values, the same on every rank; every rank must call."""
        engine, names = self._named(params)
        engine.replace(dict(zip(names, values, strict=True)))

    def show(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        """Let parameters be plain ones with these values, which a rank may write alone."""
        engine, names = self._named(params)
        engine.expose(dict(zip(names, values, strict=True)))

    def hide(self, params: Sequence[nn.Parameter]) -> None:
        """Let parameters be those of the state again."""
        engine, names = self._named(params)
        engine.cover(names)
