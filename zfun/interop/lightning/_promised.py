"""Modules on ``meta``, whose values ``reset_parameters()`` makes for the state, leaf by leaf."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zfun.errors import OptionError
from zfun.interop._named import first_names
from zfun.sources import Deferred

# In-place methods that write no values.
_HARMLESS = frozenset(("requires_grad_", "detach_", "share_memory_", "rename_"))
# Operators that begin as those in place do.
_READS = frozenset(("__int__", "__index__", "__invert__"))


class _Promise:
    """A tensor on ``meta`` whose values come later, so that no code may write them before."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        # orthogonal_() and others ask whether a tensor is on meta, and then write nothing.
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") == nn.init.__name__:
            name = caller.f_code.co_name
        # nn.init names the argument, and torch._foreach_... has a list.
        into = args[0] if args else given.get("tensor")
        if isinstance(into, (list, tuple)):
            into = next((x for x in into if isinstance(x, _Promise)), None)
        with torch._C.DisableTorchFunctionSubclass():
            if not (isinstance(into, _Promise) and isinstance(into, Tensor) and into.is_meta):
                return func(*args, **given)
            if _writes(name) and not _resets(into):
                raise OptionError(
                    "reset_parameters() makes the values of a module on meta when it is set up; "
                    f"got {name}() of a parameter of shape {tuple(into.shape)} before, which would "
                    "be lost; write after the setup or in reset_parameters(), or make the module "
                    "with its values, without empty_init= or remote_device="
                )
            found = func(*args, **given)
            if type(found) is Tensor and found.is_meta and _memory(found) == _memory(into):
                found = found.as_subclass(_PromisedView)
                found.__dict__.update(into.__dict__)
            return found


class Promised(_Promise, nn.Parameter):
    """A parameter on ``meta``, which gets its values when its module is set up.

    Code that writes values before that would write nothing, so it is refused, but for that of
    ``reset_parameters()``, which runs again.
    """


class _PromisedView(_Promise, Tensor):
    """A view of such a parameter, or its ``.data``."""


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _writes(name: str) -> bool:
    is_operator = name == "__setitem__" or (name[:3] == "__i" and name not in _READS)
    return is_operator or (name[-1:] == "_" != name[-2:-1] and name not in _HARMLESS)


def _resets(param: Any) -> bool:
    """Whether ``reset_parameters`` of the module of a parameter runs, or a function of this name.

    Scripts put a partial of one function in its place.
    """
    owner: Any = param.__dict__.get("owner", lambda: None)()  # a copy has none
    own = getattr(owner, "reset_parameters", None)
    while isinstance(own, functools.partial):
        own = own.func
    code = getattr(own, "__code__", None)
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code is not code and frame.f_code.co_name != "reset_parameters":
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def promising() -> Iterator[None]:
    """Let modules that are made inside have no values yet."""
    made: list[tuple[nn.Parameter, nn.Module]] = []

    def note(module: nn.Module, name: str, param: Any) -> None:
        if type(param) is nn.Parameter and param.is_meta:
            made.append((param, module))

    hook = register_module_parameter_registration_hook(note)
    try:
        with torch.device("meta"):
            yield
    finally:
        hook.remove()
        for param, module in made:
            param.__class__, param.__dict__["owner"] = Promised, weakref.ref(module)


def fulfil(module: nn.Module) -> None:
    """Let the parameters of a module be plain ones, because it is set up."""
    for param in module.parameters():
        if isinstance(param, Promised):
            param.__class__ = nn.Parameter  # pyrefly: ignore[bad-argument-type]
            param.__dict__.pop("owner", None)


def is_on_meta(module: nn.Module) -> bool:
    """Whether values of a module are made for its state."""
    return any(param.is_meta for param in module.parameters())


def values_of(module: nn.Module, device: torch.device, seed: int) -> dict[str, Any]:
    """Return the values of parameters and buffers by name, for a state on a device.

    Values on the ``meta`` device are made by ``reset_parameters`` of their module, or of the
    nearest one around it, when the state asks for a leaf, from a seed that is equal on all ranks,
    so that no rank ever holds all of them.
    """
    values: dict[str, Any] = {}
    names = first_names(module)
    makers: dict[str, nn.Module | None] = {}
    for prefix, owner in module.named_modules():
        around = makers.get(prefix.rpartition(".")[0])
        makers[prefix] = owner if callable(getattr(owner, "reset_parameters", None)) else around
        for key, x in [*owner._parameters.items(), *owner._buffers.items()]:
            if x is None or (name := names[id(x)]) in values:
                continue
            if not x.is_meta:
                values[name] = x.detach()
                continue
            if (maker := makers[prefix]) is None:
                raise OptionError(
                    "reset_parameters() makes the values of a module on meta; leaf "
                    f"{name!r} belongs to {type(owner).__name__}, which has no such method; "
                    "write the method, or make the module with its values, without empty_init= "
                    "or remote_device=",
                    leaf=name,
                )
            made = functools.partial(_made, maker, owner, key, name, zlib.crc32(prefix.encode()))
            values[name] = Deferred(name, x.detach(), lambda made=made: made(seed), device)
    return values


def _made(maker: nn.Module, owner: nn.Module, key: str, name: str, salt: int, seed: int) -> Tensor:
    """Make one value of a module, whose other values are made and dropped."""
    before = owner._parameters, owner._buffers
    held = {name: _empty(x) for name, x in {**before[0], **before[1]}.items()}
    parts = ({name: held[name] for name in values} for values in before)
    owner.__dict__["_parameters"], owner.__dict__["_buffers"] = parts
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(salt ^ seed)
            maker.reset_parameters()  # pyrefly: ignore[not-callable]
        found = {**owner._parameters, **owner._buffers}[key]
    finally:
        owner.__dict__["_parameters"], owner.__dict__["_buffers"] = before
    assert found is not None
    if found.is_floating_point() and bool(found.isnan().any()):
        raise OptionError(
            "reset_parameters() makes all values of a module on meta; got one of "
            f"{type(maker).__name__} that leaves elements of leaf {name!r} as they are; write the "
            "leaf there, or make the module with its values, without empty_init= or remote_device=",
            leaf=name,
        )
    return found.detach()


def _empty(x: Any) -> Any:
    """Return a tensor in memory in place of one on ``meta``, without numbers, and copy others."""
    if x is None:
        return None
    number = torch.nan if x.is_floating_point() or x.is_complex() else 0
    value = x.detach().clone()
    if x.is_meta:
        value = torch.full(x.shape, number, dtype=x.dtype, device="cpu")
    return nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value
