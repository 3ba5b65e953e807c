"""Numbers of an optimizer as values of the state, which a loop may set between steps."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.flat import Flat
from zfun.optim._base import Optimizer, State, as_optimizer, prepared
from zfun.optim._factors import FactorUpdate, ScalingApply, is_scaling
from zfun.options import ANY, number, shown, takes
from zfun.tree import Tree

_State = TypeVar("_State")
_NUMBER = number()


class HyperparamsState(NamedTuple):
    """State of :func:`inject_hyperparams`.

    Attributes:
        hyperparams: the values of the next step by name, 0-dim float64 on the CPU.
        inner: the state of the optimizer that has these values.
    """

    hyperparams: dict[str, Tensor]
    inner: State


@takes()
def inject_hyperparams(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Let an optimizer read its numbers from its state, as in optax.

    Every number that ``make`` is given, or has as a default, becomes a value of the state:
    learning rate, momentum, weight decay, betas. :func:`set_hyperparams` sets the values between
    steps, :func:`hyperparams` reads the values. A step has the bits of the step of
    ``make(**values)``, under every stage. Each rank must set the same values. Schedules, bools,
    and integers of options that take integers only, such as ``num_iterations``, stay in ``make``.

    Args:
        make: ``make(...) -> Optimizer``, such as ``zf.optim.adamw``, or a function of your own
            that composes optimizers.

    Returns:
        A function of the arguments of ``make``, whose optimizers have :class:`HyperparamsState`.

    Raises:
        OptionError: ``make`` is no function; from a step, where ``make`` refuses a value that was
            set, or where the value needs another state, as the first momentum above 0 does.
        PlacementError: the optimizer is sharded already.

    Example:
        >>> from zfun.optim import sgd
        >>> optimizer = inject_hyperparams(sgd)(0.5)
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> state = set_hyperparams(optimizer.init(params), learning_rate=0.25)
        >>> optimizer.apply(grads, state, params)[0]
        {'w': tensor([-0.2500, -0.2500])}
    """

    @functools.wraps(make)
    def injected(*args: Any, **kwargs: Any) -> Optimizer:
        call = (make, args, tuple(kwargs.items()))
        try:
            hash(call)
        except TypeError:
            return _inject(*call)
        return _cached(*call)

    return injected


@takes(state=ANY)
def hyperparams(state: State) -> dict[str, float]:
    """Return the hyperparameters in a state.

    Args:
        state: a state of :func:`inject_hyperparams`, or any state that contains one: of a chain, of
            master weights, of :func:`zfun.zero`.

    Returns:
        The values by name. A name in the state of :func:`by_label` begins with the label, as in
        ``"decay.learning_rate"``.

    Example:
        >>> from zfun.optim import sgd
        >>> hyperparams(inject_hyperparams(sgd)(0.5, momentum=0.75).init({"w": torch.zeros(2)}))
        {'learning_rate': 0.5, 'momentum': 0.75, 'weight_decay': 0.0}
    """
    return {
        prefix + name: float(value)
        for prefix, found in _found(state, "")
        for name, value in found.hyperparams.items()
    }


