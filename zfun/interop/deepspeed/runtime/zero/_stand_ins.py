"""Stand-ins for partitioned parameters in their modules.

[Note: stand-ins]
A partitioned parameter keeps its place in the module, and its shape: its data are one NaN (of
integers the least one), expanded to the shape. Outside of ``GatheredParameters`` it is
:class:`Partitioned`: a read gathers, one parameter at a time, and a write is refused. DeepSpeed
puts an empty tensor there, so reads see nothing, and writes are lost without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zfun import tree
from zfun.collectives import Group
from zfun.errors import PlacementError
from zfun.interop._questions import NO_VALUES, changes_nothing
from zfun.interop.engine._parameter import MEMORY, is_in_place
from zfun.interop.engine._reads import gathered_outside

OWNER = "_zfun_owner"


class TensorOwner(Protocol):
    """Where values are; the ranks of ``group`` hold pieces, and call each method together.

    ``gathered`` returns whole values, and ``put`` takes new ones, the same on every rank. ``show``
    lets parameters be plain ones with values, which a rank may write alone, until ``hide``.
    """

    group: Group

    def gathered(self, params: Sequence[nn.Parameter]) -> list[Tensor]: ...

    def put(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None: ...

    def show(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None: ...

    def hide(self, params: Sequence[nn.Parameter]) -> None: ...


def told(param: nn.Parameter) -> Any:
    """Return a parameter as an object with any attributes."""
    return param


def is_partitioned(param: Any) -> bool:
    """Return whether the values of a parameter are with an owner."""
    return getattr(param, OWNER, None) is not None


def owner_of(param: nn.Parameter) -> TensorOwner:
    """Return the owner of a partitioned parameter."""
    return getattr(param, OWNER)


class _Away(Tensor):
    """Values that are with an owner: a read gathers, on every rank, and a write is refused."""

    # The parameter whose values a detach() or .data is; none for a parameter.
    _zfun_source: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in NO_VALUES:
                return func(*args, **kwargs)
            if changes_nothing(func, args, kwargs):
                return args[0]
            if func is torch._has_compatible_shallow_copy_type and args[0] is args[1]:
                return True
            if func == _SET_DATA and _has_same_values(*args):
                return None
            if func in _SAME_VALUES:
                made = torch.Tensor._make_subclass(_Away, args[0])
                made._zfun_source = _source_of(args[0])
                return made
        return _read(func, args, kwargs)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"{type(self).__name__.strip('_')}({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain(self).detach().clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain(self).__reduce_ex__(proto)


class WholeValue(Tensor):
    """A gathered value of a partitioned parameter, or a view of one: a write is refused.

    The write would reach this copy alone.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _read(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain(self).detach().clone()

    def __reduce_ex__(self, proto: Any) -> Any:
        return _plain(self).__reduce_ex__(proto)


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operation makes of whole values, or refuse a write."""
    own = [x for x in tree.leaves((args, kwargs)) if isinstance(x, _KINDS)]
    if _is_refused(func, args, kwargs, own):
        raise _refusal(func, own)
    # In the order of the arguments, each once.
    values = {id(x): _plain(x) for x in own}
    versions = [x._version for x in values.values()]
    swap = lambda x: values.get(id(x), x) if isinstance(x, _KINDS) else x
    args, kwargs = tree.map(swap, (tuple(args), dict(kwargs)))
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
        if versions != [x._version for x in values.values()]:
            raise _refusal(func, own)
        memory = {x.untyped_storage()._cdata for x in values.values()}
        seal = functools.partial(_sealed, memory=memory)
        # Rows, in a loop over a tensor.
        return map(seal, found) if isinstance(found, Iterator) else tree.map(seal, found)


def _is_refused(func: Any, args: Any, kwargs: Any, own: Sequence[Tensor]) -> bool:
    """Return whether an operation writes, or asks a stand-in for more than values."""
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__") or func in _NO_READS:
        return True
    if name in MEMORY:
        return any(isinstance(x, _Away) for x in own)
    written = [kwargs.get("out")]
    if is_in_place(func) or kwargs.get("inplace") is True:
        # Functions of torch.nn.init have a keyword.
        written.append(kwargs.get("tensor", args[0] if args else None))
    return any(isinstance(x, _KINDS) for x in tree.leaves(written))


def _sealed(found: Any, memory: set[int]) -> Any:
    """Return a result of a read; one with the memory of a whole value takes no writes."""
    if isinstance(found, np.ndarray):
        found.flags.writeable = False
    elif isinstance(found, Tensor) and found.untyped_storage()._cdata in memory:
        return found.as_subclass(WholeValue)
    return found


def _refusal(func: Any, own: Sequence[Tensor]) -> PlacementError:
    return PlacementError(
        "a partitioned parameter is written, and has memory, where all ranks have it; got "
        f"{getattr(func, '__name__', func)}() of one of shape {tuple(own[0].shape)}, or of a value "
        "read from it; write `with zero.GatheredParameters(param, modifier_rank=0):` around it, "
        "on every rank"
    )


def _source_of(value: Any) -> Any:
    """Return the parameter that a stand-in belongs to."""
    return value if value._zfun_source is None else value._zfun_source


def _plain(value: Any) -> Tensor:
    """Return the values of a stand-in, or of a value that was read; every rank must call."""
    if isinstance(value, WholeValue):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(Tensor)
    source = _source_of(value)
    if not isinstance(source, Partitioned):
        # An engine or a context has the parameter by now.
        return source.detach()
    owner: Any = owner_of(source)
    gather = lambda what: owner.gathered([source], what)[0]
    whole = gathered_outside(gather, f"parameter {told(source).ds_id}")
    if value is source and source.requires_grad and torch.is_grad_enabled():
        whole.requires_grad_().register_hook(_refuse_grad)
    return whole


def _refuse_grad(grad: Tensor) -> None:
    raise PlacementError(
        "a partitioned parameter has gradients in an engine; got backward() of a read before "
        f"initialize(), for a parameter of shape {tuple(grad.shape)}; call the engine that "
        "initialize() returns, or read under torch.no_grad()"
    )


def _has_same_values(first: Any, other: Any) -> bool:
    is_away = isinstance(first, _Away) and isinstance(other, _Away)
    return first is other or (is_away and first.data_ptr() == other.data_ptr())


class Partitioned(_Away, nn.Parameter):
    """A parameter whose values are with an owner; a copy is whole, and every rank must make it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = nn.Parameter(_plain(self), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        with torch.no_grad():
            return nn.Parameter(_plain(self), self.requires_grad).__reduce_ex__(proto)


_KINDS = (_Away, WholeValue)
# They keep something on the parameter, or ask for its memory.
_NO_READS = frozenset(
    [
        torch.Tensor.backward,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.module_load,
        torch.Tensor.__cuda_array_interface__.__get__,
        torch.autograd.grad,
    ]
)
_GET_DATA = Tensor.data.__get__  # pyrefly: ignore[missing-attribute]
_SET_DATA = Tensor.data.__set__  # pyrefly: ignore[missing-attribute]
_SAME_VALUES = (_GET_DATA, Tensor.detach, Tensor.detach_)
