"""Recipes that a plan of a part of a step is read off: a loss alone, a state alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.transforms import cast, split_batch
from zfun.transforms.grads._value import WeightedMean

MARK, _MARK_SIZE = "eye", 32


class Bare:
    """A loss and its gradients, dropped as soon as each is complete, on whole parameters."""

    def __init__(self, loss: Any, num_micro_batches: int, dtype: torch.dtype | None) -> None:
        # The batch is cast too.
        self._loss = loss if dtype is None else cast(loss, dtype)
        self._dtype, self._num = dtype, num_micro_batches
        self.complete: list[int] = []

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
        part = batch if self._num == 1 else split_batch(batch, self._num)[0]
        trained: dict[int, Tensor] = {}
        values, spec = tree.flatten(params)
        with torch.enable_grad():
            for number, x in enumerate(values):
                if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in trained:
                    trained[id(x)] = x.detach().requires_grad_()
                    drop = functools.partial(self._drop, number)
                    trained[id(x)].register_post_accumulate_grad_hook(drop)
            leaves = [trained.get(id(x), x) for x in values]
            found = self._loss(tree.unflatten(spec, leaves), part)
            found = found[0] if type(found) is tuple else found
            found = found.mean if isinstance(found, WeightedMean) else found
            found.backward(torch.ones_like(found.detach()))
        return params, None

    def _drop(self, number: int, x: Tensor) -> None:
        x.grad = None
        self.complete.append(number)
        # An operation that no backward has marks the place in the plan.
        torch.eye(_MARK_SIZE, device=x.device)


class Still:
    """A state that takes no step."""

    def __init__(self, init: Any) -> None:
        self.init = init

    def step(self, state: Any, batch: Any) -> tuple[Any, None]:
        return state, None
