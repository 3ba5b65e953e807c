"""The hooks of a LightningModule as a function of its parameters.

[Note: bound in place]
:func:`zfun.functional` calls a bound copy of a module. The hooks of a LightningModule must see the
module itself, because hooks assign to attributes, log metrics by identity, and talk to the trainer.
Therefore a *shell* is bound instead: a module with the tensors and children of the LightningModule.
The bound copy of the shell lends its tensors to the LightningModule until the backward pass is
over, because activation checkpointing calls the children again in backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Holder", "Shell", "hollow", "restore"]


class Shell(nn.Module):
    """A module with the tensors and children of another one, whose call runs a method of that one.

    Args:
        module: the other module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for slots in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[slots] = module.__dict__[slots]
        # In an object, because functional() copies modules that are attributes.
        self.lender = Lender(module)

    def forward(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the other module on the tensors of this copy of the shell."""
        return self.lender.run(self, method, args, kwargs)

    def train(self, mode: bool = True) -> Shell:
        """Leave the modes of the modules to Lightning."""
        self.training = mode
        return self


class Lender:
    """Lends the tensors of bound copies of a shell to a module.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._own = [
            (inside, inside._parameters, inside._buffers) for inside in _modules_of(module)
        ]

    def run(self, copy: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
        """Lend the tensors of a bound copy, and run a method."""
        for (inside, _, _), bound in zip(self._own, _modules_of(copy), strict=True):
            inside.__dict__["_parameters"] = bound._parameters
            inside.__dict__["_buffers"] = bound._buffers
        return getattr(self.module, method)(*args, **kwargs)

    def end(self) -> None:
        """Give the module its own tensors back."""
        for inside, parameters, buffers in self._own:
            inside.__dict__["_parameters"] = parameters
            inside.__dict__["_buffers"] = buffers

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """A context at whose end the module has its own tensors again."""
        try:
            yield
        finally:
            self.end()


def _modules_of(root: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, each once, in an order that bound copies share."""
    found: dict[int, nn.Module] = {}

    def enter(module: nn.Module) -> None:
        if id(module) not in found:
            found[id(module)] = module
            for child in module._modules.values():
                if child is not None:
                    enter(child)

    enter(root)
    return list(found.values())


class Holder(nn.Module):
    """A module of some parameters of another one, under the same names, whose call returns them.

    Args:
        module: the other module.
        names: of the parameters.

    Attributes:
        originals: the parameters of the other module by name.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self.originals = Originals(
            (name, param) for name, param in module.named_parameters() if name in names
        )
        for name, param in self.originals:
            *path, key = name.split(".")
            owner: nn.Module = self
            for word in path:
                if word not in owner._modules:
                    owner.add_module(word, nn.Module())
                owner = owner.get_submodule(word)
            owner.register_parameter(key, param)

    def forward(self) -> dict[str, Tensor]:
        """Return the parameters of this copy, whole."""
        return {name: param.clone() for name, param in self.named_parameters()}


class Originals(tuple[tuple[str, nn.Parameter], ...]):
    """Parameters by name, which bound copies do not replace."""

    __slots__ = ()


@torch.no_grad()
def hollow(params: Iterable[nn.Parameter]) -> None:
    """Free the values of parameters, whose values are in a state; reads give NaN."""
    for param in params:
        if not param.is_meta:
            empty = param.new_empty(())
            if param.is_floating_point() or param.is_complex():
                empty.fill_(torch.nan)
            param.data = empty.expand(param.shape)


@torch.no_grad()
def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the parameters and buffers of a module the values of a state.

    Args:
        module: the module, after :func:`hollow`.
        values: whole tensors by name; the tensors become those of the module.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, param in owner._parameters.items():
            if param is not None and id(param) in made:
                owner._parameters[key] = made[id(param)]
                continue
            name = names.get(id(param))
            if param is None or name not in values:
                continue
            value = values[name].detach().to(param.dtype)
            if param.is_meta:
                made[id(param)] = nn.Parameter(value, param.requires_grad)
                owner._parameters[key] = made[id(param)]
            else:
                param.data = value
    for name, buffer in module.named_buffers():
        if name in values and not buffer.is_meta:
            buffer.copy_(values[name])
