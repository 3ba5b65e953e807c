"""Run an optimizer to find out whether shards give the same steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zfun import tree
from zfun.collectives import Group, simulate, single_group
from zfun.errors import NotElementwiseError
from zfun.flat import Flat, leaf_spans, local_shards, ravel, ravel_buckets
from zfun.layout import layout_of
from zfun.optim import Optimizer, apply_updates
from zfun.options import instance, takes
from zfun.placement import S
from zfun.stores import Stored
from zfun.tree import Tree

_Result = TypeVar("_Result")

_SHAPES = ((7, 5), (5,), (), (4, 3, 3))
_SCALES = (1.0, 1e-3, 10.0, 1e3)
# Cuts that go through leaves and join leaves, of lengths that no leaf has.
_CUTS = (13, 1, 38, 25)
_NUM_STEPS = 3
_RTOL = 1e-9

_REMEDY = (
    "shards are 1-D pieces of many leaves, so write the update element by element; for a norm "
    "over all parameters use zf.optim.clip_by_global_norm in a chain, or "
    "zf.reductions.global_norm: both know about shards; "
    "an optimizer that needs whole leaves runs without shard_optimizer"
)


@takes(optimizer=instance(Optimizer, "an optimizer of zf.optim", "zf.optim.sgd(0.1)"))
def probe(optimizer: Optimizer) -> None:
    """Find out whether an optimizer works element by element, and so may run on shards.

    The probe takes three steps on a small float64 tree, twice, then on the same elements cut into
    other pieces, then on two simulated ranks with a half each. The changes must agree to a relative
    1e-9, and padding must stay zero. So a norm over all ranks
    (:func:`zfun.optim.clip_by_global_norm`) passes, and a norm over one leaf or over one rank's
    elements does not. An optimizer that passed is not run again.

    The parts of a chain and the optimizers of labels are probed one by one. An optimizer with a
    placement was probed by ``shard_optimizer``, and a ``by_leaf`` optimizer may mix elements:
    neither is run.

    Args:
        optimizer: an optimizer.

    Raises:
        NotElementwiseError: the changes differ, the structure of the state changes, the
            optimizer is random, or the optimizer raised.

    Example:
        >>> from zfun.optim import adamw, optimizer
        >>> probe(adamw(1e-3))
        >>> def per_leaf_norm(grads, state, params):
        ...     return tree.map(lambda g: -0.1 * g / g.norm(), grads), state
        >>> probe(optimizer(lambda params: (), per_leaf_norm))
        Traceback (most recent call last):
        ...
        zfun.errors.NotElementwiseError: an optimizer that runs on shards works element by ...
    """
    for part in optimizer.parts:
        probe(part)
    if optimizer.parts or optimizer.placement is not None or optimizer.by_leaf:
        return
    try:
        hash(optimizer)
    except TypeError:
        _probe(optimizer)
    else:
        _passed(optimizer)


# An optimizer that fails is probed again, because lru_cache keeps no exceptions.
@functools.lru_cache(maxsize=64)
def _passed(optimizer: Optimizer) -> None:
    _probe(optimizer)


def check_padding(optimizer: Optimizer, dtypes: Iterable[torch.dtype]) -> None:
    """Refuse an optimizer that does not keep the padding of buffers zero in one of these dtypes.

    The probe computes in float64, where ``0 / (0 + 1e-8)`` is zero; in float16 it is NaN.
    """
    if optimizer.wide is not None:
        dtypes = {torch.promote_types(dtype, optimizer.wide) for dtype in dtypes}
    for part in optimizer.parts:
        check_padding(part, dtypes)
    if optimizer.parts or optimizer.placement is not None or optimizer.by_leaf:
        return
    for dtype in set(dtypes) - {torch.float64}:
        if not (dtype.is_floating_point or dtype.is_complex):
            continue
        try:
            hash(optimizer)
        except TypeError:
            _pad(optimizer, dtype)
        else:
            _padded(optimizer, dtype)


def _pad(optimizer: Optimizer, dtype: torch.dtype) -> None:
    with unset_fake_temporarily():
        values = {"leaf": torch.tensor([1.0, -2.0, 0.5], dtype=dtype, device="cpu")}
        params = ravel(values, layout_of(values, size=1), single_group())
        grads, state = params, optimizer.init(params)
        for step in (optimizer.apply, _by_update(optimizer), optimizer.apply):
            params, state = step(grads, state, params)
            rest = params.buffers[0][leaf_spans(params)[0].stop :]
            if rest.count_nonzero():
                _refuse(
                    f"in {dtype} the padding of buffers became {rest[0].item():.6g}, from elements "
                    "that are zero with gradients that are zero",
                    "compute with numbers of this dtype that stay finite, such as a larger eps, or "
                    "keep masters with precision=zf.Precision(master=torch.float32)",
                )


# An optimizer that fails is asked again, because lru_cache keeps no exceptions.
_padded = functools.lru_cache(maxsize=64)(_pad)


def _by_update(optimizer: Optimizer) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, after = optimizer.update(grads, state, params)
        return apply_updates(params, updates), after

    return step


def is_separable(optimizer: Optimizer) -> bool:
    """Whether leaves alone get the same steps as together, so that buckets may go one by one.

    An optimizer with ``prepare`` is trusted, because ``prepare`` is the promise. Another one is run
    on all leaves and on each leaf alone; a norm over all leaves fails.
    """
    if optimizer.partial is not None or not all(map(is_separable, optimizer.parts)):
        return False
    if optimizer.prepare is not None:
        return True
    try:
        hash(optimizer)
    except TypeError:
        return _separates(optimizer)
    return _separates_cached(optimizer)


def _separates(optimizer: Optimizer) -> bool:
    with unset_fake_temporarily():
        params, grads = _samples()
        try:
            whole = _run(optimizer, params, grads)
            alone = [
                _run(optimizer, [leaf], [[step[index]] for step in grads])
                for index, leaf in enumerate(params)
            ]
        except Exception:  # noqa: BLE001, the user's code runs here and may raise anything
            return False
    joined = [
        _Change(*([x for part in parts for x in part] for parts in zip(*changes, strict=True)))
        for changes in zip(*alone, strict=True)
    ]
    return all(map(_same_bits, whole, joined))


_separates_cached = functools.lru_cache(maxsize=64)(_separates)


def _samples() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return parameters, and the gradients of several steps."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def sample() -> list[Tensor]:
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * scale
            for shape, scale in zip(_SHAPES, _SCALES, strict=True)
        ]

    return sample(), [sample() for _ in range(_NUM_STEPS)]


def _probe(optimizer: Optimizer) -> None:
    # Under fake tensors, too, the probe needs numbers to compare.
    with unset_fake_temporarily():
        params, grads = _samples()
        whole = _attempt("on leaves of several shapes", lambda: _run(optimizer, params, grads))
        again = _attempt(
            "on leaves of several shapes, again", lambda: _run(optimizer, params, grads)
        )
        if not all(map(_same_bits, whole, again)):
            _refuse(
                "two runs from one start on the same gradients made different changes",
                "keep whatever changes from step to step, random numbers and counters too, in "
                "the state that init makes and update returns",
            )
        _compare(
            whole[-2:-1],
            whole[-1:],
            "update and then add with apply",
            "make apply do what update does and then add, or build it with "
            "zf.optim.optimizer(init, update)",
        )
        cut = _attempt(
            "on the same elements as 1-D pieces",
            lambda: _run(optimizer, _recut(params), [_recut(step) for step in grads]),
        )
        _compare(
            [_ravelled(change) for change in whole],
            cut,
            f"leaves of shapes {list(_SHAPES)} and 1-D pieces of lengths {list(_CUTS)}",
        )
        ranks = _attempt(
            "on two ranks with half of the elements each",
            lambda: _run_sharded(optimizer, params, grads),
        )
        _compare(
            _laid_out(whole),
            ranks,
            "the whole on one rank and halves on two ranks (with their padding, which must stay "
            "zero)",
        )


class _Change(NamedTuple):
    """The change of each leaf in one step, and the largest rounding error of adding the change."""

    values: list[Tensor]
    rounding: list[Tensor]


def _run(optimizer: Optimizer, params: Tree, grads: Sequence[Tree]) -> list[_Change]:
    """Take steps by update and then add; the last one also by apply, which must agree."""
    trace: list[_Change] = []
    state = optimizer.init(params)
    kind = _kind_of(state)
    for step, grad in enumerate(grads):
        updates, after = optimizer.update(grad, state, params)
        added = apply_updates(params, updates)
        changes = tree.leaves(updates)
        trace.append(
            _Change([u.to(torch.float64) for u in changes], [torch.zeros_like(u) for u in changes])
        )
        if step == len(grads) - 1:
            applied, after = optimizer.apply(grad, state, params)
            trace += [_difference(added, params), _difference(applied, params)]
            added = applied
        if _kind_of(after) != kind:
            _refuse(
                f"the state changed its structure, shapes or dtypes at step {step}, and a state "
                "that is stored and restored must keep them",
                "make in init all that the state will hold, zeros for what comes later",
            )
        params, state = added, after
    return trace


def _difference(after: Tree, before: Tree) -> _Change:
    pairs = list(zip(tree.leaves(after), tree.leaves(before), strict=True))
    return _Change(
        [x - y for x, y in pairs], [4e-16 * torch.maximum(x.abs(), y.abs()) for x, y in pairs]
    )


def _kind_of(state: Tree) -> tuple[Any, ...]:
    # A store may keep one tensor on a disk and the next one in host memory.
    kinds = [
        (tuple(x.shape), x.dtype) if isinstance(x, (Tensor, Stored)) else type(x)
        for x in tree.leaves(state)
    ]
    return tree.structure(state), kinds


def _recut(values: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.cat([x.reshape(-1) for x in values]).split(list(_CUTS)))


def _ravelled(change: _Change) -> _Change:
    return _Change(_recut(change.values), _recut(change.rounding))


def _run_sharded(
    optimizer: Optimizer, params: list[Tensor], grads: list[list[Tensor]]
) -> list[_Change]:
    """Run on two simulated ranks, and put the halves of each change together."""
    layout = layout_of(params, size=2)

    def main(group: Group) -> list[_Change]:
        def shard(value: list[Tensor]) -> Flat:
            whole = ravel(value, layout, group)
            return whole.with_buffers([piece.clone() for piece in local_shards(whole)], S)

        return _run(optimizer, shard(params), [shard(step) for step in grads])

    return [
        _Change(
            *(
                [torch.cat(halves) for halves in zip(*parts, strict=True)]
                for parts in zip(*ranks, strict=True)
            )
        )
        for ranks in zip(*simulate(2, main), strict=True)
    ]


def _laid_out(trace: list[_Change]) -> list[_Change]:
    """Lay changes of leaves out as the buffers of two ranks, with zeros for padding."""
    layout = layout_of(
        [torch.empty(shape, dtype=torch.float64, device="cpu") for shape in _SHAPES], size=2
    )
    return [_Change(*(list(ravel_buckets(part, layout)) for part in change)) for change in trace]


def _same_bits(first: _Change, second: _Change) -> bool:
    return all(
        torch.equal(x.view(torch.int64), y.view(torch.int64))
        for x, y in zip(first.values, second.values, strict=True)
    )


def _compare(expected: list[_Change], got: list[_Change], what: str, remedy: str = _REMEDY) -> None:
    for left, right in zip(expected, got, strict=True):
        for x, y, rounding in zip(left.values, right.values, left.rounding, strict=True):
            wrong = ~((x - y).abs() <= _RTOL * torch.maximum(x.abs(), y.abs()) + rounding)
            if wrong.any():
                left_value, right_value = x[wrong][0].item(), y[wrong][0].item()
                _refuse(
                    f"comparing {what}, one element changed by {left_value:.6g} and by "
                    f"{right_value:.6g} in one step",
                    remedy,
                )


def _attempt(where: str, run: Callable[[], _Result]) -> _Result:
    try:
        return run()
    except NotElementwiseError:
        raise
    except Exception as error:  # the user's code runs here and may raise anything
        raise NotElementwiseError(
            "an optimizer that runs on shards works element by element, whatever the shapes and "
            f"names of leaves; probed {where}, this one raised {type(error).__name__}: {error}; "
            f"{_REMEDY}"
        ) from error


def _refuse(what: str, remedy: str = _REMEDY) -> NoReturn:
    raise NotElementwiseError(
        f"an optimizer that runs on shards works element by element; {what}; {remedy}"
    )
