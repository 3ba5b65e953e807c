"""Parameters of a live module, outside of calls.

A parameter stays the same object, an ``nn.Parameter`` with shape, dtype and device, in the groups
of optimizers and wherever the user holds it. An operation reads the value: below stage 3 the
parameter's own memory, at stage 3 a value that all ranks gather. An operation in place, also on
``.data``, writes the values of rank 0 into the state of all ranks: below stage 3 the ranks of one
host may share the memory of a parameter, so that each rank's own write would count several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zfun import tree
from zfun.errors import PlacementError
from zfun.interop._questions import NO_VALUES, accessors, changes_nothing


class _LiveTensor:
    """The operations of parameters and of their ``.data``."""

    # The LiveModule.
    _live: Any
    # The parameter: the object itself, or that of which the object is the data.
    _param: Any
    # The value of a .data from before another one was assigned.
    _own: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not args and "tensor" in kwargs:
            # Functions of torch.nn.init.
            args = [kwargs.pop("tensor")]
        first = args[0] if args else None
        if func in NO_VALUES:
            is_live = isinstance(first, LiveParameter)
            if is_live and (answer := _answer_of(first, func)) is not None:
                return answer
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, _LiveTensor):
            if func == _GET_DATA:
                return _data_of(first)
            if func == _SET_DATA:
                return _set_data(first, args[1])
            if changes_nothing(func, args, kwargs):
                return first
        # In this order, because a compiler knows no names of functions.
        writes = any(isinstance(x, _LiveTensor) for x in _several(first))
        if writes and (is_in_place(func) or kwargs.get("inplace") is True):
            return _in_place(func, first, args[1:], kwargs)
        _check(func, args)
        if any(isinstance(x, _LiveTensor) for x in _several(kwargs.get("out"))):
            return _into(func, args, kwargs)
        given = [_plain(x) for x in args], {key: _plain(x) for key, x in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*given[0], **given[1])
            rest = int(isinstance(first, _LiveTensor))
            _watch_others((args[rest:], kwargs), (given[0][rest:], given[1]), found)
            return _watched(func, first, *given, found) if rest else found


class LiveParameter(_LiveTensor, nn.Parameter):
    """A parameter of a live module."""

    @staticmethod
    def adopt(param: nn.Parameter, live: Any) -> None:
        """Make a live parameter of a parameter, which stays the same object."""
        if param.__dict__:
            live.marked.add(live.name_of(param))
        param.__class__ = LiveParameter
        param._live, param._param = live, param  # pyrefly: ignore[missing-attribute]

    @staticmethod
    def release(param: nn.Parameter) -> None:
        """Make a plain parameter of a live one."""
        for name in _OWN:
            delattr(param, name)
        param.__class__ = nn.Parameter

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in _OWN and name in self.__dict__:
            self._live.marked.add(_name_of(self))

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        with torch._C.DisableTorchFunctionSubclass():
            if not self._live.is_hidden(_name_of(self)):
                return repr(nn.Parameter(self.detach(), self.requires_grad))
            return f"LiveParameter({_name_of(self)}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(_copy_of(self), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        return nn.Parameter(_copy_of(self), self.requires_grad).__reduce_ex__(proto)


class LiveData(_LiveTensor, torch.Tensor):
    """The ``.data`` of a live parameter: writes reach the state."""

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return repr(self._param)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _copy_of(self)

    def __reduce_ex__(self, proto: Any) -> Any:
        return _copy_of(self).__reduce_ex__(proto)


def attributes_of(param: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that code has set on a live parameter."""
    return {key: x for key, x in param.__dict__.items() if key not in _OWN}


def leave_meta(param: nn.Parameter, device: torch.device) -> None:
    """Let a parameter on ``meta``, whose values are in a state, be on a device."""
    empty = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
    torch.utils.swap_tensors(param, nn.Parameter(empty, param.requires_grad))


def _name_of(value: Any) -> str:
    name = value._live.name_of(value._param)
    assert name is not None, "a live parameter has a name"
    return name


