"""Modules as functions of their parameters.

[Note: bound copies]
``torch.func.functional_call`` puts tensors into the module and takes them out after the call. Code
that runs later, such as the recomputation of ``torch.utils.checkpoint`` in backward, then reads the
module's own parameters, and torch raises no error. :class:`Functional` never changes the module.
Each call makes a *bound copy*: every module of the tree is copied without its tensors, the copies
refer to each other as the originals do, and the given tensors take the places of the parameters. A
closure that keeps a layer keeps the layer's copy, so backward reads the tensors of the call, and
threads may share the module.

References to modules and parameters are replaced in attributes, hooks, lists, tuples, named tuples,
dicts, deques, bound methods, ``functools.partial`` objects and closures. Other objects are shared
with the original module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.flat import Flat
from zfun.options import ANY, TEXT, each, takes
from zfun.transforms import Remat, gather


@takes(module=ANY, gather=each(TEXT, "globs of the paths of modules", "['*.mlp']"))
def functional(module: nn.Module, *, gather: Sequence[str] = ()) -> Functional:
    """Turn a module into a function of its parameters.

    Like ``torch.func.functional_call``, and right for more modules: the parameters of a call stay
    in place through backward, so ``torch.utils.checkpoint`` and the checkpointing switch of a
    Hugging Face model compute the right gradients. The module itself never changes, so simulated
    ranks may share one module, and a module may be registered under several names.

    Args:
        module: any module, also one on the ``meta`` device, if calls give all of its tensors.
        gather: globs of paths of modules, such as ``"*.mlp"``, that pass parameters to an
            ``autograd.Function``; ``""`` is the module itself. At stage 3 the parameters of such a
            module, and of all modules in it, are whole tensors while its ``forward`` runs.

    Returns:
        The function, with :attr:`Functional.params` and :attr:`Functional.buffers` of the module.

    Raises:
        OptionError: ``module`` is no ``nn.Module``, or is compiled by ``torch.jit``; a glob that
            matches no module.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> apply = zf.functional(torch.nn.Linear(3, 1))
        >>> loss = lambda params, batch: apply(params, batch).mean()
        >>> zero = zf.zero(3, loss, zf.optim.adamw(0.1), zf.process_group())
        >>> state, info = zero.step(zero.init(apply.params), torch.ones(2, 3))
        >>> sorted(zero.params(state))
        ['bias', 'weight']
    """
    return Functional(module, gather)


class Functional:
    """The function of a module that :func:`functional` returns; see [Note: bound copies].

    Attributes:
        module: the module, which no call changes.
    """

    def __init__(self, module: nn.Module, gather: Sequence[str] = ()) -> None:
        if not isinstance(module, nn.Module):
            raise OptionError(
                f"functional() takes an nn.Module; got {type(module).__name__}; a function of "
                "(params, batch) needs no adapter"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise OptionError(
                "functional() takes a module in Python; got a torch.jit.ScriptModule; pass the "
                "module that torch.jit compiled"
            )
        self.module = module
        self._gathering = _matching(module, gather)

    @property
    def params(self) -> dict[str, Tensor]:
        """The module's own parameters by name, detached; tied parameters under the first name."""
        return {name: leaf.detach() for name, leaf in self.module.named_parameters()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's own buffers by name, detached."""
        return {name: leaf.detach() for name, leaf in self.module.named_buffers()}

    def __call__(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call the module with these parameters.

        Args:
            params: tensors by the names of parameters and, if wanted, buffers, such as
                ``{**params, **buffers}``. For tied parameters one name is enough. The module's own
                tensors take the places of names that are left out, without a gradient.
            args: positional arguments of the module.
            kwargs: keyword arguments of the module.

        Returns:
            The result of the module. The module writes to given buffers as usual; where the
            module assigns a new tensor to a buffer, the new tensor replaces the old one in
            ``params``, if ``params`` is a dict that names the buffer.

        Raises:
            SpecMismatch: a name that the module does not have, or different tensors for tied
                parameters.
            PlacementError: ``params`` is a sharded or flat value.
        """
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces functional_call, and gives a checkpoint the tensors of the call.
            return torch.func.functional_call(self.module, dict(params), args, kwargs)
        tree, copies = self._copies(params)
        out = copies.of(self.module)(*args, **kwargs)
        if isinstance(params, MutableMapping):
            for name, (owner, key) in tree.buffers.items():
                if name in params:
                    value = copies.of(owner)._buffers.get(key)
                    if value is not None and value is not params[name]:
                        params[name] = value
        return out

    def bind(self, params: Mapping[str, Tensor]) -> Any:
        """Return a copy of the module that holds these tensors, to call any method of the module.

        The copy is for one call of a loss or one evaluation, such as
        ``apply.bind(params).generate(ids)``. Attributes that a method sets stay in the copy.

        Args:
            params: as for a call.

        Returns:
            The copy, an ``nn.Module`` of the same class.

        Raises:
            SpecMismatch: as for a call.
            PlacementError: as for a call.

        Example:
            >>> import torch
            >>> import zfun as zf
            >>> apply = zf.functional(torch.nn.Linear(2, 1, bias=False))
            >>> bound = apply.bind({"weight": torch.ones(1, 2)})
            >>> bound.eval().forward(torch.ones(2))
            tensor([2.])
        """
        return self._copies(params)[1].of(self.module)

    def _copies(self, params: Mapping[str, Tensor]) -> tuple[_ModuleTree, _Copies]:
        tree = _ModuleTree(self.module)
        copies = _Copies(tree.modules, tree.replaced(params))
        for module in self._gathering:
            _gather_in_forward(copies.of(module))
        return tree, copies

    def __repr__(self) -> str:
        return f"functional({type(self.module).__name__})"


class _ModuleTree:
    """The modules of a tree, each once, and the tensors by all of their names."""

    def __init__(self, root: nn.Module) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.buffers: dict[str, tuple[nn.Module, str]] = {}
        self._enter(root, "")

    def _enter(self, module: nn.Module, prefix: str) -> None:
        self.modules[id(module)] = module
        for key, tensor in module._parameters.items():
            if tensor is not None:
                self.tensors[prefix + key] = tensor
        for key, tensor in module._buffers.items():
            if tensor is not None:
                self.tensors[prefix + key] = tensor
                self.buffers[prefix + key] = module, key
        for key, child in module._modules.items():
            if child is not None:
                self._enter(child, f"{prefix}{key}.")

    def replaced(self, params: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return the given tensors by the identities of the module's own tensors."""
        if not isinstance(params, Mapping):
            remedy = (
                "put zf.shard_params() around the loss, or call zf.gather() on the parameters"
                if isinstance(params, Flat)
                else "pass a dict such as functional(module).params"
            )
            raise PlacementError(
                "a function made by functional() takes tensors by their names in the module; got "
                f"{type(params).__name__}; {remedy}"
            )
        found: dict[int, Tensor] = {}
        for name, given in params.items():
            own = self.tensors.get(name)
            if own is None:
                near = difflib.get_close_matches(str(name), self.tensors, n=1)
                raise SpecMismatch(
                    "a function made by functional() takes the names of the module's parameters "
                    f"and buffers; got {name!r}; "
                    + (f"did you mean {near[0]!r}?" if near else "leave the tensor out"),
                    leaf=str(name),
                )
            if found.setdefault(id(own), given) is not given:
                names = [other for other, tensor in self.tensors.items() if tensor is own]
                raise SpecMismatch(
                    f"tied parameters are one tensor; got different tensors for {names}; pass one "
                    "of the names, or untie the parameters in the module",
                    leaf=str(name),
                )
        return found


# The tensors and children of a module, and hooks that no call of a module runs.
_OWN = frozenset(
    ["_parameters", "_buffers", "_modules"]
    + [key for key in nn.Module().__dict__ if "state_dict" in key]
)
# Types of attributes without references to modules, which most attributes have.
_PLAIN = frozenset([bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device, set])


class _Copies:
    """Bound copies of modules, by identity, that refer to each other as the originals do.

    ``tensors`` take the places of those with these identities.
    """

    def __init__(self, modules: Mapping[int, nn.Module], tensors: dict[int, Tensor]) -> None:
        self._tensors = tensors
        self._modules = {key: object.__new__(type(module)) for key, module in modules.items()}
        # Functions and containers that have been looked through.
        self._done: dict[int, Any] = {}
        for key, module in modules.items():
            self._modules[key].__dict__.update(self._attributes(module))

    def of(self, module: nn.Module) -> nn.Module:
        """Return the copy of a module."""
        return self._modules[id(module)]

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        found = module.__dict__.copy()
        for key, value in found.items():
            kind = type(value)
            if kind in _PLAIN or key in _OWN:
                continue
            if kind is OrderedDict:
                # Hooks that the copy registers or removes belong to the copy.
                found[key] = self._dict(value).copy() if value else OrderedDict()
            else:
                found[key] = self._replaced(value)
        tensors, modules = self._tensors, self._modules
        for slots in ("_parameters", "_buffers"):
            found[slots] = {k: tensors.get(id(x), x) for k, x in found[slots].items()}
        found["_modules"] = {k: modules.get(id(x)) for k, x in found["_modules"].items()}
        return found

    def _replaced(self, value: Any) -> Any:
        """Return a value with references to the copies; the value itself, if none is necessary."""
        replace = _REPLACE.get(type(value))
        if replace is None:
            if isinstance(value, nn.Module):
                return self._modules.get(id(value), value)
            if isinstance(value, Tensor):
                return self._tensors.get(id(value), value)
            if hasattr(type(value), "of_copy"):
                return value.of_copy(self._replaced)
            if not (isinstance(value, tuple) and hasattr(value, "_make")):
                return value
            replace = _Copies._sequence
        done = self._done.get(id(value))
        if done is None:
            # A container that contains itself finds this entry, so the search ends.
            self._done[id(value)] = value
            done = self._done[id(value)] = replace(self, value)
        return done

    def _all(self, values: Iterable[Any]) -> list[Any]:
        return [value if type(value) in _PLAIN else self._replaced(value) for value in values]

    def _sequence(self, value: Any) -> Any:
        new = self._all(value)
        if not any(map(_differ, new, value)):
            return value
        if isinstance(value, deque):
            return deque(new, value.maxlen)
        return value._make(new) if hasattr(value, "_make") else type(value)(new)

    def _dict(self, value: Any) -> Any:
        new = self._all(value.values())
        if not any(map(_differ, new, value.values())):
            return value
        # A copy keeps what a defaultdict makes of missing keys.
        found = value.copy()
        found.update(zip(value, new, strict=True))
        return found

    def _method(self, value: types.MethodType) -> Any:
        owner, fn = self._all([value.__self__, value.__func__])
        if owner is value.__self__ and fn is value.__func__:
            return value
        return types.MethodType(fn, owner)

    def _partial(self, value: functools.partial[Any]) -> Any:
        old = [value.func, value.args, value.keywords]
        fn, args, kwargs = new = self._all(old)
        return functools.partial(fn, *args, **kwargs) if any(map(_differ, new, old)) else value

    def _remat(self, value: Remat) -> Any:
        fn = self._replaced(value.fn)
        return value if fn is value.fn else dataclasses.replace(value, fn=fn)

    def _function(self, value: types.FunctionType) -> Any:
        if value.__closure__ is None and value.__defaults__ is None and not value.__kwdefaults__:
            return value
        old = [*(value.__closure__ or ())]
        cells = [self._cell(cell) for cell in old]
        defaults = self._replaced(value.__defaults__)
        keywords = self._replaced(value.__kwdefaults__)
        if (
            not any(map(_differ, cells, old))
            and defaults is value.__defaults__
            and keywords is value.__kwdefaults__
        ):
            return value
        itself = [i for i, cell in enumerate(old) if _content(cell) is value]
        for i in itself:
            cells[i] = types.CellType()
        new = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, defaults, tuple(cells) or None
        )
        for i in itself:
            cells[i].cell_contents = new
        new.__kwdefaults__ = keywords
        new.__qualname__ = value.__qualname__
        new.__dict__.update(self._dict(value.__dict__))
        compiled = getattr(new, "_torchdynamo_orig_callable", None)
        return new if compiled is None else _gathering(new, compiled)

    def _cell(self, cell: types.CellType) -> types.CellType:
        old = _content(cell)
        new = self._replaced(old)
        return cell if new is old else types.CellType(new)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _matching(root: nn.Module, globs: Sequence[str]) -> list[nn.Module]:
    """Return the modules that match a glob, and those inside, but none that torch compiles."""
    parts = dict(root.named_modules(remove_duplicate=False))
    found: dict[nn.Module, None] = {}
    for glob in globs:
        # A star leaves the root out, because the root's forward would gather everything at once.
        paths = [path for path in parts if fnmatch.fnmatchcase(path, glob) and (path or not glob)]
        if not paths:
            raise OptionError(
                f"each glob of functional(gather=) matches the path of a module; got {glob!r}, "
                f"which matches none of {[*parts][1:5]}; mend the glob; see model.named_modules()"
            )
        found |= dict.fromkeys(inside for path in paths for inside in parts[path].modules())
    # A compiled part gathers all of its parameters by itself.
    for part in root.modules():
        if part._compiled_call_impl or hasattr(part.forward, "_torchdynamo_orig_callable"):
            for inside in part.modules():
                found.pop(inside, None)
    return [*found]


@contextlib.contextmanager
def _whole(module: nn.Module) -> Iterator[None]:
    """Gather the lazy leaves of a module for a while."""
    slots = [(inside, inside._parameters) for inside in module.modules()]
    try:
        for inside, leaves in slots:
            inside._parameters = gather(leaves)
        yield
    finally:
        # A held tensor would keep the bucket from being released.
        for inside, leaves in slots:
            inside._parameters = leaves


def _gathering(compiled: Callable[..., Any], inner: Any) -> Callable[..., Any]:
    """Return compiled code of a module that gathers lazy leaves first, as compiled code must."""
    module = getattr(inner, "__self__", getattr(inner, "__wrapped__", None))
    if not isinstance(module, nn.Module):
        return compiled

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _whole(module):
            return compiled(*args, **kwargs)

    return call


def _gather_in_forward(module: nn.Module) -> None:
    """Let the ``forward`` of a copy run on gathered parameters."""
    # A strong reference would be a cycle, which keeps the tensors of the call alive.
    reference, own = weakref.ref(module), module.__dict__.get("forward")

    @functools.wraps(type(module).forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        module = reference()
        assert module is not None  # the caller has it
        with _whole(module):
            return own(*args, **kwargs) if own else type(module).forward(module, *args, **kwargs)

    module.__dict__["forward"] = forward


def _differ(new: Any, old: Any) -> bool:
    return new is not old


_REPLACE: dict[type, Callable[[_Copies, Any], Any]] = {
    list: _Copies._sequence,
    tuple: _Copies._sequence,
    dict: _Copies._dict,
    OrderedDict: _Copies._dict,
    defaultdict: _Copies._dict,
    deque: _Copies._sequence,
    types.MethodType: _Copies._method,
    types.FunctionType: _Copies._function,
    functools.partial: _Copies._partial,
    Remat: _Copies._remat,
}