@takes(state=ANY, named=ANY)
def set_hyperparams(
    state: _State, named: Mapping[str, float | Tensor] | None = None, /, **values: float | Tensor
) -> _State:
    """Return a state with other hyperparameters.

    Args:
        state: as for :func:`hyperparams`.
        named: new values by the names of :func:`hyperparams`, such as ``decay.learning_rate``. A
            name without a label sets the value under every label. Schedulers of torch may return a
            0-dim tensor.
        values: the same, for names that are Python names.

    Returns:
        The state, with new values. All tensors of the old state but these values are shared.

    Raises:
        OptionError: the state has no such hyperparameter, or a value is not a finite number.

    Example:
        >>> from zfun.optim import sgd
        >>> state = inject_hyperparams(sgd)(0.5).init({"w": torch.zeros(2)})
        >>> hyperparams(set_hyperparams(state, learning_rate=0.25))["learning_rate"]
        0.25
    """
    if not isinstance(named, (Mapping, type(None))):
        raise OptionError(
            "set_hyperparams(state, named) takes a mapping from names to numbers; got "
            f"{shown(named)}; pass {{'learning_rate': 0.1}}"
        )
    new = {name: _plain(value) for name, value in {**(named or {}), **values}.items()}
    known = {
        name: None
        for prefix, found in _found(state, "")
        for short in found.hyperparams
        for name in (prefix + short, short)
    }
    for name, value in new.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            remedy = (
                f"did you mean {near[0]!r}?"
                if near
                else f"the state has {', '.join(map(repr, known))}"
                if known
                else "make the optimizer with zf.optim.inject_hyperparams(make)(...)"
            )
            raise OptionError(
                "set_hyperparams() sets numbers that inject_hyperparams() has put into the state; "
                f"got {name!r}; {remedy}"
            )
        if not _NUMBER.accepts(value):
            raise OptionError(
                f"{name} is {_NUMBER}; got {shown(value)}; pass {name}={_NUMBER.example}, and a "
                "schedule where the optimizer is made"
            )
    result: _State = _replaced(state, "", new)
    return result


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 else value


def _found(state: Any, prefix: str) -> Iterator[tuple[str, HyperparamsState]]:
    """Yield the states that hold hyperparameters, with the labels that lead to them."""
    if isinstance(state, HyperparamsState):
        yield prefix, state
        yield from _found(state.inner, prefix)
    elif isinstance(state, dict):
        for label, part in state.items():
            yield from _found(part, f"{prefix}{label}.")
    elif isinstance(state, tuple) and not isinstance(state, Flat):
        for part in state:
            yield from _found(part, prefix)


def _replaced(state: Any, prefix: str, new: Mapping[str, float]) -> Any:
    if isinstance(state, HyperparamsState):
        values = {
            name: _held(new[key]) if (key := _key(prefix, name, new)) is not None else value
            for name, value in state.hyperparams.items()
        }
        return HyperparamsState(values, _replaced(state.inner, prefix, new))
    if next(_found(state, prefix), None) is None:
        return state
    if isinstance(state, dict):
        return {label: _replaced(part, f"{prefix}{label}.", new) for label, part in state.items()}
    parts = [_replaced(part, prefix, new) for part in state]
    return state._make(parts) if hasattr(state, "_make") else tuple(parts)


def _key(prefix: str, name: str, new: Mapping[str, float]) -> str | None:
    """Return the key of a new value: the name with labels goes before the name alone."""
    return next((key for key in (prefix + name, name) if key in new), None)


