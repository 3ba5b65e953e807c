"""A module that reads its parameters from a state.

[Note: live modules]
The user's own module is the model. Below stage 3 its parameters are views of the state. At stage 3
they are *hidden*: no rank has them whole, and an operation gathers.

While a call runs, the module reads the tensors of the call: ``_parameters`` of each module in the
tree is a :class:`LiveParameters`, whose items are the tensors with a graph into the buckets. The
attribute is a plain tensor, so that an ``autograd.Function``, a parametrization and a kernel of
another library take it. At stage 3 the read gathers, by the schedule of the call, and the release
follows the schedule too. A block that backward runs again reads the tensors of the call as well.

Outside of calls an attribute is the ``nn.Parameter`` itself, as code expects that ties, freezes or
assigns parameters; see ``_parameter``. A gradient of such a parameter, or of a value that an
operation outside of calls has gathered, is a *stray* gradient: autograd adds it to ``.grad``, and
the step sums it over the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zfun import ops
from zfun.errors import PlacementError
from zfun.interop.engine._methods import LiveForward, LiveMethod
from zfun.interop.engine._parameter import LiveParameter, attributes_of
from zfun.interop.engine._reads import (
    IS_PARAM,
    LiveParameters,
    SavedTies,
    alive,
    check_code,
    gathered_outside,
)
from zfun.interop.engine._watched import CallSums, WatchedValues, call_write, lost_write, refuse_old
from zfun.transforms import Tape
from zfun.transforms.call._lazy import LazyLeaf, is_closed, tensor_of

# A call with reentrant checkpoints, whose results may be gone, is remembered until the step.
_MAX_CALLS = 64


class LiveModule:
    """The state of a live module; see [Note: live modules].

    Args:
        module: the module.
        params: the parameters of the module by name.
        owner: the engine with the values.
        extra: parameters of the state that the module does not have, which stay plain.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Mapping[str, nn.Parameter],
        owner: Any,
        extra: Mapping[str, nn.Parameter],
        *,
        hides: bool,
    ) -> None:
        if hides:
            check_code(module)
        # The tensors of the call that runs, by name.
        self.bound: Mapping[str, Any] | None = None
        # Values that the call has written, by name, and whether it may write.
        self._written, self._may_write = dict[str, Tensor](), False
        self.runs = False  # whether the forward of a part runs
        # Those of the call whose blocks backward runs again: the last one, or that of a pass.
        self.kept: Mapping[str, Any] | None = None
        # Those of the last call with a graph, without what the call has written.
        self.lent: Mapping[str, Any] = {}
        self._calls: Any = weakref.WeakKeyDictionary()
        # The names that a call has read with gradients off.
        self.read_without_gradient: set[str] = set()
        # At stage 3, tensors with a gradient that were gathered outside of calls, by name.
        self.strays: dict[str, Tensor] = {}
        # The names of parameters with attributes of code; what else the tensors of calls have.
        self.marked, self.marks = set[str | None](), dict[str, Mapping[str, Any]]()
        # The names of parameters that have or had hooks.
        self.hooked = {name for name, x in params.items() if x._backward_hooks}
        self.module, self._owner = module, weakref.ref(owner)
        self.keeper: Any = None  # the owner, while the module keeps it
        self.names = {id(param): name for name, param in params.items()}
        self._params, self._shown = dict(params), {**params, **extra}
        self.known = {id(x): x for x in module.parameters()}  # also quantised weights, whole
        self._methods, self._quiet, self._hidden = {"zero_grad"}, set[str](), set[str]()
        self._versions: dict[str, int] = {}
        self._watched, self._ties = WatchedValues(), SavedTies()
        self._aliases: dict[str, list[weakref.ref[Any]]] = {}
        # The names of strays with an old value.
        self._stale: set[str] = set()
        # In a call that is checked for writes, what it has read, by name.
        self._sums: CallSums | None = None
        for part in module.modules():
            if part._parameters or part is module:  # Models share parts without parameters.
                part.__dict__["_parameters"] = LiveParameters(part._parameters, self)
        for param in params.values():
            LiveParameter.adopt(param, self)

    def enter(self, run: Callable[..., Any], zero_grad: Callable[..., Any]) -> None:
        """Let calls of the module, and of parts with parameters, be calls of an engine."""
        inside = {
            id(x)
            for part in self.module.modules()
            if getattr(part.forward, "is_whole", False)
            for x in part.modules()
            if x is not part
        }
        for part in self.module.modules():
            # Compiled code runs the parts of a block as they are.
            if id(part) not in inside and next(part.parameters(), None) is not None:
                part.forward = LiveForward(part, "forward", run, self)
        self.module.__dict__["zero_grad"] = LiveMethod(self.module, "zero_grad", zero_grad, self)

    def wrap(self, name: str, run: Callable[..., Any]) -> None:
        """Let a method of the module be one of an engine, which is called with the module's own."""
        own = getattr(self.module, name)
        self.module.__dict__[name] = LiveMethod(self.module, name, run, self, own)
        self._methods.add(name)

    def release(self) -> None:
        """Let the module be a plain one again, with the values that its parameters have."""
        self.leave("forward", *self._methods)
        for param in self._params.values():
            LiveParameter.release(param)
        for part in self.module.modules():
            part.__dict__["_parameters"] = dict(part._parameters.items())
        self._watched = WatchedValues()

    def leave(self, *names: str) -> None:
        """Let methods of the module and of its parts be plain ones again."""
        for part in self.module.modules():
            for name in names:
                entry = part.__dict__.get(name)
                if isinstance(entry, LiveMethod):
                    del part.__dict__[name]
                    if entry.is_attribute:
                        setattr(part, name, entry.own)

    @contextlib.contextmanager
    def lending(self, tensors: Mapping[str, Any], *, keeps: bool, turn: int = 0) -> Iterator[None]:
        """Let the module read these tensors, which backward may read later if it ``keeps`` them.

        ``turn`` counts the calls of a function; they may write frozen leaves until :meth:`settle`.
        """
        before = self.bound, self._may_write
        self.bound, self._may_write = tensors, turn > 0
        if turn:
            self._written.clear()
        # Whether a read refuses what the call has written around the parameter. The check reads
        # all values, so later calls are checked seldom.
        self._sums = CallSums() if turn.bit_count() == 1 else None
        quiet = self._quiet
        self.read_without_gradient = set()
        with torch._C.DisableTorchFunctionSubclass():
            self._quiet = {name for name, x in self._params.items() if not x.requires_grad}
        try:
            yield
            if self._sums is not None:
                self._sums.check()
        finally:
            now, self._sums = self.bound, None
            self.bound, self._may_write = before
            if keeps:
                self.kept, self.lent = now, tensors
            else:
                # Blocks that backward runs again belong to the call before.
                self._quiet = quiet

    def hook(self, name: str, grad: Tensor) -> Tensor:
        """Return what the hooks, which a parameter has now, make of a gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            hooks = list((self._params[name]._backward_hooks or {}).values())
        for hook in hooks:
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def remember(self, tape: Tape) -> None:
        """Know the tensors of the last call, for passes that come after other calls."""
        if len(self._calls) >= _MAX_CALLS:
            del self._calls[next(iter(self._calls))]
        self._calls[tape] = self.kept

    def resume(self, tape: Tape) -> None:
        """Let blocks that backward runs again belong to the call of a tape."""
        self.kept = self._calls.get(tape, self.kept)

    def read(self, name: str, value: Tensor) -> Tensor:
        """Return the tensor of a call, with the attributes that code has set on the parameter."""
        if self._sums is not None and not ops.is_abstract(value):
            self._sums.add(name, value)
        if value.requires_grad:
            if name in self._quiet:
                value = value.detach()
            elif not torch.is_grad_enabled():
                self.read_without_gradient.add(name)
        value._is_param = IS_PARAM
        value.__dict__.update(attributes_of(self._params[name]), **self.marks.get(name, {}))
        return value

    def of_call(self, param: Any) -> Any:
        """Return the tensor in place of a parameter of the call that runs, or runs again."""
        tensors, name = self.bound, self.name_of(param)
        # Dynamo, which traces this before any backward pass, does not know the task.
        if tensors is None and self.kept is not None and torch._C._current_graph_task_id() != -1:
            tensors = self.kept
        # A hook may run the module for a call of which nothing is left.
        if tensors is None or name is None or is_closed(value := tensors[name]):
            return param
        return self.read(name, tensor_of(value) if type(value) is LazyLeaf else value)

    def outside(self, param: Tensor, name: str) -> Tensor:
        """Return the whole value of a hidden parameter outside of calls; every rank must call."""
        with torch._C.DisableTorchFunctionSubclass():
            requires_grad = param.requires_grad
        if not (torch.is_grad_enabled() and requires_grad):
            return self._gathered(name)
        if name not in self.strays:
            self.strays[name] = self._gathered(name).requires_grad_()
            self.strays[name].register_hook(functools.partial(self.hook, name))
            self.watch(name, self.strays[name], is_kept=False)
        elif name in self._stale:
            # The same leaf, which has gradients already.
            self.strays[name].data = self._gathered(name)
            self.watch(name, self.strays[name], is_kept=False)
        self._stale.discard(name)
        return self.strays[name]

    def _gathered(self, name: str) -> Tensor:
        # With a count of writes of its own.
        gather = lambda what: self._values().gathered(name, what=what)
        whole = lambda: gathered_outside(gather, name)
        return self._ties.value(self._params[name], whole).data

    def show_grads(self, param: nn.Parameter, *, is_read: bool) -> Tensor | None:
        """Let ``.grad`` have the gradients, outside of calls and of backward.

        Returns what a read gives in place of ``.grad``, if anything.
        """
        is_outside = self.bound is None and torch._C._current_graph_task_id() == -1
        if is_outside and self.owner is not None and (name := self.name_of(param)) is not None:
            return self.owner.show_grads(name, is_read=is_read)
        return None

    def end(self) -> None:
        """End a step: values that were gathered outside of calls are old from now on."""
        self.kept, self.lent = None, dict[str, Any]()
        self._calls.clear()
        # A loss that the script still holds keeps them, and may not be differentiated again.
        for name, x in self.strays.items():
            x.register_post_accumulate_grad_hook(functools.partial(refuse_old, name))
        self.strays.clear()

    def write(self, name: str, value: Tensor) -> None:
        """Take a whole value of rank 0; every rank must call."""
        own, new = self._params[name], (value.shape, value.dtype, value.device)
        with torch._C.DisableTorchFunctionSubclass():
            old = own.shape, own.dtype, own.device
        if new != old:
            raise PlacementError(
                f"a parameter of an engine keeps shape, dtype and device; leaf {name!r} is {old}; "
                f"got {new}; cast or move the module before you make the engine",
                leaf=name,
            )
        runs_again = self.kept is not None and torch._C._current_graph_task_id() != -1
        if self.bound is None and not runs_again:
            self._values().write({name: value})
            return
        if self.bound is None or not (self._may_write and self._values().takes_in_call(name)):
            raise call_write(name)
        self._written[name] = value.detach()
        self.bound = {**self.bound, **self._written}
        if self._sums is not None:
            self._sums.drop(name)

    def settle(self) -> None:
        """Give the state what the call has written; every rank must call."""
        if self._written:
            self._values().write(self._written)
            self._written.clear()

    @property
    def is_special(self) -> bool:
        """Whether a read of the call that runs needs more than the tensor."""
        return any((self._quiet, self.marks, self._sums is not None, not torch.is_grad_enabled()))

    @property
    def owner(self) -> Any:
        """The engine; ``None`` if it is gone."""
        return self._owner()

    def name_of(self, param: Any) -> str | None:
        """Return the name of a parameter of the state; ``None`` for another value."""
        return self.names.get(id(param))

    def is_hidden(self, name: str) -> bool:
        """Whether a parameter has no values of its own."""
        return name in self._hidden

    def hide(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Let parameters of these names have no values of their own."""
        for name, dtype in dtypes.items():
            param = self._params[name]
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                # No number, so that code which reads the memory by itself cannot go on unnoticed.
                number = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
                empty = torch.full((), number, dtype=dtype, device=param.device)
                param.data = empty.expand(param.shape)
            self._versions[name] = param._version
        self._hidden |= dtypes.keys()

    def show(self, values: Mapping[str, Tensor]) -> None:
        """Let parameters be these tensors, whole."""
        self._hidden -= values.keys()
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self._shown.items():
                if (new := values.get(name)) is not None:
                    if param.data_ptr() != new.data_ptr() or param.dtype != new.dtype:
                        param.data = ops.apart(new)
                    self._versions[name] = param._version
        self._watched.refresh(values)

    def expose(self, values: Mapping[str, Tensor]) -> None:
        """Let parameters be plain ones with these values, until :meth:`cover`."""
        # A write to a plain one counts as a write to what was read before.
        self.check_read()
        for name, value in values.items():
            LiveParameter.release(self._params[name])
            self._params[name].data = value
            self._versions.pop(name, None)

    def cover(self, names: Iterable[str]) -> None:
        """Let exposed parameters be live again; show or hide them next."""
        for name in names:
            LiveParameter.adopt(self._params[name], self)

    def renew(self) -> None:
        """Know that the state has other values."""
        self._stale = set(self.strays)
        self._ties.forget()
        self._watched.accept()

    def check_unwritten(self) -> None:
        """Refuse a write that went around the parameter, because ranks may share the memory."""
        for name, version in self._versions.items():
            param = self._shown[name]
            with torch._C.DisableTorchFunctionSubclass():
                is_other = name in self._params and type(param) is not LiveParameter
                is_written = param._version != version or is_other
            if is_written:
                raise lost_write(name)
        self.check_read()

    def check_read(self) -> None:
        """Take writes through views; refuse others to a value that was read outside of calls."""
        self.settle_views()
        self._watched.check()

    def settle_views(self, name: str | None = None) -> None:
        """Write what code has written through views of a leaf, or of all; every rank must call."""
        if values := self._watched.written(name):
            self._values().write(values)

    def root(self, name: str, value: Tensor) -> Tensor:
        """Return a whole value for views: a copy, or the value itself if it was gathered."""
        is_own = self.is_hidden(name)
        make = lambda: value if is_own else value.detach().clone()
        return self._watched.root(name, make, is_own=is_own)

    def watch(self, name: str, value: Tensor, *, is_kept: bool = True) -> None:
        """Notice later writes to a value that was read outside of calls, or to a view of it."""
        self._watched.add(name, value, is_own=self.is_hidden(name), is_kept=is_kept)

    def alias(self, name: str, data: Tensor) -> None:
        """Know a ``.data`` that a parameter has given out."""
        self._aliases[name] = [*map(weakref.ref, self.aliases(name)), weakref.ref(data)]

    def aliases(self, name: str) -> list[Any]:
        """Return those that code still holds, and forget them."""
        refs = self._aliases.pop(name, ())
        return [x for ref in refs if (x := ref()) is not None]

    def give_back(self, value: Any) -> None:
        """Know that code writes a value, which was read before, into the parameter."""
        self._watched.drop(value)

    def _values(self) -> Any:
        return alive(self._owner, "the value of a sharded parameter")
