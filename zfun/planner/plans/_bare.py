"""Recipes that a plan of a part of a step is read off: a loss alone, a state alone."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.planner._buffers import storage_of
from zfun.planner._meter import Meter, tensors_in
from zfun.transforms import cast, split_batch
from zfun.transforms.call._lazy import BucketSource, LazyLeaf
from zfun.transforms.grads._value import WeightedMean

_MARK_SIZE = 32
MARK_BYTES = 4 * _MARK_SIZE**2


class Mark(NamedTuple):
    """A place between two moments of a bare loss.

    Attributes:
        kind: ``"touch"`` of a leaf, where stage 3 notes a use, ``"use"`` by an operation,
            ``"complete"`` for the gradient of one, ``"end"`` of forward.
        leaf: the number of the leaf.
        moment: the number of moments before.
    """

    kind: str
    leaf: int
    moment: int


class Bare:
    """A loss and its gradients, dropped as soon as each is complete, on whole parameters.

    The loss gets lazy leaves, so that uses are noted where stage 3 notes them: before operations of
    forward and of recomputation, and where backward takes what autograd has saved.
    """

    def __init__(self, loss: Any, num_micro_batches: int, dtype: torch.dtype | None) -> None:
        self._inner = loss
        # The batch is cast too.
        self._loss = self._lazily if dtype is None else cast(self._lazily, dtype)
        self._dtype, self._num = dtype, num_micro_batches
        self.marks: list[Mark] = []
        self._leaves: dict[int, int] = {}

    def watch(self, meter: Meter) -> None:
        """Mark places among the moments that a meter sees."""
        self._meter = meter
        meter.listeners.append(self._used)

    def init(self, params: Any) -> Any:
        made: dict[int, Tensor] = {}

        def leaf(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            if id(x) not in made:
                made[id(x)] = x.detach() if self._dtype is None else x.detach().to(self._dtype)
            return made[id(x)]

        return tree.map(leaf, params)

    def step(self, params: Any, batch: Any) -> tuple[Any, None]:
        part = _first_part(batch, self._num)
        with torch.enable_grad():
            found = self._loss(params, part)
            self._mark("end", -1)
            found = found[0] if type(found) is tuple else found
            found = found.mean if isinstance(found, WeightedMean) else found
            found.backward(torch.ones_like(found.detach()))
        return params, None

    def _lazily(self, params: Any, batch: Any) -> Any:
        values, spec = tree.flatten(params)
        lazy: dict[int, LazyLeaf] = {}
        for number, x in enumerate(values):
            if isinstance(x, Tensor) and id(x) not in lazy:
                lazy[id(x)] = self._lazy(number, x)
        leaves = [lazy.get(id(x), x) for x in values]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return self._inner(tree.unflatten(spec, leaves), batch)

    def _lazy(self, number: int, x: Tensor) -> LazyLeaf:
        is_trained, leaf = x.is_floating_point(), x.detach()
        if is_trained:
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(functools.partial(self._drop, number))
        self._leaves[storage_of(x)] = number

        def load(_: LazyLeaf) -> Tensor:
            self._mark("touch", number)
            return leaf

        kind = tuple(x.shape), x.dtype, x.device, is_trained
        return LazyLeaf(*kind, str(number), BucketSource(load))

    def _pack(self, x: Tensor) -> Any:
        try:
            number = self._leaves.get(storage_of(x))
        except NotImplementedError:  # a sparse tensor
            return x
        return x if number is None else (number, x)

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, tuple):
            return saved
        self._mark("touch", saved[0])
        return saved[1]

    def _used(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for x in tensors_in((args, kwargs)):
            leaf = self._leaves.get(storage_of(x))
            if leaf is not None:
                self._mark("use", leaf)

    def _drop(self, number: int, x: Tensor) -> None:
        x.grad = None
        self._mark("complete", number)
        # An operation that frees nothing of the loss shows the bytes at this moment.
        torch.eye(_MARK_SIZE, dtype=torch.float32, device=x.device)

    def _mark(self, kind: str, leaf: int) -> None:
        self.marks.append(Mark(kind, leaf, self._meter.num_moments))


def _first_part(batch: Any, num_micro_batches: int) -> Any:
    return batch if num_micro_batches == 1 else split_batch(batch, num_micro_batches)[0]


class Still:
    """A state that takes no step."""

    def __init__(self, init: Any) -> None:
        self.init = init

    def step(self, state: Any, batch: Any) -> tuple[Any, None]:
        return state, None