def _held(value: float) -> Tensor:
    # Made from a Python number, whose value is known to traces of fake tensors too.
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def _inject(
    make: Callable[..., Optimizer], args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Optimizer:
    first = as_optimizer(make(*args, **dict(kwargs)))
    if first.placement is not None:
        raise PlacementError(
            "inject_hyperparams() stands inside of shard_optimizer(), which shards the state; got "
            f"an optimizer that computes in {first.placement!r}; write "
            "shard_optimizer(inject_hyperparams(make)(...), group)"
        )
    signature = inspect.signature(make)
    given = _arguments(signature, args, dict(kwargs))
    names = tuple(
        name
        for name, value in _flat(signature, given).items()
        if _NUMBER.accepts(value) and not _is_integer(signature, name)
    )
    initial = tuple(float(_flat(signature, given)[name]) for name in names)

    @functools.lru_cache(maxsize=16)
    def made(values: tuple[float, ...]) -> Optimizer:
        if values == initial:
            return first
        call = _arguments(signature, args, dict(kwargs))
        rest = _rest(signature)
        for name, value in zip(names, values, strict=True):
            (call.arguments if name in call.arguments else call.arguments[rest])[name] = value
        found = as_optimizer(make(*call.args, **call.kwargs))
        _check_kind(first, found, dict(zip(names, values, strict=True)))
        return found

    def at(state: State) -> Optimizer:
        if not isinstance(state, HyperparamsState) or tuple(state.hyperparams) != names:
            raise SpecMismatch(
                f"an optimizer takes the state that its init returned; got {shown(state)} where "
                f"the hyperparameters are {', '.join(names)}; pass optimizer.init(params) or the "
                "state of the last step"
            )
        return made(tuple(float(value) for value in state.hyperparams.values()))

    def init(params: Tree) -> HyperparamsState:
        return HyperparamsState(
            dict(zip(names, map(_held, initial), strict=True)), first.init(params)
        )

    return _reading(first, init, at)


_cached = functools.lru_cache(maxsize=64, typed=True)(_inject)


def _reading(
    first: Optimizer,
    init: Callable[[Tree], HyperparamsState],
    at: Callable[[State], Optimizer],
) -> Optimizer:
    """Return an optimizer that is ``at(state)`` in each step."""

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        updates, after = at(state).update(grads, state.inner, params)
        return updates, state._replace(inner=after)

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, State]:
        new, after = at(state).apply(grads, state.inner, params, donate=donate)
        return new, state._replace(inner=after)

    def scaling(
        grads: Tree, state: State, params: Tree, donate: bool, scale: Any, taken: Any
    ) -> tuple[Tree, State]:
        step: Any = at(state).apply
        pairs = (("scale", scale), ("taken", taken))
        options: dict[str, Any] = {name: value for name, value in pairs if value is not None}
        if options:
            check_kind(step, ScalingApply)
        new, after = step(grads, state.inner, params, donate=donate, **options)
        return new, state._replace(inner=after)

    def factor(grads: Tree, state: State) -> Tensor | float:
        inner: Any = at(state).update
        check_kind(inner, FactorUpdate)
        return inner.factor(grads, state.inner)

    def check_kind(found: Any, kind: type) -> None:
        if not isinstance(found, kind):
            raise OptionError(
                "a maker returns optimizers of one kind, for all values, where a chain joins clip "
                f"and step; got a {getattr(found, '__qualname__', type(found).__name__)} after a "
                f"{kind.__name__}; choose between optimizers outside of inject_hyperparams()"
            )

    def prepare(grads: Tree | None, state: State, params: Tree) -> Optimizer | None:
        ready = prepared(at(state), grads, state.inner, params)
        return None if ready is None else _reading(ready, init, lambda state: ready)

    partial = first.partial
    return first._replace(
        init=init,
        update=FactorUpdate(update, factor) if isinstance(first.update, FactorUpdate) else update,
        apply=ScalingApply(scaling) if is_scaling(first) else apply,
        partial=None if partial is None else lambda state: partial(state.inner),
        prepare=prepare,
        parts=(first,),
        name=inject_hyperparams.__name__,
        options=(),
    )


def _arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    return call


def _rest(signature: inspect.Signature) -> str:
    """Return the name of ``**options``; empty if there is none."""
    kinds = {x.kind: name for name, x in signature.parameters.items()}
    return kinds.get(inspect.Parameter.VAR_KEYWORD, "")


def _flat(signature: inspect.Signature, call: inspect.BoundArguments) -> dict[str, Any]:
    rest = _rest(signature)
    named = {name: value for name, value in call.arguments.items() if name != rest}
    return {**named, **call.arguments.get(rest, {})}


def _is_integer(signature: inspect.Signature, name: str) -> bool:
    parameter = signature.parameters.get(name)
    return parameter is not None and parameter.annotation in (int, "int")


def _check_kind(first: Optimizer, found: Optimizer, values: dict[str, float]) -> None:
    """Refuse values that need another state, before a step overwrites the old one."""
    try:
        kinds = [tree.structure(rule.init([torch.zeros(2)])) for rule in (first, found)]
    except Exception:  # noqa: BLE001, an init for particular trees
        return
    if kinds[0] != kinds[1]:
        raise OptionError(
            "hyperparameters that are set between steps keep the structure of the optimizer's "
            f"state; got {values}, which make a state of another structure, as a momentum does "
            "that is 0 at first; make the optimizer and the state with a value above 0"
        )
