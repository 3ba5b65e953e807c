"""Make what a device's kernels make, where torch's shape functions say something else.

[Note: shape functions and kernels]
A plan runs torch's shape functions, not kernels. The two differ in two ways:

* ``"meta"`` takes the general path where a device has a kernel: torch composes the function of many
  operations there, each with a result that no device makes. :class:`OnCuda` calls the kernel's own
  operation instead, chosen by the rules of torch's dispatcher for CUDA.
* A shape function is stricter than the kernel, or names fewer bytes than the kernel allocates.
  :func:`shape_of` has these.

Members of the first kind have ``CompositeImplicitAutograd`` beside ``CUDA`` in torch's
``native_functions.yaml``, or ask ``is_cuda()`` in the composed function. Members of the second make
other storages for torch's own samples of operations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

F = torch.nn.functional
aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
# The elements to which CUDA's attention kernels pad rows.
_ROW = 8

_ATTENTION = {
    aten._scaled_dot_product_flash_attention: "flash, CUDA",
    aten._scaled_dot_product_cudnn_attention: "flash, cuDNN",
    aten._scaled_dot_product_efficient_attention: "memory-efficient, CUDA",
    aten._scaled_dot_product_flash_attention_for_cpu: "flash, CPU",
    # Of torch's composed attention alone.
    aten._safe_softmax: "whole matrices",
}


class AttentionCounter:
    """A count of the attention kernels that a :class:`Meter` sees, by name, in forward."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation."""
        name = _ATTENTION.get(func.overloadpacket)
        if name is not None and torch._C._current_graph_task_id() == -1:
            self._counts[name] = self._counts.get(name, 0) + 1

    def begin(self) -> None:
        """Count from here on."""
        self._counts.clear()

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Return the kernels and the calls since the beginning."""
        return tuple(self._counts.items())


def kernels_of(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which abstract tensors make what the kernels of a device make.

    Example:
        >>> type(kernels_of(torch.device("cpu"))).__name__
        'nullcontext'
    """
    return OnCuda() if device.type == "meta" else contextlib.nullcontext()


class OnCuda(TorchFunctionMode):
    """A context in which functions of tensors on ``"meta"`` make what they make on CUDA.

    Example:
        >>> x = torch.empty(1, 2, 4, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
        >>> with OnCuda():
        ...     type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__
        'ScaledDotProductFlashAttentionBackward0'
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types if torch._C._is_torch_function_enabled() else ():
            if kind.__torch_function__ is torch._C._disabled_torch_function_impl:
                continue
            # Leaves of stage 3 become tensors first, and call the function again.
            with self:
                out = kind.__torch_function__(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
        kernel = _ON_CUDA.get(func)
        if kernel is not None and (out := kernel(*args, **kwargs)) is not None:
            return out
        if func not in _GOES_ON and getattr(func, "__module__", None) != F.__name__:
            return func(*args, **kwargs)
        # The functions that this one calls come here too.
        with self:
            return _redispatch(func, types, args, kwargs)


def _call_body(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function without its question whether a mode or a subclass takes the call."""
    if isinstance(func, FunctionType):
        code, names = func.__code__, func.__globals__ | _NO_QUESTION
        body = FunctionType(code, names, func.__name__, func.__defaults__, func.__closure__)
        body.__kwdefaults__ = func.__kwdefaults__
        func = body
    return func(*args, **kwargs)