def _data_of(value: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = torch.Tensor._make_subclass(LiveData, value._param.detach())
    made._live, made._param, made._own = value._live, value._param, value._own
    made._live.alias(_name_of(made), made)
    return made


def _set_data(first: Any, new: Any) -> None:
    """Assign ``.data``; what ``.data`` gave before keeps the old value, as in torch."""
    is_live = isinstance(new, _LiveTensor)
    if is_live and new._own is None:
        if new._param is first._param:
            return
        raise PlacementError(
            "a parameter of an engine has memory of its own; got an assignment of leaf "
            f"{_name_of(new)!r}, or of its .data, to another .data, which would share the memory; "
            "assign a clone()",
            leaf=_name_of(new),
        )
    whole = _plain(new)
    with torch.no_grad():
        if aliases := first._live.aliases(_name_of(first)):
            own = _copy_of(aliases[0])
            for alias in aliases:
                alias._own = own
        _write(first, whole)
    if is_live and new._param is first:
        new._own = None
        first._live.alias(_name_of(first), new)


def _plain(value: Any) -> Any:
    """Return the plain tensor that an operation reads."""
    if isinstance(value, _LiveTensor):
        return _read(value)
    if type(value) in (list, tuple, dict):
        return tree.map(_plain, value)
    return value


@torch.no_grad()
def _copy_of(value: Any) -> Tensor:
    return _plain(value).detach().clone()


def _read(value: Any) -> Tensor:
    if value._own is not None:
        return value._own
    param, live = value._param, value._live
    is_data = value is not param
    found = live.of_call(param)
    if found is not param:
        return found.detach() if is_data else found
    name = _name_of(value)
    live.settle_views(name)
    if not live.is_hidden(name):
        with torch._C.DisableTorchFunctionSubclass():
            return param.detach() if is_data else param
    if is_data:
        with torch.no_grad():
            return live.outside(param, name)
    return live.outside(param, name)


def _write(value: Any, whole: Tensor) -> None:
    if value._own is not None:
        value._own.copy_(whole)
        return
    value._live.write(_name_of(value), whole)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether the name of a function says that it writes its first argument."""
    # An overload of an operator has its own name after a dot.
    name = _name(func).partition(".")[0]
    ends = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    return ends or name == "__setitem__"


def _several(first: Any) -> Sequence[Any]:
    """Return the tensors that an operation takes first or returns: one, or those of a list."""
    return first if isinstance(first, (list, tuple)) else (first,)


def _in_place(
    func: Callable[..., Any], first: Any, rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an operation in place on copies, and write the copies."""
    own = _several(first)
    if func == torch.Tensor.__setitem__ and isinstance(first, _LiveTensor):
        # As in `p[0] += 1`.
        first._live.give_back(rest[1])
    with torch._C.DisableTorchFunctionSubclass():
        has_grad = any(isinstance(x, LiveParameter) and x.requires_grad for x in own)
    # Functions of torch.nn.init switch gradients off themselves.
    is_init = getattr(func, "__module__", "") == nn.init.__name__
    if has_grad and torch.is_grad_enabled() and not is_init:
        raise RuntimeError(
            "a leaf Variable that requires grad is being used in an in-place operation; write "
            "under torch.no_grad()"
        )
    with torch.no_grad():
        whole = [_copy_of(x) if isinstance(x, _LiveTensor) else x for x in own]
        given = whole[0] if own is not first else whole
        result = func(given, *map(_plain, rest), **{k: _plain(x) for k, x in kwargs.items()})
        for x, value in zip(own, whole, strict=True):
            if isinstance(x, _LiveTensor):
                _write(x, value)
    return first if result is given else result


def _answer_of(first: Any, func: Callable[..., Any]) -> Any:
    """Return what a question about gradients gives in place of the parameter's own answer."""
    if func in _GRADS:
        return first._live.show_grads(first, is_read=func == _GET_GRAD)
    if func is torch.Tensor.register_hook:
        first._live.hooked.add(_name_of(first))
    return None


def _check(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuse functions that would miss the parameter, or share its memory."""
    first = args[0] if args else None
    if func is torch.autograd.grad:
        _check_in_call(args[1])
    elif not isinstance(first, _LiveTensor):
        return
    elif func is torch.Tensor.register_post_accumulate_grad_hook:
        refuse_hook(_name_of(first))
    elif (name := _name(func)) in MEMORY:
        _refuse_hidden(first, name)
    elif func is torch.Tensor.detach and sys._getframe(2).f_code is _NEW_PARAMETER:
        raise PlacementError(
            "a new parameter has memory of its own; got nn.Parameter() of leaf "
            f"{_name_of(first)!r} of an engine, or of its .data; pass a clone() of it, before you "
            "make the engine",
            leaf=_name_of(first),
        )
    elif func is torch.Tensor.view_as and sys._getframe(2).f_code is _NODE_OF:
        refuse_hook(_name_of(first), ON_NODES)


def _check_in_call(values: Sequence[Any]) -> None:
    """Refuse to differentiate the outputs of a call by parameters after the call."""
    for x in values:
        if isinstance(x, LiveParameter) and x._live.kept is not None and x._live.of_call(x) is x:
            raise PlacementError(
                "torch.autograd.grad() takes tensors that the loss has used, and a call uses "
                f"tensors of its own in place of parameters; got leaf {_name_of(x)!r} after a "
                "call; differentiate inside of forward, compute_loss() or engine.run(), or read "
                ".grad after backward()",
                leaf=_name_of(x),
            )


def refuse_hook(name: str, kind: str = "register_post_accumulate_grad_hook()") -> None:
    """Refuse a hook that autograd would not call, because gradients do not come to ``.grad``."""
    raise PlacementError(
        f"backward adds the gradients of a parameter up outside of .grad; got a hook of {kind} on "
        f"leaf {name!r}, which would not be called; use register_hook(), or read .grad between "
        "backward() and the step",
        leaf=name,
    )


def _into(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation with ``out=`` on copies, and write the copies."""
    out = kwargs["out"]
    whole = [_copy_of(x) if isinstance(x, _LiveTensor) else x for x in _several(out)]
    rest = {key: _plain(value) for key, value in kwargs.items() if key != "out"}
    func(*map(_plain, args), **rest, out=whole[0] if isinstance(out, Tensor) else tuple(whole))
    for x, value in zip(_several(out), whole, strict=True):
        if isinstance(x, _LiveTensor):
            _write(x, value)
    return out


def _watched(func: Callable[..., Any], first: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """Return the result of an operation, and notice later writes to the parameter's memory."""
    name, live, read = _name_of(first), first._live, args[0]
    if live.bound is not None or first._own is not None:
        return found
    values = _views_in((read,) if func in _ARRAYS else _several(found), read)
    if not values or func in _ARRAYS or func is torch.Tensor.detach:
        for x in values:
            live.watch(name, x)
        return found
    # Memory that ranks share stays as it is, because each rank would write.
    root = live.root(name, read)
    return found if root is read else func(root, *args[1:], **kwargs)


def _watch_others(args: Any, given: Any, found: Any) -> None:
    """Notice later writes to the memory of parameters that an operation does not take first."""
    if torch.compiler.is_compiling():
        return
    # Such operations are no detach(), so autograd knows what is a view.
    views = [
        x
        for x in _several(found)
        if isinstance(x, Tensor) and (x._is_view() or any(x is y for y in given[0]))
    ]
    if not views:
        return
    for x, read in zip(tree.leaves(args), tree.leaves(given), strict=True):
        if isinstance(x, _LiveTensor) and x._own is None and x._live.bound is None:
            for value in _views_in(views, read):
                x._live.watch(_name_of(x), value)


def _may_be_view(x: Any) -> bool:
    """Whether a value may be a view that code may write."""
    is_plain = isinstance(x, Tensor) and not isinstance(x, _LiveTensor)
    # A detached tensor is no view for autograd, but has the same memory.
    return is_plain and not (x.requires_grad and torch.is_grad_enabled())


def _views_in(values: Sequence[Any], read: Tensor) -> list[Tensor]:
    return [x for x in values if _may_be_view(x) and _memory_of(x) == _memory_of(read)]


def _memory_of(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _refuse_hidden(value: Any, name: str) -> None:
    path = _name_of(value)
    if value._live.is_hidden(path):
        raise PlacementError(
            f"a parameter of stage 3 has no memory of its own; got {name}() of leaf {path!r} "
            "outside of a call, or of an item of parameters() in an autograd.Function; read the "
            "attribute of the module inside of forward or engine.run(), where it is a plain tensor",
            leaf=path,
        )


_OWN = ("_live", "_param")
# Kernels of other libraries ask for these.
MEMORY = frozenset(["data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__"])
_ARRAYS = frozenset([torch.Tensor.numpy, torch.Tensor.__array__])
_NEW_PARAMETER = nn.Parameter.__new__.__code__
# Hooks of the node behind a parameter, and the function with which torch asks for the node.
ON_NODES = "register_multi_grad_hook() or get_gradient_edge()"
_NODE_OF = getattr(
    getattr(torch.autograd.graph, "_get_grad_fn_or_grad_acc", None), "__code__", None
)
_GET_DATA = torch.Tensor.data.__get__  # pyrefly: ignore[missing-attribute]
_SET_DATA = torch.Tensor.data.__set__  # pyrefly: ignore[missing-attribute]
_GRADS = accessors("grad")
_GET_GRAD = torch.Tensor.grad.__get__  # pyrefly: ignore[missing-attribute]
