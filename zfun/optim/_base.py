"""The optimizer type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeAlias

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError, OptionError, SpecMismatch
from zfun.flat import flats
from zfun.layout import LabelFn
from zfun.placement import Placement
from zfun.tree import Tree

__all__ = [
    "InitFn",
    "Optimizer",
    "State",
    "UpdateFn",
    "aligned",
    "apply_updates",
    "as_optimizer",
    "check_trainable",
    "flat_view",
    "optimizer",
    "own",
    "remembered",
    "step_count",
]

State: TypeAlias = Any
InitFn: TypeAlias = Callable[[Tree], State]
UpdateFn: TypeAlias = Callable[[Tree, State, Tree], tuple[Tree, State]]


_Params = ParamSpec("_Params")


def remembered(make: Callable[_Params, Optimizer]) -> Callable[_Params, Optimizer]:
    """Cache the results of a pure maker of optimizers, so that all ranks probe one value once."""
    cached = functools.lru_cache(maxsize=64, typed=True)(make)

    @functools.wraps(make)
    def wrapper(*args: _Params.args, **kwargs: _Params.kwargs) -> Optimizer:
        try:
            hash((args, tuple(kwargs.values())))
        except TypeError:
            return make(*args, **kwargs)
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
            then add, with the same bits (with weight decay beside the gradient, within a rounding
            where a parameter doubles, halves or changes sign). With ``donate=True``, ``apply`` may
            overwrite the buffers of ``state`` and ``params``, which must not be used again.
        placement: the placement of the computation; ``None`` follows the parameters.
        group: the group of that placement; ``None`` follows the parameters.
        labels: ``label(path, leaf)``, where leaves of different labels must lie in different
            buckets; ``None`` where any may lie together.
        by_leaf: whether the optimizer finds the leaves of a flat (:func:`zfun.flat.leaf_spans`),
            and so runs on shards without being element-wise.
        partial: ``partial(state)``: whether the next step takes each rank's own term of the
            gradients (``P``), and sums by itself; ``None`` where no step does.
        parts: the optimizers of a composed optimizer. Each part is probed, and the whole is not.

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
    parts: tuple[Optimizer, ...] = ()

    def takes_terms(self, state: State) -> bool:
        """Return whether the next step takes the rank's own term of the gradients, not the sum."""
        return self.partial is not None and self.partial(state)


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

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, State]:
        updates, state = update(grads, state, params)
        return apply_updates(params, updates, donate), state

    return Optimizer(init_fn, update, apply)


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
        "use zf.optim.sgd, adam or adamw, or zf.optim.from_torch() of its class: it keeps its "
        "parameters and its state in itself"
        if isinstance(x, torch.optim.Optimizer)
        else "use one of zf.optim, or zf.optim.optimizer(init, update)"
    )
    raise OptionError(
        "an optimizer is an Optimizer or a pair of functions (init, update); got "
        f"{type(x).__name__}; {remedy}"
    )


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
        SpecMismatch: the trees or shapes differ.

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


def check_trainable(params: Tree) -> None:
    """Refuse leaves that no gradient can move.

    Raises:
        LeafError: a leaf is not a tensor, or holds integers or booleans.
    """
    for flat in flats(params):
        for slot in flat.layout.leaves:
            _check_dtype(slot.path, slot.dtype)
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        if not isinstance(leaf, Tensor):
            raise LeafError(
                f"a trainable leaf is a floating or complex tensor; leaf {path!r} is "
                f"{type(leaf).__name__}; keep it out of params",
                leaf=path,
            )
        _check_dtype(path, leaf.dtype)


def _check_dtype(path: str, dtype: torch.dtype) -> None:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise LeafError(
            f"a trainable leaf is a floating or complex tensor; leaf {path!r} has {dtype}; keep "
            "it in a tree of its own with partition()",
            leaf=path,
        )


def aligned(params: Tree, **others: Tree) -> list[tuple[Tensor, ...]]:
    """Put the leaves of trees side by side.

    Args:
        params: a tree of tensors.
        others: trees of the same structure and shapes, by the name in error messages.

    Returns:
        For each leaf of ``params`` the leaf and its counterparts.

    Raises:
        SpecMismatch: a tree has another structure or a leaf another shape; the message names both.
    """
    rows: list[tuple[Tensor, ...]] = []

    def collect(*row: Tensor) -> Tensor:
        rows.append(row)
        return row[0]

    try:
        tree.map(collect, params, *others.values())
    except (TypeError, ValueError) as error:
        _explain(params, others, error)
    names = tree.paths(params)
    for path, (p, *rest) in zip(names, rows, strict=True):
        for name, x in zip(others, rest, strict=True):
            if not isinstance(x, Tensor) or x.shape != p.shape:
                got = (
                    tuple(x.shape)
                    if isinstance(x, Tensor)
                    else None
                    if x is None
                    else type(x).__name__
                )
                raise SpecMismatch(
                    f"{name} must have the shapes of the parameters; leaf {path!r} is "
                    f"{tuple(p.shape)} in params and {got} in {name}; pass what belongs to these "
                    "very parameters, zeros for one without gradient",
                    leaf=path,
                )
    return rows


def _explain(params: Tree, others: dict[str, Tree], error: Exception) -> NoReturn:
    names = tree.paths(params)
    for name, other in others.items():
        theirs = tree.paths(other)
        missing = [path for path in names if path not in set(theirs)]
        extra = [path for path in theirs if path not in set(names)]
        if missing or extra:
            raise SpecMismatch(
                f"{name} must have the tree of the parameters; missing {missing[:3]}, unexpected "
                f"{extra[:3]}; pass what belongs to these very parameters, zeros for one without "
                "gradient",
                leaf=(missing or extra)[0],
            ) from error
    raise SpecMismatch(
        f"{' and '.join(others)} must have the tree of the parameters; the same leaves lie in "
        "other nodes, or under another placement, layout or group; redistribute() them to the "
        "placement of the parameters"
    ) from error


def own(leaves: Sequence[Tensor], donate: bool) -> list[Tensor]:
    """Return tensors that may be overwritten, contiguous and with the values of ``leaves``.

    With ``donate`` a dense leaf is taken over; a tied leaf is not, because two steps would write
    the same memory.
    """
    seen: set[int] = set()
    mine = []
    for leaf in leaves:
        take = (
            donate
            and leaf.is_contiguous()
            and not leaf.is_conj()
            and not leaf.is_neg()
            and id(leaf) not in seen
        )
        seen.add(id(leaf))
        mine.append(leaf if take else _dense(leaf).clone(memory_format=torch.contiguous_format))
    return mine


def _dense(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def flat_view(x: Tensor) -> Tensor:
    """View a tensor as a real vector, a complex number as two; copy only if not contiguous."""
    dense = _dense(x)
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1)


def step_count(count: Tensor) -> int:
    """Read how many steps a state has seen."""
    return int(count)
