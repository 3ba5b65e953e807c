"""The parameters of a part of a live module, as the module's own code reads them."""

from __future__ import annotations

import collections
import copy
import sys
import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from zfun.errors import CollectiveMismatch, OptionError
from zfun.transforms.call._lazy import LazyLeaf, tensor_of

# PEFT registers and removes a parametrization in each forward pass.
_REGISTER = register_parametrization.__code__
_SETATTR = nn.Module.__setattr__.__code__
_STATE_DICT = nn.Module.state_dict.__code__


def check_code(module: nn.Module) -> None:
    """Refuse parts whose code reads the memory of parameters, and not the attributes."""
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and next(part.parameters(), None) is not None:
            raise OptionError(
                "stage 3 gathers a parameter where Python code reads it; got a "
                f"torch.jit.ScriptModule{f' as {name!r}' if name else ''}; pass the module that "
                "torch.jit compiled, or use stage 2"
            )


def gathered_outside(gather: Callable[[str], Tensor], name: str) -> Tensor:
    """Return the whole value of a leaf that code reads outside of calls; every rank must call.

    ``module.state_dict()`` reads all parameters of a module, and many scripts call it on rank 0
    alone. So ``gather`` gets its name for the collectives, which pair with no other ones.
    """
    is_saved = _outermost(_STATE_DICT) is not None
    what = "state_dict()" if is_saved else f"a read of {name}"
    remedy = (
        "call state_dict() of a module of stage 3 on all ranks, and write on rank 0; or "
        "engine.state_dict(), or engine.save_16bit_model() of DeepSpeed's engine, likewise"
        if is_saved
        else "read a parameter of stage 3 on all ranks"
    )
    try:
        return gather(what)
    except CollectiveMismatch as error:
        where = {"rank": error.rank, "leaf": name, "collective": error.collective}
        raise CollectiveMismatch(f"{error}; {remedy}", **where) from error


class SavedTies:
    """Values of tied parameters that a ``state_dict()`` gathers once.

    So its entries share memory, as in torch, and a file has the value once.
    """

    def __init__(self) -> None:
        self._entries: Callable[[], Any] = lambda: None
        self._values: dict[int, Tensor | None] = {}

    def value(self, param: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        """Return what ``gather`` returns, or what it has returned for another name."""
        frame = _outermost(_STATE_DICT)
        entries = None if frame is None else frame.f_locals["destination"]
        # The dict that torch makes; ranks that read in one order all find a value here, or none.
        if frame is None or not isinstance(entries, collections.OrderedDict):
            return gather()
        if self._entries() is not entries:
            named = frame.f_locals["self"].named_parameters(remove_duplicate=False)
            counts = collections.Counter(id(x) for _, x in named)
            self._values = {key: None for key, count in counts.items() if count > 1}
            self._entries = weakref.ref(entries, lambda _: self.forget())
        if id(param) not in self._values:
            return gather()
        if (value := self._values[id(param)]) is None:
            value = self._values[id(param)] = gather()
        return value

    def forget(self) -> None:
        """Know that parameters have other values."""
        self._entries, self._values = lambda: None, dict[int, Tensor | None]()


def _outermost(code: CodeType) -> FrameType | None:
    """Return the frame of a function that has called this one, the first of several."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        found = frame if frame.f_code is code else found
        frame = frame.f_back
    return found


class _IsParam:
    """Lets a call's tensor be an ``nn.Parameter`` for ``isinstance``.

    Where code keeps it as an attribute of a module, it is none: no module registers a tensor with
    a graph.
    """

    def __bool__(self) -> bool:
        return sys._getframe(2).f_code is not _SETATTR

    def __reduce__(self) -> Any:
        return bool, (True,)


IS_PARAM: Any = _IsParam()


class LiveParameters(dict[str, Any]):
    """The parameters of one module; an item is the tensor of the call that runs.

    ``items()``, ``values()`` and ``in`` are those of the parameters themselves.
    """

    __slots__ = ("live", "names", "swapped")

    def __init__(self, params: Mapping[str, Any], live: Any) -> None:
        super().__init__(params)
        self.live = live
        # The names of those parameters that the state has.
        self.names = {key: name for key, x in params.items() if (name := live.name_of(x))}
        # Parameters in whose place another tensor stands for a while, and what a read gave then.
        self.swapped: dict[str, tuple[Any, Any]] = {}

    def __getitem__(self, key: str) -> Any:
        live = self.live
        bound = live.bound
        if bound is not None:
            name = self.names.get(key)
            if name is not None:
                value = bound[name]
                if type(value) is LazyLeaf:
                    value = tensor_of(value)
                value._is_param = IS_PARAM
                return live.read(name, value) if name in live.marked or live.is_special else value
        elif live.kept is not None:
            return live.of_call(super().__getitem__(key))
        return super().__getitem__(key)

    def __setitem__(self, key: str, param: Any) -> None:
        # Code that swaps tensors for a while, as functional_call does, gives back what it read.
        own, read = self.swapped.get(key, (None, None))
        if own is not None and _is_same(param, read):
            param = own
            del self.swapped[key]
        elif key in self.names and self.live.name_of(param) is None:
            own, read = super().__getitem__(key), self[key]
            if _is_same(param, read):
                return
            self.swapped[key] = own, read
        super().__setitem__(key, param)
        self.names.pop(key, None)
        if name := self.live.name_of(param):
            self.names[key] = name

    def __delitem__(self, key: str) -> None:
        if key in self.names:
            own, read = super().__getitem__(key), self[key]
            self.swapped[key] = own, read
            del self.names[key]
            if sys._getframe(2).f_code is _REGISTER:
                # register_parametrization() has called set_() of the tensor with itself.
                count = read._version - 1
                torch._C._autograd._unsafe_set_version_counter((read,), (count,))
        super().__delitem__(key)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(param, memo) for key, param in self.items()}

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)


def _is_same(value: Any, read: Any) -> bool:
    """Whether a value is what a read gave, or such a value without gradient."""
    if value is read or not (isinstance(value, Tensor) and isinstance(read, Tensor)):
        return value is read
    with torch._C.DisableTorchFunctionSubclass():
        has_gradient = value.requires_grad or read.requires_grad
        same_shape = not has_gradient and value.shape == read.shape
        return same_shape and value.data_ptr() == read.data_ptr()


def check_free(module: nn.Module) -> None:
    """Refuse a module that is live already."""
    for part in module.modules():
        if isinstance(part._parameters, LiveParameters):
            raise OptionError(
                f"a module has one engine; got a {type(module).__name__} that another engine "
                "holds; make a copy.deepcopy() of the module, on each simulated rank too"
            )


def live_of(module: nn.Module) -> Any:
    """Return the state of a module that is live as a whole; ``None`` for another module."""
    params = module._parameters
    if isinstance(params, LiveParameters) and params.live.module is module:
        return params.live
    return None


def alive(engine: Callable[[], Any], what: str) -> Any:
    """Return the engine that has something, or refuse one that is gone."""
    if (found := engine()) is None:
        raise OptionError(
            f"{what} is with an engine; got one whose engine is gone; keep the engine"
        )
    return found
