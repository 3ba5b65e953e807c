"""Training in one process with plain autograd, as the reference of every composition.

Leaves are lists in tree order, in which a tied tensor stands at each of its places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import OptionError
from zfun.optim import Optimizer
from zfun.testing._train import scalar_of
from zfun.transforms import map_batch
from zfun.typing import Gradient, Loss

Leaves = list[Tensor]


@dataclass(frozen=True)
class PlainProblem:
    """A training problem, without ranks.

    Attributes:
        loss_fn: the loss of the trained leaves.
        params: the trained leaves.
        frozen: a tree of the other leaves, or nothing.
        rule: the optimizer.
        transform: the user's transform of gradient functions, or None.
        batches: the batch of all ranks, for each step.
        split: ``split(batch, n)`` returns the batches of n ranks.
    """

    loss_fn: Loss
    params: tree.Tree
    frozen: tuple[tree.Tree, ...]
    rule: Optimizer
    transform: Callable[[Gradient], Gradient] | None
    batches: Sequence[Any]
    split: Callable[[Any, int], Sequence[Any]]

    @property
    def paths(self) -> list[str]:
        return tree.paths(self.params)

    @property
    def first(self) -> list[int]:
        """For each leaf the first place of the same tensor."""
        places: dict[int, int] = {}
        return [places.setdefault(id(x), i) for i, x in enumerate(tree.leaves(self.params))]

    def unflatten(self, leaves: Sequence[Tensor]) -> tree.Tree:
        return tree.unflatten(tree.structure(self.params), list(leaves))


class PlainStep(NamedTuple):
    """One step of the plain loop.

    Attributes:
        batch: the batch of all ranks.
        before: the parameters before the step.
        state: the optimizer's state before the step.
        loss: the loss.
        raw: the gradients of autograd.
        grads: the gradients, after the user's transform.
        after: the parameters after the step.
    """

    batch: Any
    before: Leaves
    state: Any
    loss: float
    raw: Leaves
    grads: Leaves
    after: Leaves


def plain_loop(problem: PlainProblem, *, beside: bool = False) -> list[PlainStep]:
    """Train with plain autograd on the whole batch and the whole tree.

    Args:
        problem: the problem.
        beside: whether another training takes a first step beside each step of this one, which
            changes nothing if all state of the optimizer is in its state.
    """
    before = [leaf.detach().clone() for leaf in tree.leaves(problem.params)]
    before = [before[place] for place in problem.first]
    state = problem.rule.init(problem.unflatten(before))
    steps = []
    for batch in problem.batches:
        loss, raw = gradient_of(problem, before, batch)
        grads = transformed(problem, before, batch, loss, raw)
        if beside:
            updated(problem, before, problem.rule.init(problem.unflatten(before)), grads)
        after, new_state = updated(problem, before, state, grads)
        steps.append(PlainStep(batch, before, state, float(loss), raw, grads, after))
        before, state = after, new_state
    return steps


def gradient_of(
    problem: PlainProblem, values: Leaves, batch: Any, *, tied: bool = True
) -> tuple[Tensor, Leaves]:
    """Return the loss and the gradient; with ``tied=False`` the gradient of each place alone."""
    first = problem.first if tied else list(range(len(values)))
    places = sorted(set(first))
    variables = {i: values[i].detach().clone().requires_grad_() for i in places}
    loss = scalar_of(problem.loss_fn(problem.unflatten([variables[i] for i in first]), batch))
    wanted = [variables[i] for i in places]
    found = torch.autograd.grad(loss, wanted, materialize_grads=True, allow_unused=True)
    grads = dict(zip(places, found, strict=True))
    return loss.detach(), [grads[i] for i in first]


def transformed(
    problem: PlainProblem, values: Leaves, batch: Any, loss: Tensor, raw: Leaves
) -> Leaves:
    """Return the gradients that the user's transform makes of raw ones."""
    if problem.transform is None:
        return raw
    gradient = problem.transform(lambda params, batch: (loss, problem.unflatten(raw)))
    return tree.leaves(gradient(problem.unflatten(values), batch)[1])


def updated(problem: PlainProblem, values: Leaves, state: Any, grads: Leaves) -> tuple[Leaves, Any]:
    """Return the parameters and the state after an update."""
    updates, state = problem.rule.update(problem.unflatten(grads), state, problem.unflatten(values))
    added = [x + u for x, u in zip(values, tree.leaves(updates), strict=True)]
    # Equal sums of tied leaves are one tensor again.
    same = {id(x): y for x, y in zip(reversed(values), reversed(added), strict=True)}
    return [same[id(x)] for x in values], state


def split_rows(batch: Any, count: int) -> list[Any]:
    """Split the first dim of every tensor; other leaves and scalars go to every part."""

    def part(index: int) -> Any:
        return map_batch(
            lambda x: x.tensor_split(count)[index] if isinstance(x, Tensor) and x.ndim else x,
            batch,
        )

    rows = rows_of(batch)
    if rows is not None and rows < count:
        raise OptionError(
            f"every part of a batch has a row; got {rows} rows for {count} parts; pass a longer "
            "batch, or other sizes= and num_micro_batches="
        )
    return [part(index) for index in range(count)]


def rows_of(batch: Any) -> int | None:
    """Return the number of rows, or None for a batch without rows."""
    found: list[int] = []
    map_batch(lambda x: found.append(len(x)) if isinstance(x, Tensor) and x.ndim else None, batch)
    return min(found, default=None)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors of a batch; other leaves stay."""
    return map_batch(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


def mapped(fn: Callable[[Tensor], Tensor], value: tree.Tree) -> tree.Tree:
    """Map the tensors of a tree; tied leaves stay tied."""
    made: dict[int, Tensor] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = fn(leaf)
        return made[id(leaf)]

    return tree.map(one, value)
