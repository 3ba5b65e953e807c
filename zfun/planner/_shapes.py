"""The results of operations on tensors without numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from typing_extensions import TypeIs

from zfun.errors import ZfunError
from zfun.planner._kernels import shape_of

_aten = torch.ops.aten
_NO_DISPATCH = torch._C._DisableTorchDispatch
# Views and copies: most of the operations of a step.
_VIEWS = {
    _aten._unsafe_view.default,
    _aten.as_strided.default,
    _aten.copy_.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}


class Shapes:
    """A function that calls operations on fake tensors, for a fraction of what torch's mode costs.

    Views go to torch's shape functions at once. Other results of one storage are remembered by the
    shapes of the operands. An unknown number is 1, and an unknown condition is true.

    Example:
        >>> from zfun import ops
        >>> with ops.fake_mode():
        ...     x = torch.empty(2, 3)
        ...     Shapes()(torch.ops.aten.t.default, (x,), {}).shape
        torch.Size([3, 2])
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[Any, ...]] = {}
        self._fields: dict[tuple[Any, torch.device], dict[str, Any]] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation."""
        if func in _VIEWS and not kwargs and _is_at_one_place(args):
            first = args[0]
            mode, device = first.fake_mode, first.fake_device
            is_meta = device.type == "meta"
            with _NO_DISPATCH() if is_meta else in_kernel_invocation_manager(mode):
                out = func(*args)
            return out if out is first else self._faked(mode, out, device)
        key = _key(func, args, kwargs) if _makes_one(func) else None
        if key in self._results:
            mode, device, shape, stride, dtype = self._results[key]
            with _NO_DISPATCH():
                out = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return self._faked(mode, out, device)
        out = _answered(func, args, kwargs)
        if key is not None and _is_whole(out, args):
            self._results[key] = out.fake_mode, out.fake_device, out.shape, out.stride(), out.dtype
        return out

    def _faked(self, mode: FakeTensorMode, x: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor of a storage, as ``FakeTensor`` does in four times the time."""
        fields = self._fields.get((mode, device))
        if fields is None:
            fields = self._fields[mode, device] = FakeTensor(mode, x, device).__dict__
        # A tensor on meta tells the device itself; others ask the meter each time.
        asks = device.type != "meta"
        out = Tensor._make_subclass(
            FakeTensor, x, dispatch_device=asks, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(out)
        out.__dict__.update(fields)
        return out


def _answered(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        out = shape_of(func, args)(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_sparse and not len(out._values()):
            raise ZfunError(
                "a plan follows sparse gradients up to a dense sum; got a sparse result of "
                f"{func.overloadpacket.__name__}(), for which torch knows no number of rows; take "
                "sparse=False"
            )
        return out
    except DynamicOutputShapeException as error:
        raise ZfunError(
            "a plan needs shapes that do not depend on data; got "
            f"{func.overloadpacket.__name__}(), whose result has as many elements as the data "
            "say; take where() or a weight of zero in its place"
        ) from error
    except DataDependentOutputException:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return True
        dtype = args[0].dtype
        return dtype is torch.bool or (1.0 if dtype.is_floating_point else 1)


def _is_at_one_place(args: Any) -> bool:
    """Whether the operands are fake tensors of one device, without known numbers."""
    places = {x.fake_device if _is_plain(x) else None for x in args if isinstance(x, Tensor)}
    return len(places) == 1 and None not in places


def _is_plain(x: Any) -> TypeIs[FakeTensor]:
    return isinstance(x, FakeTensor) and x.constant is None and x.layout is torch.strided


@functools.cache
def _makes_one(func: Any) -> bool:
    """Whether an operation returns one tensor, of a storage of its own as far as is declared."""
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor" and not returns[0].alias_info


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return all that a shape depends on, or ``None`` where that is more than shapes."""
    # A function without operands makes a real tensor where an optimizer is probed with numbers.
    is_real = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    parts = [func, torch.get_default_dtype(), is_real]
    try:
        _describe(parts, args)
        _describe(parts, [x for pair in kwargs.items() for x in pair])
        key = tuple(parts)
        hash(key)
    except TypeError:
        return None
    return key


def _describe(parts: list[Any], args: Any) -> None:
    for x in args:
        if isinstance(x, Tensor):
            if not _is_plain(x) or x.dtype.is_complex:
                raise TypeError
            parts += x.shape, x.stride(), x.dtype, x.fake_device
        elif isinstance(x, (list, tuple)):
            parts.append(len(x))
            _describe(parts, x)
        else:
            # 1, 1.0 and True are equal.
            parts += type(x), x


def _is_whole(out: Any, args: Any) -> bool:
    """Whether a result fills a storage that no operand has."""
    if not _is_plain(out) or out.dtype.is_complex:
        return False
    storage = out.untyped_storage()
    return storage.nbytes() == out.numel() * out.dtype.itemsize and not any(
        isinstance(x, Tensor) and x.untyped_storage()._cdata == storage._cdata for x in args
    )