_NO_QUESTION = {
    f"has_torch_function{kind}": lambda *_: False for kind in ("", "_unary", "_variadic")
}
# torch has it from 2.13 on.
_redispatch = getattr(torch.overrides, "redispatch_function", _call_body)
# Functions that call others of these, beside all of torch.nn.functional. Backward recomputes.
_GOES_ON = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if any(x.device.type != "meta" for x in (query, key, value)):
        return None
    operands = query, key, value
    if not _is_fusible(operands, attn_mask):
        return None
    width, length = query.shape[-1], query.shape[2]
    heads, others = query.shape[1], key.shape[1]
    same_widths = width == value.shape[-1]
    grouped = enable_gqa and others == value.shape[1] and heads % others == 0
    same_heads = heads == others == value.shape[1]
    if (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dtype in _HALF
        and attn_mask is None
        and same_widths
        and width <= 256
        and (same_heads or grouped)
        and (not is_causal or length == key.shape[2])
    ):
        return _flash(operands, dropout_p, is_causal, scale)
    row = _ROW if query.dtype in _HALF else _ROW // 2
    if (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF, torch.float32)
        and same_heads
        and width % row == value.shape[-1] % row == 0
    ):
        return _efficient(operands, attn_mask, dropout_p, is_causal, scale)
    return None


def _is_fusible(operands: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> bool:
    """Return whether operands are such as all fused kernels take."""
    query, key, _ = operands
    return (
        all(x.dim() == 4 for x in operands)
        and len({x.dtype for x in operands}) == 1
        and len({len(x) for x in operands}) == 1
        and query.shape[-1] == key.shape[-1]
        and all(0 not in x.shape for x in operands)
        and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in operands)
        and (mask is None or mask.stride(-1) == 1)
    )


def _flash(
    operands: tuple[Tensor, Tensor, Tensor], dropout: float, causal: bool, scale: float | None
) -> Tensor:
    width = operands[0].shape[-1]
    padding = -width % _ROW
    if padding:
        query, key, value = (F.pad(x, (0, padding)) for x in operands)
    else:
        query, key, value = operands
    scale = width**-0.5 if scale is None else scale
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return out[..., :width] if padding else out


def _efficient(
    operands: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    query, key, value = operands
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, torch.full((), -torch.inf, device="meta").to(query.dtype))
        length = mask.shape[-1]
        if length % _ROW:
            mask = F.pad(mask, (0, -length % _ROW))[..., :length]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, is_trained, dropout, causal, scale=scale
    )[0]


def _dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor | None:  # noqa: A002
    # The mask has one byte for an element.
    is_fused = input.device.type == "meta" and train and 0 < p < 1 and input.numel()
    return torch.native_dropout(input, p, True)[0] if is_fused else None


def _wide(composed: Any) -> Callable[..., Tensor | None]:
    """A softmax in float32 of float16, which CUDA reads without a copy."""

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor | None:  # noqa: A002
        is_fused = input.dtype is torch.float16 and dtype is torch.float32
        return composed(input, dim, True) if is_fused and input.device.type == "meta" else None

    return kernel


