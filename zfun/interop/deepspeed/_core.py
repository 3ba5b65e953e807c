"""The engine of zfun beneath the names, and the marks that DeepSpeed's parameters have."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zfun import optim
from zfun.collectives import Group, broadcast, split
from zfun.errors import OptionError
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed.runtime.zero._owners import (
    Owner,
    adopt,
    check_unwritten,
    deferred_of,
    is_partitioned,
    told,
)
from zfun.interop.engine import Engine

__all__ = ["attach_optimizer", "made"]


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
    check_unwritten(cut.values())
    if cut:
        plain = {name: p for name, p in module.named_parameters() if name not in cut}
        plain |= dict(module.named_buffers())
        with torch.no_grad():
            for name, value in broadcast(
                {name: x.detach() for name, x in plain.items()}, group, 0, name="parameters"
            ).items():
                plain[name].copy_(value)
    engine = Engine(
        module,
        # Without an optimizer the parameters keep their values, and there is no state.
        optim.sgd(0.0) if settings.groups is None else settings.groups,
        zero={
            "stage": recipe.stage,
            "precision": recipe.precision,
            "offload": recipe.offload(),
            "compression": recipe.compression,
            "schedule": recipe.schedule,
            "bucket_bytes": recipe.bucket_bytes,
        },
        group=group,
        accumulate=recipe.num_micro_batches,
        clip_norm=recipe.max_grad_norm or None,
        init="check" if cut else "broadcast",
        values={name: deferred_of(name, param) for name, param in cut.items()},
    )
    owner = Values(engine, group)
    for name, param in engine.leaves.items():
        adopt(param, owner, name, is_hidden=recipe.stage == 3)
        _attach(param, weakref.ref(engine), name)
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


def _attach(param: nn.Parameter, engine: weakref.ref[Engine], name: str) -> None:
    """Let the functions of ``utils`` find the value of a parameter."""

    def here() -> Engine:
        found = engine()
        if found is None:
            raise OptionError(
                f"the value of a parameter is with an engine; got {name!r}, whose engine is gone; "
                "keep the engine"
            )
        return found

    told(param)._zfun_read = lambda: here().gathered(name, master=True)
    told(param)._zfun_write = lambda value: here().replace({name: value})


def attach_optimizer(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Let ``state_dict()`` and ``load_state_dict()`` of an optimizer read and write the state."""
    here = weakref.ref(engine)
    plain = type(optimizer)
    names = {id(param): name for name, param in engine.leaves.items()}

    def ordered() -> list[str]:
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def state_dict() -> dict[str, Any]:
        found = plain.state_dict(optimizer)
        held = (here() or engine_of_none()).optimizer_state()
        state = {i: held[name] for i, name in enumerate(ordered()) if name in held}
        return {**found, "state": state}

    def load_state_dict(given: Mapping[str, Any]) -> None:
        plain.load_state_dict(optimizer, {**given, "state": {}})
        held = dict(enumerate(ordered()))
        (here() or engine_of_none()).load_optimizer_state(
            {held[i]: x for i, x in given["state"].items()}
        )

    vars(optimizer).update(state_dict=state_dict, load_state_dict=load_state_dict)


def engine_of_none() -> Engine:
    """Refuse the state of an optimizer whose engine is gone."""
    raise OptionError(
        "the state of an optimizer is with an engine; got an optimizer whose engine is gone; keep "
        "the engine"
    )
