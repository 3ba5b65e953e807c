"""Keep parts of the state in a store between uses: ZeRO-Offload."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfun import stores, tree
from zfun.collectives import Work
from zfun.errors import OptionError, PlacementError
from zfun.flat import Flat, flats
from zfun.layout import Layout
from zfun.optim import Optimizer, PrepareInner, as_optimizer
from zfun.options import ANY, FRACTION, FUNCTION, takes
from zfun.placement import S
from zfun.stores import Store
from zfun.transforms.call._hooks import Done
from zfun.transforms.grads._gradient_function import GradientFunction
from zfun.transforms.grads._value import (
    ZfunGradient,
    ZfunLoss,
    changed_grads,
    check_gradient,
    check_loss,
)
from zfun.transforms.optimizer._cut import last_of
from zfun.transforms.optimizer.by_bucket import StateBuilder
from zfun.typing import Gradient, Loss


@takes(fraction=FRACTION)
def offload(value: Any, store: Store, *, fraction: float = 1.0) -> Any:
    """Keep a part of the state in a store; no bit of the results changes.

    The type of ``value`` chooses the part: the state of an optimizer (:func:`offload_optimizer`),
    the gradients of a gradient function (:func:`offload_grads`), the buffers of a ``Flat``
    (:func:`offload_params`), the parameters that a loss takes (:func:`offload_loss`), or all values
    of a state between two phases of a run (:func:`zfun.stores.offload_values`). A loss and a
    gradient function are known by type, because transforms made them; for a function of your own,
    call ``offload_loss`` or ``offload_grads``.

    Args:
        value: an optimizer, a ``Flat``, a state, or a gradient function or a loss made by a
            transform.
        store: the store.
        fraction: of an optimizer, the share of the elements whose state is in the store; the rest
            steps on the device.

    Returns:
        A value of the same type.

    Raises:
        OptionError: a function that no transform has made, or a fraction of another value than an
            optimizer.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> store = zf.stores.host()
        >>> optimizer = zf.offload(zf.optim.adamw(0.1), store)
        >>> optimizer.init({"w": torch.ones(2)}).mu["w"]
        Stored(state, 2 x torch.float32, host())
    """
    is_state = not isinstance(value, (Flat, Optimizer)) and len(flats(value)) > 0
    if isinstance(value, (Optimizer, tuple)) and not is_state:
        return offload_optimizer(as_optimizer(value), store, fraction=fraction)
    if fraction != 1:
        raise OptionError(
            "a fraction is for the state of an optimizer, of which a part may step on the device; "
            f"got fraction={fraction} for {type(value).__name__}; leave fraction out"
        )
    if is_state:
        return stores.offload_values(value, store)
    if isinstance(value, Flat):
        return offload_params(value, store)
    if isinstance(value, ZfunGradient):
        return offload_grads(value, store)
    if isinstance(value, ZfunLoss):
        return offload_loss(value, store)
    if callable(value):
        raise OptionError(
            "offload() knows a loss and a gradient function made by a transform; got the function "
            f"{getattr(value, '__name__', type(value).__name__)!r}, which may be either; call "
            "zf.transforms.offload_loss() for a loss, or zf.transforms.offload_grads() for a "
            "gradient function"
        )
    raise PlacementError(
        "offload() takes an optimizer, a gradient function, a loss or a Flat; got "
        f"{type(value).__name__}"
    )


@takes(params=ANY)
def offload_params(params: Flat, store: Store) -> Flat:
    """Move the buffers of a ``Flat`` to a store.

    Args:
        params: a flat of any placement.
        store: the store.

    Returns:
        A flat of handles, for losses wrapped in :func:`offload_loss`, :func:`apply`,
        :func:`unshard` and the other functions of flats.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> def main(group):
        ...     return zf.offload(zf.shard({"w": torch.ones(2)}, group), zf.stores.host()).buffers
        >>> zf.simulate(1, main)
        [(Stored(params, 32 x torch.float32, host()),)]
    """
    if not isinstance(params, Flat):
        raise PlacementError(
            f"offload_params() takes a Flat; got {type(params).__name__}; make one with "
            "zf.shard() or zf.replicate()"
        )
    kept = stores.located(
        lambda x: x if isinstance(x, stores.Stored) else store.put(x, "params"), params
    )
    stores.flush(kept)
    return kept


@takes(loss=FUNCTION)
def offload_loss(loss: Loss, store: Store) -> Loss:
    """Let a loss take parameters that are kept in a store.

    Sharded parameters are read bucket by bucket, at the gather; whole parameters all at once.

    Args:
        loss: ``(params, batch) -> scalar``.
        store: the store of the parameters.

    Returns:
        A loss over a ``Flat`` of handles.

    Raises:
        PlacementError: from the returned function, for parameters that are not in ``store``.
    """
    check_loss(loss, "offload_loss()")
    return _OffloadedLoss(loss, store)


@dataclass(frozen=True, slots=True, eq=False)
class _OffloadedLoss(ZfunLoss):
    """The loss that :func:`offload_loss` returns."""

    loss: Loss
    store: Store

    def __call__(self, params: tree.Tree, batch: Any) -> Any:
        """Return the loss of parameters in the store."""
        # value_and_grad() has already fetched replicated parameters and made a tree of views.
        for flat in flats(params):
            if any(
                not isinstance(b, stores.Stored) or b.store is not self.store for b in flat.buffers
            ):
                raise PlacementError(
                    "an offloaded loss takes parameters that are in its store; got some that are "
                    "not; move them with params = zf.offload(params, store)"
                )
        if isinstance(params, Flat) and params.placement is not S:
            params = stores.resident(params)
        return self.loss(params, batch)


@dataclass(frozen=True, slots=True)
class _Put:
    """The hook of :func:`offload_grads`."""

    store: Store

    def start(self, buffer: Any, layout: Layout, bucket: int) -> Done:
        """Hand a bucket to the store."""
        with stores.locating(leaf=layout.label(bucket)):
            return Done(self.store.put(buffer, "grads"))


@takes(vg=FUNCTION)
def offload_grads(vg: Gradient, store: Store) -> Gradient:
    """Move each bucket of gradients to a store when complete.

    Args:
        vg: a gradient function.
        store: the store.

    Returns:
        A gradient function whose gradients are a ``Flat`` of handles.

    Raises:
        PlacementError: gradients that are a tree of tensors.
    """
    check_gradient(vg, "offload_grads()")
    if isinstance(vg, GradientFunction) and vg.group is not None:
        return dataclasses.replace(vg, hooks=(*vg.hooks, _Put(store)), _agreed=vg._agreed)

    def offloaded(grads: Any) -> Flat:
        if not isinstance(grads, Flat):
            raise PlacementError(
                f"offload_grads() takes flat gradients; got {type(grads).__name__} of whole "
                "leaves; wrap them in data_parallel() first"
            )
        return stores.located(
            lambda x: x if isinstance(x, stores.Stored) else store.put(x, "grads"), grads
        )

    return changed_grads(vg, offloaded)


@takes(fraction=FRACTION)
def offload_optimizer(optimizer: Any, store: Store, *, fraction: float = 1.0) -> Optimizer:
    """Keep an optimizer's state in a store, and take the step on the device of the store.

    Between the device and the store only gradients (down) and new parameters (up) cross, as in
    ZeRO-Offload (Ren et al., 2021); the state never crosses. Flat parameters are stepped by
    :func:`zfun.apply` bucket by bucket: while one bucket is computed, the next two are read and the
    last is written, so that memory does not grow with the model. An optimizer that mixes buckets
    (:func:`zfun.optim.onebit_adam`, a norm over all leaves in a pair of your own, clipping that is
    not the first part of a chain) reads the whole state instead.

    Args:
        optimizer: an optimizer.
        store: the store of the state.
        fraction: the share of the elements whose state is in the store, by whole buckets from the
            last on, because their gradients are complete first; at least this share. The rest
            steps on the device of the parameters (Twin-Flow).

    Returns:
        An optimizer with the same results. Scalars of the state do not move.
    """
    inner = as_optimizer(optimizer)

    def at_once(params: tree.Tree) -> Any:
        state = inner.init(params)
        return _put(store, state, _last(state, fraction).__contains__)

    def init(params: tree.Tree) -> Any:
        if not isinstance(params, Flat):
            return at_once(params)
        layout, dtypes = params.layout, [buffer.dtype for buffer in params.buffers]
        builder = StateBuilder(
            inner, at_once, layout, dtypes, params.placement, params.group, store, fraction
        )
        for bucket, buffer in enumerate(stores.reading(params, layout.device)):
            builder.add(bucket, params.select([bucket]).with_buffers([buffer]))
        return builder.result()

    def update(grads: tree.Tree, state: Any, params: tree.Tree) -> tuple[Any, Any]:
        if fraction == 0:
            return inner.update(_beside(grads, params), state, params)
        updates, new = inner.update(
            _down(store, grads, "grads"), _get(store, state), _down(store, params, "params")
        )
        return _up(store, updates, params), _put_like(store, new, state)

    def apply(
        grads: tree.Tree, state: Any, params: tree.Tree, *, donate: bool = False
    ) -> tuple[Any, Any]:
        if fraction == 0:
            return inner.apply(_beside(grads, params), state, params, donate=donate)
        held = _get(store, state)
        # A step whose state the store cannot keep leaves the values in memory as they were.
        copy = donate and any(x.can_fail for x in stores.stored(state))
        if copy and fraction < 1:
            held = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, held)
        new, new_state = inner.apply(
            _down(store, grads, "grads"),
            held,
            _down(store, params, "params", copy=copy),
            donate=donate,
        )
        return _up(store, new, params), _put_like(store, new_state, state)

    return inner._replace(
        init=init,
        update=update,
        apply=apply,
        prepare=PrepareInner(inner),
        # The probe runs what takes a step, and makes no transfers.
        parts=inner.parts or (inner,),
    )


def _down(store: Store, value: tree.Tree, name: str, *, copy: bool = False) -> tree.Tree:
    """Bring gradients or parameters to the device of a store."""

    def move(x: Tensor) -> Tensor:
        store.crossed("put", name, x.nbytes)
        return x.to(store.device, copy=copy)

    return tree.map(move, value)


def _up(store: Store, new: tree.Tree, like: tree.Tree) -> tree.Tree:
    """Bring new parameters or updates to the device of the old parameters."""

    def move(x: Tensor, old: Tensor) -> Tensor:
        store.crossed("get", "params", x.nbytes)
        return x.to(old.device)

    return tree.map(move, new, like)


def _get(store: Store, state: Any) -> Any:
    """Bring a whole state to the device of a store."""

    def start(x: Any) -> Any:
        if isinstance(x, stores.Stored):
            return x.get(store.device)
        return x.to(store.device) if isinstance(x, Tensor) and x.ndim else x

    started = stores.located(start, state)
    return stores.located(lambda x: x.wait() if isinstance(x, Work) else x, started)


def _put(store: Store, state: Any, is_kept: Callable[[int], bool]) -> Any:
    """Put those tensors of a state into a store whose places are kept there."""
    places = itertools.count()

    def move(x: Any) -> Any:
        place = next(places)
        return store.put(x, "state") if isinstance(x, Tensor) and x.ndim and is_kept(place) else x

    kept = stores.located(move, state)
    stores.flush(kept)
    return kept


def _put_like(store: Store, new: Any, old: Any) -> Any:
    """Put the tensors of a new state where those of the old one are: in a store, or on a device."""
    before = tree.leaves(old)
    if len(tree.leaves(new)) != len(before):
        return _put(store, new, lambda place: True)
    kept = _put(store, new, lambda place: isinstance(before[place], stores.Stored))
    return tree.unflatten(
        tree.structure(kept),
        [
            x.to(its.device) if isinstance(x, Tensor) and isinstance(its, Tensor) else x
            for x, its in zip(tree.leaves(kept), before, strict=True)
        ],
    )


def _beside(grads: tree.Tree, params: tree.Tree) -> tree.Tree:
    """Bring gradients, which may be in a store of their own, to the device of the parameters."""
    return tree.map(lambda grad, param: grad.to(param.device), grads, params)


def _last(state: Any, fraction: float) -> set[int]:
    """Return the places of the last leaves of a state that hold a fraction of the elements."""
    leaves = tree.leaves(state)
    numels = [x.numel() if isinstance(x, Tensor) and x.ndim else 0 for x in leaves]
    return set(last_of(numels, fraction))
