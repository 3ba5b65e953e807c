"""The optimizer type."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import OptionError
from zfun.layout import LabelFn
from zfun.optim._missed import sparing, sparing_apply
from zfun.optim._rows import aligned, check_fields, check_trainable, own, step_count
from zfun.optim._schedules import rate_at
from zfun.options import FUNCTION, takes
from zfun.placement import Placement
from zfun.tree import Tree

State: TypeAlias = Any
InitFn: TypeAlias = Callable[[Tree], State]
UpdateFn: TypeAlias = Callable[[Tree, State, Tree], tuple[Tree, State]]
PrepareFn: TypeAlias = "Callable[[Tree | None, State, Tree], Optimizer | None]"
_Params = ParamSpec("_Params")


def remembered(make: Callable[_Params, Optimizer]) -> Callable[_Params, Optimizer]:
    """Cache a pure maker of optimizers, so that all simulated ranks probe one optimizer.

    The results know the name and the options of the maker (:meth:`Optimizer.description`).
    """
    signature = inspect.signature(make)

    def named(*args: _Params.args, **kwargs: _Params.kwargs) -> Optimizer:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            options |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        return make(*args, **kwargs)._replace(
            name=make.__name__.lstrip("_"),
            options=tuple((name, x) for name, x in options.items() if not _are_rules(x)),
        )

    cached = functools.lru_cache(maxsize=64, typed=True)(named)

    @functools.wraps(make)
    def wrapper(*args: _Params.args, **kwargs: _Params.kwargs) -> Optimizer:
        try:
            hash((args, tuple(kwargs.values())))
        except TypeError:
            return named(*args, **kwargs)
        return cached(*args, **kwargs)

    return wrapper


class ApplyFn(Protocol):
    """``apply(grads, state, params, *, donate=False) -> (params, state)``."""

    def __call__(
        self, grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, State]: ...


class Optimizer(NamedTuple):
    """An optimizer: pure functions over a tree of tensors.

    Attributes:
        init: ``init(params) -> state``.
        update: ``update(grads, state, params) -> (updates, state)``; ``updates`` are to be added to
            the parameters.
        apply: ``apply(grads, state, params, *, donate=False) -> (params, state)``: ``update`` and
            then add, with the same bits. (With decoupled weight decay, a parameter that doubles,
            halves or changes sign may differ by one rounding.) With ``donate=True``, ``apply`` may
            overwrite the buffers of ``state`` and ``params``, which must not be used again. A leaf
            that ``Flat.missed`` of the gradients maps to ``None`` stays as it is; :func:`optimizer`
            and :func:`elementwise` see to that.
        placement: the placement of the computation; ``None`` follows the parameters.
        group: the group of that placement; ``None`` follows the parameters.
        labels: ``label(path, leaf)``, where leaves of different labels must lie in different
            buckets; ``None`` if a bucket may hold any leaves.
        by_leaf: whether the optimizer finds the leaves of a flat (:func:`zfun.flat.leaf_spans`),
            and so runs on shards without being element-wise.
        partial: ``partial(state)``: whether the next step takes each rank's own term of the
            gradients (``P``), and sums the terms itself; ``None`` if no step does.
        parts: the optimizers of a composed optimizer. Each part is probed, and the whole is not.
        wide: the dtype in which the parts see narrower parameters; ``None`` for their own.
        prepare: ``prepare(grads, state, params)`` looks at all gradients before a step that goes
            bucket by bucket, as :func:`zfun.offload` does, and returns the optimizer of this step,
            whose ``apply`` may be called on one bucket after the other; ``None`` if there is none,
            and then the step is taken at once. Buffers may be in a store. ``grads`` is ``None`` for
            a later part of a chain, whose gradients are not known yet. By default the optimizer
            itself, if a probe finds that leaves alone give the same steps.
        name: the function that made the optimizer, for :meth:`description`.
        options: the names and values that the function was given, except other optimizers.

    Example:
        >>> from zfun.optim import sgd
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> sgd(0.5).apply(grads, sgd(0.5).init(params), params)[0]
        {'w': tensor([-0.5000, -0.5000])}
    """

    init: InitFn
    update: UpdateFn
    apply: ApplyFn
    placement: Placement | None = None
    group: Any = None
    labels: LabelFn | None = None
    by_leaf: bool = False
    partial: Callable[[State], bool] | None = None
    prepare: PrepareFn | None = None
    parts: tuple[Optimizer, ...] = ()
    wide: torch.dtype | None = None
    name: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def takes_terms(self, state: State) -> bool:
        """Return whether the next step takes the rank's own term of the gradients, not the sum."""
        return self.partial is not None and self.partial(state)

    def description(self, name: str = "optimizer") -> dict[str, str]:
        """Describe the optimizer in words, which ranks compare.

        Schedules are described by some of their values, and a user's pair of functions by the
        structure of the state.

        Args:
            name: the name of this optimizer.

        Returns:
            By name, the maker and the options of the optimizer and of its parts.

        Example:
            >>> from zfun.optim import sgd
            >>> list(sgd(0.5).description().items())[:2]
            [('optimizer', 'sgd'), ('optimizer.learning_rate', '0.5')]
        """
        words = {name: self.name or repr(self.update)}
        is_pair = self.name in ("", optimizer.__name__)
        for option, value in self.options:
            is_schedule = callable(value) and not is_pair and not isinstance(value, type)
            words[f"{name}.{option}"] = repr(value) + (_values_of(value) if is_schedule else "")
        for index, part in enumerate(self.parts):
            words |= part.description(f"{name}.parts[{index}]")
        # The init of a sharded optimizer communicates.
        if is_pair and not self.parts and self.placement is None:
            words[f"{name}.state"] = _structure_of(self.init)
        return words

    def learning_rate(self, state: State) -> float | None:
        """Return the learning rate of the next step.

        Args:
            state: the state of this optimizer.

        Returns:
            The rate that the optimizer was given, as a number or a function of the steps taken, or
            the rate in the state (:func:`zfun.optim.inject_hyperparams`); of a chain and of an
            optimizer by label, the rate of the first part that has one and, by label, has leaves;
            ``None`` if no part has one.

        Example:
            >>> from zfun.optim import adamw, chain, clip_by_global_norm, linear
            >>> falling = chain(clip_by_global_norm(1.0), adamw(linear(0.5, 0.0, 2)))
            >>> params = {"w": torch.zeros(2)}
            >>> state = falling.init(params)
            >>> _, after = falling.apply({"w": torch.ones(2)}, state, params)
            >>> falling.learning_rate(state), falling.learning_rate(after)
            (0.5, 0.25)
        """
        # A Flat, which may be the state of a pair of functions, refuses names of leaves.
        held = getattr(state, "hyperparams", {}) if isinstance(state, tuple) else {}
        injected = held.get("learning_rate", held.get("lr"))
        if injected is not None:
            return float(injected)
        options = dict(self.options)
        rate = options.get("learning_rate", options.get("lr"))
        if rate is not None:
            # A constant rate needs no count; the state of scale_by_learning_rate() has none then.
            if callable(rate):
                check_fields(state, "count")
            return rate_at(rate, step_count(state.count) if callable(rate) else 0)
        if isinstance(state, dict):
            states = tuple(state.values())
        elif isinstance(state, tuple):
            states = (state.inner,) if hasattr(state, "inner") else state
        else:
            states = (state,)
        found = (
            part.learning_rate(its)
            for part, its in zip(self.parts, states, strict=False)
            if its is not None  # the state of a label without leaves
        )
        return next((rate for rate in found if rate is not None), None)


