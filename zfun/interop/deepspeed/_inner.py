"""The engine of zfun beneath the names, and the values that the module's parameters show."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zfun import tree
from zfun.collectives import Group, broadcast
from zfun.errors import OptionError
from zfun.flat import Flat, unravel
from zfun.interop import Engine
from zfun.interop._named import with_values
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed._values import whole_values
from zfun.interop.deepspeed.runtime.zero._owners import (
    check_unwritten,
    deferred_of,
    is_partitioned,
    keep,
    release,
    told,
)

__all__ = ["Inner"]


class Inner:
    """An engine of zfun, and the parameters of the module that it was made of.

    At stages 0 to 2 the parameters of the module are views of the state, in memory that ranks of
    one host may share. At stage 3 the parameters are stand-ins, and this object is their owner.

    Args:
        module: the model.
        settings: the options.
        group: the ranks.

    Attributes:
        engine: the engine.
        group: the ranks.
        frozen: the names of parameters that are not trained.
    """

    def __init__(self, module: nn.Module, settings: Settings, group: Group) -> None:
        recipe = settings.recipe
        self.group = group
        self._module = module
        self._is_sharded = recipe.stage == 3
        self._tensors = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
        }
        self._names = {id(x): name for name, x in self._tensors.items()}
        self.frozen = [
            name for name, _ in module.named_parameters() if name not in settings.trained
        ]
        self.engine = made(module, settings, group)
        state = self.engine.state
        flats = [flat for flat in (state.params, state.frozen) if isinstance(flat, Flat)]
        dtypes = {slot.path: slot.dtype for flat in flats for slot in flat.layout.leaves}
        for name, param in module.named_parameters():
            _attach(param, weakref.ref(self), name)
            if self._is_sharded:
                told(param).ds_name = name
                like = torch.empty((), dtype=dtypes[name], device=param.device)
                release(param, self, like.expand(param.shape))
            else:
                keep(param)
        self.refresh()

    def refresh(self) -> None:
        """Let the module's tensors be the values of the state; at stage 3 the buffers alone."""
        state = self.engine.state
        shown = [state.buffers]
        if not self._is_sharded:
            shown += [state.params, state.frozen]
        for flat in shown:
            if isinstance(flat, Flat):
                values = unravel(flat)
                for name, value in zip(tree.paths(values), tree.leaves(values), strict=True):
                    if name in self._tensors:
                        self._tensors[name].data = value

    # The owner of parameters at stage 3

    def gathered(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the whole values; every rank must call."""
        names = [self._names[id(param)] for param in params]
        found = whole_values(self.engine.state, set(names))
        return [found[name] for name in names]

    def put(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        """Take new whole values, the same on every rank; every rank must call."""
        names = [self._names[id(param)] for param in params]
        self.replace(dict(zip(names, values, strict=True)), strict=False)

    def replace(self, values: Mapping[str, Any], *, strict: bool) -> None:
        """Take whole values by any names of the module, the same on every rank.

        Args:
            values: by name, such as a state dict; every rank must call.
            strict: whether each parameter and each buffer must be there, and nothing else.

        Raises:
            SpecMismatch: names or shapes differ.
        """
        state = self.engine.state
        self.engine.state = with_values(self._module, state, values, strict=strict)
        self.refresh()

    # Other uses

    def read(self, name: str) -> Tensor:
        """Return the whole value of a parameter, from the master weight if there is one."""
        return whole_values(self.engine.state, {name}, masters=True)[name]

    def method(self, name: str) -> Callable[..., Any]:
        """Return a method of the module that reads the values of the state."""
        found = getattr(self._module, name)
        if not self._is_sharded:
            return found

        @functools.wraps(found)
        def bound(*args: Any, **kwargs: Any) -> Any:
            with self.engine.bound() as module:
                return getattr(module, name)(*args, **kwargs)

        return bound

    def loss_scale(self) -> float:
        """Return the factor of the loss in backward; 1 without one."""
        scale = self.engine.state.loss_scale
        return 1.0 if scale is None else float(scale.scale)


def _attach(param: nn.Parameter, inner: weakref.ref[Inner], name: str) -> None:
    """Let the functions of ``utils`` find the value of a parameter."""

    def here() -> Inner:
        found = inner()
        if found is None:
            raise OptionError(
                f"the value of a parameter is with an engine; got {name!r}, whose engine is gone; "
                "keep the engine"
            )
        return found

    told(param)._zfun_read = lambda: here().read(name)
    told(param)._zfun_write = lambda value: here().replace({name: value}, strict=False)


def made(module: nn.Module, settings: Settings, group: Group) -> Engine:
    """Return the engine of zfun for the options, with the module's values of rank 0."""
    recipe, trained = settings.recipe, settings.trained
    accumulate = recipe.num_micro_batches
    buffers = {name for name, _ in module.named_buffers()}
    names = [name for name, _ in module.named_parameters()]
    zero = recipe.zero(
        _no_loss,
        group,
        trainable=None if trained.issuperset(names) else lambda path, leaf: path in trained,
        buffers=(lambda path, leaf: "rank 0" if path in buffers else None) if buffers else None,
    )
    if not any(is_partitioned(param) for param in module.parameters()):
        return Engine(module, None, zero=zero, accumulate=accumulate, init="broadcast")
    check_unwritten(param for param in module.parameters() if is_partitioned(param))

    def init(params: Any, *, init: str = "check") -> Any:
        """Make the state of pieces, one whole parameter at a time."""
        owned = {name: p for name, p in module.named_parameters() if is_partitioned(p)}
        plain = {name: value for name, value in params.items() if name not in owned}
        with torch.no_grad():
            leaves = broadcast(plain, group, 0, name="parameters")
        pieces = {name: deferred_of(name, param) for name, param in owned.items()}
        return zero.init({name: {**leaves, **pieces}[name] for name in params}, init=init)

    engine = Engine(module, None, zero=zero._replace(init=init), accumulate=accumulate)
    engine.recipe = zero
    return engine


def _no_loss(params: Any, batch: Any) -> Any:
    """Stand for the loss, which the script computes."""
    raise AssertionError
