"""A function with all arguments but the tensors, which runs twice under the same conditions.

The conditions are the states of random generators and the parameters of modules. During the call
the parameters may come from ``torch.func.functional_call``, which restores the module's own
parameters before backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zfun import tree
from zfun.transforms.call._lazy import LazyLeaf, loading


class Block:
    """A function with all arguments but the tensors.

    ``spec`` is the structure of ``(args, kwargs)``. ``generators`` are restored beside those among
    the leaves.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        spec: tree.Spec,
        generators: Sequence[torch.Generator],
    ) -> None:
        self.fn = fn
        self.spec = spec
        # Without tensor arguments, because autograd saves these. Lazy leaves have no data.
        self.places = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and not isinstance(leaf, LazyLeaf)
        ]
        taken = set(self.places)
        self.leaves = [None if i in taken else leaf for i, leaf in enumerate(leaves)]
        generators = (*generators, *(leaf for leaf in leaves if isinstance(leaf, torch.Generator)))
        self.states = [(generator, generator.get_state()) for generator in generators]
        self.captured = _captured(fn, self.leaves)
        self.again = False

    def __call__(self, *tensors: Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree.unflatten(self.spec, leaves)
        again, self.again = self.again, True
        if not again:
            return self.fn(*args, **kwargs)
        with _restored(self.states):
            if self.captured is None:
                return self.fn(*args, **kwargs)
            module, values = self.captured
            return functional_call(module, values(), args, kwargs, tie_weights=False)


@contextlib.contextmanager
def _restored(states: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    now = [generator.get_state() for generator, _ in states]
    for generator, state in states:
        generator.set_state(state)
    try:
        yield
    finally:
        for (generator, _), state in zip(states, now, strict=True):
            generator.set_state(state)


class _WithModules(nn.Module):
    """A function of modules as a module, so that ``functional_call`` accepts the function."""

    def __init__(self, fn: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        # in a tuple, so that nn.Module does not register a module fn as a submodule
        self.fn = (fn,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn[0](*args, **kwargs)


def _captured(
    fn: Callable[..., Any], arguments: Sequence[Any]
) -> tuple[nn.Module, Callable[[], dict[str, Tensor]]] | None:
    """Record the parameters of modules, because ``functional_call`` resets parameters later."""
    found = list(arguments)
    inner = fn
    while isinstance(inner, functools.partial):
        found += [*inner.args, *inner.keywords.values()]
        inner = inner.func
    modules = [
        value
        for value in (inner, getattr(inner, "__self__", None), *found)
        if isinstance(value, nn.Module)
    ]
    if not modules:
        return None
    module = _WithModules(fn, modules)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))

    def values() -> dict[str, Tensor]:
        # Copy the buffers, so that running statistics advance only once, in forward.
        with loading():
            return parameters | {name: buffer.clone() for name, buffer in buffers.items()}

    return module, values
