"""Keep parts of the state in a store between uses: ZeRO-Offload."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zfun import stores, tree
from zfun.errors import PlacementError
from zfun.flat import Flat, flats
from zfun.layout import Layout
from zfun.optim import Optimizer, as_optimizer
from zfun.placement import S
from zfun.stores import Store
from zfun.transforms.grads._gradient import GradientFunction
from zfun.typing import Gradient, Loss

__all__ = ["offload", "offload_grads", "offload_loss", "offload_optimizer", "offload_params"]


def offload(value: Any, store: Store) -> Any:
    """Keep a part of the state in a store; no bit of the results changes.

    The type of ``value`` chooses the part: the state of an optimizer (:func:`offload_optimizer`),
    the gradients of a gradient function made by zfun (:func:`offload_grads`), the buffers of a
    ``Flat`` (:func:`offload_params`). Any other function is a loss, which then takes parameters in
    a store (:func:`offload_loss`).

    Args:
        value: an optimizer, a gradient function, a ``Flat``, or a loss.
        store: the store.

    Returns:
        A value of the same type.

    Example:
        >>> import torch
        >>> import zfun as zf
        >>> store = zf.stores.host()
        >>> optimizer = zf.offload(zf.optim.adamw(0.1), store)
        >>> optimizer.init({"w": torch.ones(2)}).mu["w"]
        Stored(state, 2 x torch.float32, host())
    """
    if isinstance(value, Flat):
        return offload_params(value, store)
    if isinstance(value, (Optimizer, tuple)):
        return offload_optimizer(as_optimizer(value), store)
    if isinstance(value, GradientFunction):
        return offload_grads(value, store)
    if not callable(value):
        raise PlacementError(
            "offload() takes an optimizer, a gradient function, a loss or a Flat; got "
            f"{type(value).__name__}"
        )
    return offload_loss(value, store)


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
    return params.with_buffers(
        buffer if isinstance(buffer, stores.Stored) else store.put(buffer, "params")
        for buffer in params.buffers
    )


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

    def offloaded(params: tree.Tree, batch: Any) -> Any:
        # value_and_grad() has already fetched replicated parameters and made a tree of views.
        for flat in flats(params):
            if any(not isinstance(b, stores.Stored) or b.store is not store for b in flat.buffers):
                raise PlacementError(
                    "an offloaded loss takes parameters that are in its store; got some that are "
                    "not; move them with params = zf.offload(params, store)"
                )
        if isinstance(params, Flat) and params.placement is not S:
            params = stores.resident(params)
        return loss(params, batch)

    return offloaded


@dataclass(frozen=True, slots=True)
class _Moved:
    """A move that is over."""

    handle: stores.Stored

    def wait(self) -> stores.Stored:
        """Return the handle of the store."""
        return self.handle


@dataclass(frozen=True, slots=True)
class _Put:
    """The hook of :func:`offload_grads`."""

    store: Store

    def start(self, buffer: Any, layout: Layout, bucket: int) -> _Moved:
        """Hand a bucket to the store."""
        del layout, bucket
        return _Moved(self.store.put(buffer, "grads"))


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
    if isinstance(vg, GradientFunction) and vg.group is not None:
        return dataclasses.replace(vg, hooks=(*vg.hooks, _Put(store)), _agreed=vg._agreed)

    def offloaded(params: tree.Tree, batch: Any) -> tuple[Any, Any]:
        loss, grads = vg(params, batch)
        if not isinstance(grads, Flat):
            raise PlacementError(
                f"offload_grads() takes flat gradients; got {type(grads).__name__} of whole "
                "leaves; wrap them in data_parallel() first"
            )
        return loss, grads.with_buffers(
            b if isinstance(b, stores.Stored) else store.put(b, "grads") for b in grads.buffers
        )

    return offloaded


def offload_optimizer(optimizer: Any, store: Store) -> Optimizer:
    """Keep an optimizer's state in a store, and take the step on the device of the store.

    Between the device and the store only gradients (down) and new parameters (up) cross, as in
    ZeRO-Offload (Ren et al., 2021); the state never crosses.

    Args:
        optimizer: an optimizer.
        store: the store of the state.

    Returns:
        An optimizer with the same results. Scalars of the state do not move.
    """
    inner = as_optimizer(optimizer)

    def put(state: Any) -> Any:
        return tree.map(
            lambda x: store.put(x, "state") if isinstance(x, Tensor) and x.ndim else x, state
        )

    def get(state: Any) -> Any:
        return tree.map(
            lambda x: stores.fetch(x, store.device) if isinstance(x, stores.Stored) else x, state
        )

    def down(value: tree.Tree, name: str) -> tree.Tree:
        def move(x: Tensor) -> Tensor:
            store.crossed("put", name, x.nbytes)
            return x.to(store.device)

        return tree.map(move, value)

    def up(new: tree.Tree, like: tree.Tree) -> tree.Tree:
        def move(x: Tensor, old: Tensor) -> Tensor:
            store.crossed("get", "params", x.nbytes)
            return x.to(old.device)

        return tree.map(move, new, like)

    def init(params: tree.Tree) -> Any:
        return put(inner.init(stores.resident(params) if isinstance(params, Flat) else params))

    def update(grads: tree.Tree, state: Any, params: tree.Tree) -> tuple[Any, Any]:
        updates, new = inner.update(down(grads, "grads"), get(state), down(params, "params"))
        return up(updates, params), put(new)

    def apply(
        grads: tree.Tree, state: Any, params: tree.Tree, *, donate: bool = False
    ) -> tuple[Any, Any]:
        new, new_state = inner.apply(
            down(grads, "grads"), get(state), down(params, "params"), donate=donate
        )
        return up(new, params), put(new_state)

    return inner._replace(init=init, update=update, apply=apply)
