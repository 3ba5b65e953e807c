"""Methods of a live module that the engine runs, and ``torch.compile`` of its blocks."""

from __future__ import annotations

import contextlib
import copy
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule

from zfun import ops
from zfun.errors import ZfunError


class _HasNoCode(ZfunError, AttributeError):
    """An error of zfun that ``hasattr`` takes for an absent name."""


class LiveMethod:
    """A method of a live module, or of a part, that a method of the engine runs."""

    def __init__(
        self, module: nn.Module, name: str, run: Callable[..., Any], live: Any, *first: Any
    ) -> None:
        self.module, self.name, self.is_attribute = module, name, name in module.__dict__
        self._own: Any = getattr(module, name)
        self._run, self._live, self._first = weakref.WeakMethod(run), live, first

    @property
    def own(self) -> Any:
        """The module's own method."""
        return self._own_of(self.module)

    __wrapped__ = own

    def _own_of(self, module: nn.Module) -> Any:
        """Return the method of a module or a copy; code may have patched or swapped the class."""
        if isinstance(self._own, NormForward) and module is not self.module:
            return self._own.bound(module)
        if self.is_attribute or not isinstance(self._own, types.MethodType):
            return self._own
        function = getattr(type(module), self.name)
        if module is not self.module:
            return types.MethodType(function, module)
        if self._own.__func__ is not function:
            self._own = types.MethodType(function, module)
        return self._own

    @ops.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run()
        return self.own(*args, **kwargs) if run is None else run(*self._first, *args, **kwargs)

    def of_copy(self, replace: Callable[[Any], Any]) -> Any:
        """Return the method of a bound copy of the module; see :func:`zfun.functional`."""
        return replace(self.own)

    def __getattr__(self, name: str) -> Any:
        if name in ("__code__", "__globals__"):
            raise _HasNoCode(
                "torch.export and torch.jit.script take a plain module; got one that an engine "
                "runs; pass copy.deepcopy() of the module, or call close() of the engine first"
            )
        raise AttributeError(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the method of the copy of the module."""
        own = self.own
        if isinstance(own, types.MethodType):
            return types.MethodType(own.__func__, memo.get(id(own.__self__), own.__self__))
        return copy.deepcopy(own, memo)

    def __reduce__(self) -> Any:
        own = self.own
        if isinstance(own, types.MethodType):
            return getattr, (own.__self__, own.__name__)
        return copy.copy, (own,)


class LiveForward(LiveMethod):
    """The ``forward`` of a part of a live module: outside of calls, a call of the engine.

    It runs uncompiled, if a script compiles the module when it is live; see ``adopt_compiled``.
    """

    @ops.uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._live.runs:
            return self.own(*args, **kwargs)
        # A copy by its attributes, such as copy.copy() makes, has this method too.
        frame = sys._getframe(1)
        module = frame.f_locals["self"] if frame.f_code in _CALLS else self.module
        own, run = self._own_of(module), self._run()
        is_own = module is self.module
        is_call = run is not None and self._live.bound is None and (is_own or self._has(module))
        self._live.runs = is_own  # a copy's parts may be copies too
        try:
            return run(own, *args, **kwargs) if is_call else own(*args, **kwargs)
        finally:
            self._live.runs = False

    def _has(self, module: nn.Module) -> bool:
        """Whether a copy has parameters of the engine."""
        return any(getattr(x._parameters, "live", None) is self._live for x in module.modules())


# The code of nn.Module that calls forward, with hooks or without.
_CALL = nn.Module._call_impl.__code__
_CALLS = {_CALL, *(x for x in _CALL.co_consts if isinstance(x, types.CodeType))}


def compile_blocks(module: nn.Module, **options: Any) -> None:
    """Compile the repeated blocks of a module, or the whole module where no block repeats.

    Blocks are compiled one by one, so that stage 3 gathers one block at a time, and code that was
    compiled for one block serves the others.
    """
    lists = [
        part
        for part in module.modules()
        if isinstance(part, nn.ModuleList) and len(part) > 1 and len({type(x) for x in part}) == 1
    ]
    for block in [block for part in lists for block in part] or [module]:
        if not isinstance(block.forward, CompiledForward):
            block.forward = CompiledForward(block, torch.compile(block.forward, **options))


def adopt_compiled(module: nn.Module) -> None:
    """Let code that ``torch.compile`` made of parts of a module get plain tensors."""
    for part in list(module.modules()):
        if isinstance(part, OptimizedModule):
            part.forward = CompiledForward(part, part.forward)
        elif part._compiled_call_impl is not None:
            compiled, part._compiled_call_impl = part._compiled_call_impl, None
            part.forward = CompiledForward(part, compiled, is_call=True)


class CompiledForward:
    """The compiled ``forward`` of a block, which gets plain tensors as parameters.

    ``is_call`` says that the code calls ``block.forward`` by itself.
    """

    is_whole = True

    def __init__(self, block: nn.Module, compiled: Any, *, is_call: bool = False) -> None:
        self.own = self.__wrapped__ = block.forward
        self._block, self._compiled, self._is_call = block, compiled, is_call
        self._modes: set[bool] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = torch.is_grad_enabled()
        with self._plain(), contextlib.ExitStack() as stack:
            if mode not in self._modes:
                self._modes.add(mode)
                stack.enter_context(warnings.catch_warnings())
                # While Dynamo traces, it asks for the .grad of every tensor.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
            return self._compiled(*args, **kwargs)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Let the parts of the block hold the tensors of the call."""
        parts = list(self._block.modules())
        live = [(x, x._parameters) for x in parts if hasattr(x._parameters, "live")]
        entry = self._block.__dict__.get("forward")
        try:
            for part, params in live:
                part.__dict__["_parameters"] = {key: params[key] for key in params}
            if self._is_call:
                self._block.__dict__["forward"] = self.own
            yield
        finally:
            for part, params in live:
                part.__dict__["_parameters"] = params
            if self._is_call:
                self._block.__dict__["forward"] = entry

    # As for other methods of live modules.
    of_copy = LiveMethod.of_copy
    __deepcopy__ = LiveMethod.__deepcopy__
    __reduce__ = LiveMethod.__reduce__


class NormForward:
    """The ``forward`` of a norm with narrow parameters, whose statistics stay wide.

    torch's kernels take statistics of the dtype of the parameters alone. So a call has rounded
    ones, the numbers of a module that was cast as a whole, as by DeepSpeed.
    """

    def __init__(self, norm: Any, own: Any) -> None:
        self.own, self._norm = own, norm

    @ops.uncompiled
    def __call__(self, x: Tensor) -> Tensor:
        norm, held = self._norm, self._norm._buffers
        wide = {name: held[name] for name in ("running_mean", "running_var") if name in held}
        if not (wide and x.dtype == norm.weight.dtype != norm.running_mean.dtype):
            return self.own(x)
        try:
            held |= {name: buffer.to(x.dtype) for name, buffer in wide.items()}
            out = self.own(x)
            for name, buffer in wide.items() if norm.training else ():
                buffer.copy_(held[name])
            return out
        finally:
            held |= wide

    def bound(self, norm: Any) -> Any:
        """Return the method of a copy of the norm."""
        own = self.own
        if isinstance(own, types.MethodType):
            own = types.MethodType(own.__func__, norm)
        return NormForward(norm, own)

    def of_copy(self, replace: Callable[[Any], Any]) -> Any:
        """Return the method of a bound copy of the module; see :func:`zfun.functional`."""
        return NormForward(replace(self._norm), replace(self.own))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the method of the copy of the module, which has narrow parameters too."""
        own = LiveMethod.__deepcopy__(self, memo)  # pyrefly: ignore[bad-argument-type]
        return NormForward(memo.get(id(self._norm), self._norm), own)

    __reduce__ = LiveMethod.__reduce__
