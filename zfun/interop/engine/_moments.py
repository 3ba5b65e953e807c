"""A torch optimizer while an engine steps for it: groups, and no moments of its own."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from zfun import tree
from zfun.errors import OptionError
from zfun.interop.engine._values import is_flat

_STATE_DICTS = ("state_dict", "load_state_dict")
_HOOKS = [f"_optimizer_{name}_{when}_hooks" for name in _STATE_DICTS for when in ("pre", "post")]


class ShardedMoments(MutableMapping[Any, Any]):
    """The ``state`` of a torch optimizer whose moments an engine has.

    Empty before the first step, and without moments, as in torch. Else it has an opaque entry for
    each parameter of the groups, as code that moves a state between devices looks at all of them.
    A read or a write of an entry is refused: code that resets moments would reset nothing.

    Args:
        params: returns the parameters that have moments.
    """

    def __init__(self, params: Callable[[], list[Any]]) -> None:
        self._params = params

    def __len__(self) -> int:
        return len(self._params())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._params())

    def __contains__(self, key: object) -> bool:
        return any(key is param for param in self._params())

    def __getitem__(self, key: Any) -> Any:
        return _ENTRY if key in self else _refuse("a read")

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not _ENTRY:
            _refuse("a write")

    def __delitem__(self, key: Any) -> None:
        _refuse("a write")

    def clear(self) -> None:
        _refuse("a write")

    def __reduce__(self) -> Any:
        return _refuse("a copy") if len(self) else (defaultdict, (dict,))


class _OpaqueMoments:
    """The moments of a parameter, which nobody can read or write here."""

    def __getattr__(self, name: str) -> Any:
        # Methods of a dict. Others are asked for to learn the type.
        if name in vars(dict) and not name.startswith("__"):
            _refuse("a read")
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        _refuse("a read")

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse("a write")

    def __delitem__(self, key: Any) -> None:
        _refuse("a write")

    def __iter__(self) -> Iterator[Any]:
        _refuse("a read")

    def __len__(self) -> int:
        return _refuse("a read")

    def __contains__(self, key: object) -> bool:
        _refuse("a read")

    def __reduce__(self) -> Any:
        _refuse("a copy")


_ENTRY = _OpaqueMoments()


def _refuse(use: str) -> NoReturn:
    raise OptionError(
        f"the moments of an engine's optimizer are sharded; got {use} of optimizer.state; call "
        "state_dict() or load_state_dict() of the optimizer, on every rank, and the engine's step()"
    )


def join(optimizer: Any, engine: Any, *, has_moments: bool) -> ShardedMoments:
    """Let ``state_dict()`` and ``load_state_dict()`` of an optimizer be those of an engine.

    Args:
        optimizer: of torch.
        engine: has the moments; not kept alive.
        has_moments: whether there are moments before the first step.

    Returns:
        The new ``optimizer.state``.
    """
    held = weakref.ref(engine)

    def state_dict() -> dict[str, Any]:
        if (owner := held()) is None:
            return type(optimizer).state_dict(optimizer)
        for hook in (*optimizer._optimizer_state_dict_pre_hooks.values(),):
            hook(optimizer)
        found = owner.optimizer_state()
        for hook in (*optimizer._optimizer_state_dict_post_hooks.values(),):
            found = _result(hook(optimizer, found), found)
        return found

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        if (owner := held()) is None:
            type(optimizer).load_state_dict(optimizer, state_dict)
            return
        given = dict(state_dict)
        for hook in (*optimizer._optimizer_load_state_dict_pre_hooks.values(),):
            given = _result(hook(optimizer, given), given)
        owner.load_optimizer_state(given)
        for hook in (*optimizer._optimizer_load_state_dict_post_hooks.values(),):
            hook(optimizer)

    def params() -> list[Any]:
        owner = held()
        state = None if owner is None else owner._state
        if state is None or not (has_moments or state.step):
            return []
        groups = optimizer.param_groups if _has_moments(state) else ()
        return [p for group in groups for p in group["params"]]

    moments = ShardedMoments(params)
    step = types.MethodType(_step_of(optimizer, held, moments), optimizer)
    vars(optimizer).update(state_dict=state_dict, load_state_dict=load_state_dict, step=step)
    optimizer.state = moments
    return moments


def _step_of(
    optimizer: Any, held: Callable[[], Any], moments: ShardedMoments
) -> Callable[..., Any]:
    """Return ``step()`` of an optimizer, which makes moments as torch's checkpoints ask for them.

    ``get_state_dict`` and ``set_state_dict`` of torch step an optimizer without moments, with the
    rate 0 and gradients of zeros. Other steps are the optimizer's own, which find no moments.
    """
    own, before = optimizer.step, vars(optimizer).get("step")

    def step(self: Any, closure: Any = None) -> Any:
        owner = held()
        is_own = owner is None or owner._state is None or self.state is not moments or closure
        if is_own or len(moments) or any(group.get("lr", 1.0) for group in self.param_groups):
            return own() if closure is None else own(closure)
        if _has_moments(owner._state):
            owner.step(boundary=True)
        return None

    # A scheduler looks for its mark; leave() takes what was before.
    vars(step).update(vars(own), before=before)
    return step


def _has_moments(state: Any) -> bool:
    return any(map(is_flat, tree.leaves(state.opt_state, is_leaf=is_flat)))


def leave(optimizer: Any) -> None:
    """Let the state of an optimizer be its own, without moments."""
    for name in _STATE_DICTS:
        vars(optimizer).pop(name, None)
    step = vars(optimizer).get("step")
    if hasattr(step, "before"):
        vars(optimizer).pop("step")
        vars(optimizer).update({} if step.before is None else {"step": step.before})
    optimizer.state = defaultdict(dict)


@contextlib.contextmanager
def empty_state(optimizer: Any, *, hooks: bool) -> Iterator[Any]:
    """The optimizer with an empty state, for functions of torch that read its groups too.

    ``hooks`` says whether those functions run the hooks of the optimizer.
    """
    names = _HOOKS[:0] if hooks else _HOOKS
    before = {name: vars(optimizer)[name] for name in ("state", *names)}
    vars(optimizer).update({name: OrderedDict() for name in names}, state=defaultdict(dict))
    try:
        yield optimizer
    finally:
        vars(optimizer).update(before)


def check_functions(optimizer: Any) -> None:
    """Refuse functions that code has put in place of an optimizer's own: no engine calls them."""
    for name in ("step", "zero_grad", *_STATE_DICTS):
        function = vars(optimizer).get(name)
        while _module_of(function) == "torch.optim.lr_scheduler":  # A scheduler wraps step().
            function = function.__wrapped__
        is_own = getattr(function, "__func__", function) is getattr(type(optimizer), name)
        if not (function is None or is_own or _module_of(function).startswith("zfun.")):
            raise OptionError(
                "an engine steps by the class of an optimizer; got a function in place of "
                f"{name}() of one {type(optimizer).__name__}; override it in a subclass, or use "
                "the hooks of torch, such as register_step_pre_hook()"
            )


def check_once(groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    """Refuse a parameter of some, by identity, that is twice in groups, which torch steps twice."""
    places: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name in (names[id(param)] for param in group["params"] if id(param) in names):
            if name in places:
                raise OptionError(
                    "a trained parameter has one place in the groups of an optimizer; got leaf "
                    f"{name!r} in group {places[name]} and again in group {index}, as in a list of "
                    "tied layers; pass each parameter once, such as [*dict.fromkeys(params)]",
                    leaf=name,
                )
            places[name] = index


def _module_of(function: Any) -> str:
    """Return the module that defines a function, also of one that wraps another."""
    return getattr(function, "__globals__", {}).get("__name__", "")


def _result(found: Any, otherwise: Any) -> Any:
    return otherwise if found is None else found
