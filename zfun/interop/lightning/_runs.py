"""A run of a LightningModule on engines: automatic and manual optimization.

[Note: manual optimization]
A manual ``training_step`` runs forward, backward and steps in any order, so no function of the
parameters encloses a forward pass. Each optimizer therefore has an engine of its parameters alone,
whose outputs are the whole values. The module has these values during a hook, autograd adds
gradients to ``.grad`` as in plain torch, and ``optimizer.step()`` passes the gradients on, as those
of a sum of products. So parameters and gradients are whole on every rank within a hook, and sharded
as the stage says between hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zfun.interop.engine import Engine
from zfun.interop.lightning._module import Holder, Shell, hollow
from zfun.optim import set_hyperparams

__all__ = ["AutomaticRun", "ManualRun", "Run"]

_Args = tuple[Any, ...]


class Run(Protocol):
    """The engines of a run."""

    engines: list[Engine]

    def train(self, method: str, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a hook of the module in training."""
        ...

    def evaluate(self, method: str, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a hook of the module without gradients."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run backward from a loss."""
        ...

    def step(self, index: int, hyperparams: Mapping[str, float]) -> Any:
        """Step the optimizer of an index; return the ``StepInfo``."""
        ...


class AutomaticRun:
    """One engine, whose forward pass is a hook of the module.

    Args:
        shell: of the module.
        engine: of the shell.
    """

    def __init__(self, shell: Shell, engine: Engine) -> None:
        self.engines = [engine]
        self._engine, self._lender = engine, shell.lender

    def train(self, method: str, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a hook; the module keeps the tensors of the call until backward is over."""
        self._lender.end()
        self._engine.train()
        try:
            return self._engine(method, args, kwargs)
        except BaseException:
            self._lender.end()
            raise

    def evaluate(self, method: str, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a hook without gradients."""
        self._engine.eval()
        with self._lender.own():
            return self._engine(method, args, kwargs)

    def backward(self, loss: Tensor) -> None:
        """Run backward from a loss that is divided by the number of micro-batches already."""
        with self._lender.own():
            self._engine.backward(loss, scale=1.0)

    def step(self, index: int, hyperparams: Mapping[str, float]) -> Any:
        """Step."""
        return _stepped(self._engine, hyperparams)


def _stepped(engine: Engine, hyperparams: Mapping[str, float]) -> Any:
    if hyperparams:
        engine.state = set_hyperparams(engine.state, hyperparams)
    return engine.step(boundary=True)


class ManualRun:
    """A state for each optimizer; see [Note: manual optimization].

    Args:
        module: the LightningModule.
        holders: of the parameters of each optimizer.
        engines: of the holders.
    """

    def __init__(self, module: nn.Module, holders: list[Holder], engines: list[Engine]) -> None:
        self.engines = engines
        self._module, self._holders = module, holders

    def train(self, method: str, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a hook on whole values."""
        return self.evaluate(method, args, kwargs)

    def evaluate(self, method: str, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run a hook on whole values."""
        with self._filled():
            return getattr(self._module, method)(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add gradients to the parameters of the module."""
        loss.backward()

    def step(self, index: int, hyperparams: Mapping[str, float]) -> Any:
        """Step an optimizer with the gradients in its parameters; without any, do nothing."""
        engine, params = self.engines[index], self._holders[index].originals
        grads = {name: param.grad for name, param in params if param.grad is not None}
        if not grads:
            return None
        engine.train()
        whole = engine()
        # The derivative of this sum with respect to each value is the gradient.
        terms = [(whole[name] * grad).sum() for name, grad in grads.items()]
        engine.backward(torch.stack(terms).sum(), scale=1.0)
        info = _stepped(engine, hyperparams)
        with torch.no_grad():
            for param, value in self._values(index):
                # A write that autograd counts, so that a graph of the old values is refused.
                param.copy_(value)
        return info

    @contextlib.contextmanager
    def _filled(self) -> Iterator[None]:
        for index in range(len(self.engines)):
            for param, value in self._values(index):
                param.data = value
        try:
            yield
        finally:
            hollow(param for holder in self._holders for _, param in holder.originals)

    def _values(self, index: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the parameters of a state and their whole values."""
        engine = self.engines[index]
        engine.eval()
        whole = engine()
        for name, param in self._holders[index].originals:
            yield param, whole[name]