class _OneKernel(torch.autograd.Function):
    """One kernel forward, which keeps the input and some rows, and one backward."""

    @staticmethod
    def forward(  # pyrefly: ignore [bad-override]
        ctx: Any, x: Tensor, weight: Tensor | None, rows: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    del eps
    if input.device.type != "meta" or (weight is not None and weight.dtype != input.dtype):
        return None
    rows = input.shape[: -len(normalized_shape)]
    return _OneKernel.apply(input, weight, input.new_empty(rows, dtype=torch.float32))


def _mish(input: Tensor) -> Tensor | None:  # noqa: A002
    return _OneKernel.apply(input, None, None) if input.device.type == "meta" else None


def _aliases(packet: Any, *names: Any) -> tuple[Any, ...]:
    return (packet, *(getattr(packet, overload) for overload in packet.overloads()), *names)


_ON_CUDA: Mapping[Any, Callable[..., Any]] = {
    name: kernel
    for kernel, names in {
        _attention: _aliases(aten.scaled_dot_product_attention, F.scaled_dot_product_attention),
        _dropout: (aten.dropout, aten.dropout.default, torch.dropout),
        _wide(aten._softmax): (aten.softmax, aten.softmax.int, torch.softmax, Tensor.softmax),
        _wide(aten._log_softmax): (
            aten.log_softmax,
            aten.log_softmax.int,
            torch.log_softmax,
            Tensor.log_softmax,
        ),
        _rms_norm: (aten.rms_norm, aten.rms_norm.default, torch.rms_norm),
        _mish: (aten.mish, aten.mish.default, torch._C._nn.mish),
    }.items()
    for name in names
}


def shape_of(func: Any, args: Any) -> Any:
    """Return an operation, or for abstract tensors a shape function in place of torch's own.

    Example:
        >>> aten = torch.ops.aten
        >>> shape_of(aten.mse_loss.default, (torch.ones(2), torch.ones(2))).__name__
        'mse_loss.default'
    """
    shape = _SHAPES.get(func)
    return func if shape is None or not isinstance(args[0], FakeTensor) else shape(func)


def _reduced(func: Any) -> Callable[..., Tensor]:
    """A loss that is computed without the reduction, in the memory of the result."""

    def shape(x: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = func(x, target, *args, **kwargs)
        whole = torch.broadcast_shapes(x.shape, target.shape)
        return out if out.dim() else out.new_empty(whole).as_strided((), ())

    return shape


def _folded(func: Any) -> Callable[..., Tensor]:
    """A sum of patches, in memory that is as long as the patches."""

    def shape(x: Tensor, *args: Any) -> Tensor:
        out = func(x, *args)
        longest = max(x.numel(), out.numel())
        return out.new_empty(longest).as_strided(out.shape, out.stride())

    return shape


def _grouped_product(func: Any) -> Callable[..., Tensor]:
    """A product of groups, of any dtype, with rows of whole 16 bytes."""
    del func

    def shape(
        a: Tensor,
        b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        del bias
        sizes = [a.shape[-2], b.shape[-1]]
        if a.dim() == b.dim():
            sizes.insert(0, len(a) if offs is None else len(offs))
        dtype = out_dtype or a.dtype
        elements = 16 // dtype.itemsize
        row = -(-sizes[-1] // elements) * elements
        return a.new_empty_strided(sizes, (sizes[-2] * row, row, 1)[-len(sizes) :], dtype=dtype)

    return shape


def _lstm_layer(func: Any) -> Callable[..., Any]:
    """A layer of the CPU's LSTM, which keeps a workspace for backward."""

    def shape(x: Tensor, *args: Any) -> Any:
        out, hidden, cell, empty = func(x, *args)
        size, is_trained = args[9], args[14]
        if not is_trained:
            return out, hidden, cell, empty
        # The steps come first here, whatever the module's batch_first.
        steps, rows, width = x.shape
        num_bytes = _workspace_bytes(steps, rows, width, size, x.dtype.itemsize)
        return out, hidden, cell, empty.new_empty(num_bytes)

    return shape


def _workspace_bytes(steps: int, rows: int, width: int, size: int, itemsize: int) -> int:
    """Return about as many bytes as oneDNN keeps: gates and states, in rows of cache lines."""

    def row(numel: int, itemsize: int = itemsize) -> int:
        line = 64 // itemsize
        numel = -(-numel // line) * line
        # Rows of equal addresses in the cache are moved apart.
        return (numel + (line if numel % 256 == 0 else 0)) * itemsize

    wide = max(width, size)
    parts = (
        steps * rows * row(4 * size),
        steps * rows * row(size),
        *[2 * (steps + 1) * rows * row(wide)] * 2,
        # The cells are float32 in any precision.
        2 * (steps + 1) * rows * row(wide, 4),
        steps * rows * 16 * size,
        rows * 16 * size,
    )
    return sum(-(-part // 4096) * 4096 for part in parts)


_SHAPES: Mapping[Any, Callable[[Any], Callable[..., Any]]] = {
    aten.mse_loss.default: _reduced,
    aten.smooth_l1_loss.default: _reduced,
    aten.binary_cross_entropy.default: _reduced,
    aten.soft_margin_loss.default: _reduced,
    aten.col2im.default: _folded,
    aten._grouped_mm.default: _grouped_product,
    aten.mkldnn_rnn_layer.default: _lstm_layer,
}
