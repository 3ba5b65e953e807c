"""The calls of a live module, in training and without gradients."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zfun.collectives import Group
from zfun.evaluation import evaluate
from zfun.flat import Flat
from zfun.interop.engine._live import LiveModule
from zfun.interop.engine._values import EngineBuffers
from zfun.recipes import Precision, Zero, ZeroState
from zfun.transforms import Tape, cast

# As many functions as a recipe remembers.
_MAX_FUNCTIONS = 8


class Calls:
    """Runs functions that use a live module, each as one call.

    The order in which a function uses parameters is remembered by function: a step of the loop, the
    module, a part of the module that is called alone. ``take`` and ``check`` are methods of the
    engine for each backward pass: it gives them the gradients, and before that the tape.
    """

    def __init__(
        self,
        live: LiveModule,
        buffers: EngineBuffers,
        group: Group,
        precision: Precision,
        take: Callable[[Flat], None],
        check: Callable[[Tape], None],
        *,
        is_sharded: bool,
    ) -> None:
        self._live, self._group, self._is_sharded = live, group, is_sharded
        self._buffers = buffers
        self._take, self._check = _while_alive(take), _while_alive(check)
        self._dtype = dtype = precision.compute
        # Whether the module's own parameters are those with which it computes.
        self._is_plain = not is_sharded and dtype in (None, precision.param)
        self._run = self._cast(_run)
        self._uneven: Callable[[Any], Any] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the orders of use, because the layout changes."""
        self._functions: dict[Hashable, Callable[[Any, Any], Any]] = {}
        self._evaluation = evaluate(self._cast(self._function()), self._group)

    @property
    def is_inside(self) -> bool:
        """Whether a call runs, or a block that backward runs again."""
        return self._live.bound is not None or torch._C._current_graph_task_id() != -1

    @property
    def is_uneven(self) -> bool:
        """Whether the ranks evaluate different numbers of times."""
        return self._uneven is not None

    def record(
        self, recipe: Zero, state: ZeroState, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, Tape]:
        """Run a function in training; return the result and the tape."""
        self._buffers.look(trains=True)
        key = _key_of(fn)
        within = self._functions.pop(key, None) or self._function()
        self._functions[key] = within
        for old in list(self._functions)[:-_MAX_FUNCTIONS]:
            del self._functions[old]
        out, tape = recipe.record(within, state, (fn, args, kwargs))
        tape.deliver, tape.check = self._take, self._check
        tape.shown = self._shown(state)
        tape.mark_late(self._live.read_without_gradient)
        tape.hooked, hook = self._live.hooked, weakref.WeakMethod(self._live.hook)
        tape.hook = lambda name, grad: grad if (run := hook()) is None else run(name, grad)
        if self._is_sharded or self._live.read_without_gradient:
            self._live.remember(tape)
        return out, tape

    def _shown(self, state: ZeroState) -> dict[str, Tensor]:
        """Return the frozen leaves of the last call that are the memory of the state."""
        slots = () if state.frozen is None else state.frozen.layout.leaves
        found = ((slot, self._live.lent.get(slot.path)) for slot in slots)
        return {slot.path: x for slot, x in found if type(x) is Tensor and x.dtype == slot.dtype}

    def evaluate(
        self,
        state: ZeroState,
        values: Mapping[str, Any],
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a function without gradients, with whole values if there are some."""
        call = (fn, args, kwargs)
        self._buffers.look(trains=False)
        if self._is_plain:
            out = self._run({}, call)
        elif values:
            out = self._cast(self._function())(values, call)
        else:
            out = self._evaluation(state, call) if self._uneven is None else self._uneven(call)
        self._buffers.leave()
        return out

    def _cast(self, within: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Let a function compute in the dtype of training, where the recipe casts."""
        return within if self._dtype is None else cast(within, self._dtype)

    @contextlib.contextmanager
    def uneven(self, state: ZeroState) -> Iterator[None]:
        """Let the ranks evaluate different numbers of times, as a context."""
        if not self._is_sharded or self._uneven is not None:
            yield
            return
        with self._evaluation.uneven(state) as self._uneven:
            try:
                yield
            finally:
                self._uneven = None

    def _function(self) -> Callable[[Any, Any], Any]:
        """Return a new function of parameters and a call."""
        # Weak, because the graph of a call has the function, and the module the call's tensors.
        live_of, turns = weakref.ref(self._live), itertools.count(1)

        def within(params: Any, call: Any) -> Any:
            live, (fn, args, kwargs) = live_of(), call
            assert live is not None, "a call has its module"
            with live.lending(params, keeps=torch.is_grad_enabled(), turn=next(turns)):
                return fn(*args, **kwargs)

        return within


def _while_alive(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls a method, and does nothing when the object is gone."""
    ref = weakref.WeakMethod(method)
    return lambda value: None if (run := ref()) is None else run(value)


def _run(params: Any, call: Any) -> Any:
    del params
    fn, args, kwargs = call
    return fn(*args, **kwargs)


def _key_of(fn: Any) -> Hashable:
    """Return a key that is the same each time a loop makes and runs the same function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, types.MethodType):
        return getattr(fn.__func__, "__code__", fn.__func__), id(fn.__self__)
    return getattr(fn, "__code__", type(fn))