@takes(init=FUNCTION, update=FUNCTION)
@remembered
def optimizer(init: InitFn, update: UpdateFn) -> Optimizer:
    """Make an optimizer of a user's pair of functions, as in optax.

    Args:
        init: ``init(params) -> state``, any tree.
        update: ``update(grads, state, params) -> (updates, state)``; ``updates`` has the tree and
            shapes of ``params``.

    Returns:
        An optimizer whose ``apply`` is ``update`` and then add, in place with ``donate=True``.

    Example:
        >>> from zfun import tree
        >>> def update(grads, state, params):
        ...     return tree.map(lambda g: -0.1 * g.sign(), grads), state
        >>> signs = optimizer(lambda params: (), update)
        >>> signs.apply({"w": torch.tensor([3.0, -4.0])}, (), {"w": torch.zeros(2)})[0]
        {'w': tensor([-0.1000,  0.1000])}
    """

    def init_fn(params: Tree) -> State:
        check_trainable(params)
        return init(params)

    def update_fn(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        found = update(grads, state, params)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise OptionError(
                "update of an optimizer returns (updates, state); got a value of type "
                f"{type(found).__name__}; return both, () for an optimizer without state"
            )
        return found[0], found[1]

    return of_update(init_fn, update_fn)


def of_update(init: InitFn, update: UpdateFn) -> Optimizer:
    """Make an optimizer whose ``apply`` is ``update`` and then add."""

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, State]:
        updates, state = update(grads, state, params)
        return apply_updates(params, updates, donate), state

    return Optimizer(init, sparing(update), sparing_apply(apply))


def itself(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer that may go bucket by bucket, because no step mixes leaves."""
    return optimizer._replace(prepare=lambda grads, state, params: itself(optimizer))


def prepared(
    optimizer: Optimizer, grads: Tree | None, state: State, params: Tree
) -> Optimizer | None:
    """Return the optimizer of one step that goes bucket by bucket; ``None`` if there is none."""
    prepare = optimizer.prepare
    if prepare is None:
        return optimizer
    ready = prepare(grads, state, params)
    if ready is None or ready.prepare is not None or isinstance(prepare, PrepareInner):
        return ready
    # The function that prepared the step has promised that the step mixes no leaves.
    return itself(ready)


def around(
    inner: Optimizer, again: Callable[[Optimizer], Optimizer], fields: tuple[str, ...]
) -> Optimizer:
    """Return ``inner`` for a state that holds its own as ``inner``, without the three functions.

    Args:
        inner: the optimizer that takes the steps.
        again: makes the outer optimizer of one that ``inner`` has prepared for a step.
        fields: of the outer state.
    """

    def prepare(grads: Tree | None, state: State, params: Tree) -> Optimizer | None:
        check_fields(state, *fields)
        ready = prepared(inner, grads, state.inner, params)
        return None if ready is None else again(ready)

    partial = inner.partial
    return inner._replace(
        partial=None if partial is None else lambda state: partial(state.inner),
        prepare=prepare,
        parts=(inner,),
    )


@dataclass(frozen=True, slots=True)
class PrepareInner:
    """Prepares the optimizer inside of a transform, for values that are placed and in memory."""

    inner: Optimizer

    def __call__(self, grads: Tree | None, state: State, params: Tree) -> Optimizer | None:
        return prepared(self.inner, grads, state, params)


def as_optimizer(x: object) -> Optimizer:
    """Accept an optimizer, or the plain pair ``(init, update)``.

    Args:
        x: an :class:`Optimizer`, or a tuple of two functions.

    Returns:
        An optimizer.

    Raises:
        OptionError: ``x`` is neither.

    Example:
        >>> pair = (lambda params: (), lambda grads, state, params: (grads, state))
        >>> as_optimizer(pair).placement is None
        True
    """
    if isinstance(x, Optimizer):
        return x
    if isinstance(x, (tuple, list)) and len(x) == 2 and all(callable(part) for part in x):
        init, update = x
        return optimizer(init, update)
    remedy = (
        "use zf.optim.sgd, adam or adamw, or zf.optim.from_torch() of the class, because a torch "
        "optimizer keeps parameters and state inside itself"
        if isinstance(x, torch.optim.Optimizer)
        else "use one of zf.optim, or zf.optim.optimizer(init, update)"
    )
    raise OptionError(
        "an optimizer is an Optimizer or a pair of functions (init, update); got "
        f"{type(x).__name__}; {remedy}"
    )


# A schedule is compared at these steps.
_STEPS = (0, 1, 10, 100, 1_000, 10_000)


def _are_rules(value: Any) -> bool:
    """Whether an option holds optimizers, which are the parts of the result."""
    if isinstance(value, Optimizer):
        return True
    is_rule = lambda x: isinstance(x, tuple) or callable(x)
    return isinstance(value, tuple) and len(value) > 0 and all(map(is_rule, value))


def _values_of(schedule: Callable[[int], Any]) -> str:
    try:
        values = [float(schedule(step)) for step in _STEPS]
    except Exception:  # noqa: BLE001, the function is for other steps, or no schedule
        return ""
    return f" with the values {values} at steps {list(_STEPS)}"


def _structure_of(init: InitFn) -> str:
    """Describe the state of a small tree: the dtype and shape of each leaf, by path."""
    try:
        state = init([torch.zeros(2)])
    except Exception:  # noqa: BLE001, an init for particular trees
        return "made for particular trees"
    leaves = zip(tree.paths(state), tree.leaves(state), strict=True)
    kind = lambda x: f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
    return ", ".join(f"{path}: {kind(leaf)}" for path, leaf in leaves) or "empty"


@takes()
@torch.no_grad()
def apply_updates(params: Tree, updates: Tree, donate: bool = False) -> Tree:
    """Add updates to parameters.

    Args:
        params: a tree of tensors.
        updates: the same tree, with the same shapes; any floating dtypes.
        donate: add in place where a leaf owns its memory.

    Returns:
        The new parameters, in the dtypes of the old ones.

    Raises:
        LeafError: a parameter holds integers or booleans.
        SpecMismatch: the trees or shapes differ, or an update is complex where the parameter is
            real.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.tensor([0.5, -0.5])})
        {'w': tensor([1.5000, 0.5000])}
    """
    rows = aligned(params, updates=updates)
    mine = own([p for p, _ in rows], donate) if donate else [None] * len(rows)
    added = [
        (p + u).to(p.dtype) if out is None else out.add_(u)
        for (p, u), out in zip(rows, mine, strict=True)
    ]
    return tree.unflatten(tree.structure(params), added)
