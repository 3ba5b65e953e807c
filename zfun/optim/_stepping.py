"""Element-wise rules: a loop that runs a kernel on each buffer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from zfun import tree
from zfun.optim._base import InitFn, Optimizer, State
from zfun.optim._factors import ScalingApply
from zfun.optim._missed import runs_of
from zfun.optim._rows import aligned, check_fields, check_trainable, flat_view, own, step_count
from zfun.options import TEXT, each, function, takes
from zfun.tree import Tree


class Into(NamedTuple):
    """The target of a step: new updates, copies of the parameters, or the parameters.

    Attributes:
        updates: whether the step returns updates; else the step returns new parameters.
        donate: whether the step may overwrite parameters and state.
    """

    updates: bool
    donate: bool

    def targets(self, params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | list[None]]:
        """Return the parameters for a kernel, and a tensor for each update, or ``None``."""
        if self.updates:
            return list(params), [
                torch.empty_like(p, memory_format=torch.contiguous_format, requires_grad=False)
                for p in params
            ]
        return own(params, self.donate), [None] * len(params)

    def results(
        self, targets: list[Tensor], changes: list[Tensor] | list[None]
    ) -> Sequence[Tensor | None]:
        """Return the tensors of :meth:`targets` that the kernels have written."""
        return changes if self.updates else targets


StepFn: TypeAlias = Callable[[Tree, State, Tree, Into], tuple[Tree, State]]


# One step on flat buffers: ``kernel(param, grad, *moments, change)``, like the kernels of zfun.ops.
Kernel: TypeAlias = Callable[..., None]


def assemble(init: InitFn, step: StepFn) -> Optimizer:
    """Make an optimizer of one function for ``update`` and ``apply``."""

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return step(grads, state, params, Into(updates=True, donate=False))

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, State]:
        return step(grads, state, params, Into(updates=False, donate=donate))

    return Optimizer(init, update, apply)


@takes(
    names=each(TEXT, "a sequence of names", "['mu']"),
    kernel_at=function("a function of the step", "lambda step: kernel"),
)
def elementwise(
    make_state: Callable[..., Any], names: Sequence[str], kernel_at: Callable[..., Kernel]
) -> Optimizer:
    """Make an optimizer of a kernel that steps one flat buffer in one pass over the memory.

    The kernel is ``kernel(param, grad, *moments, change)`` on 1-D tensors of one length: reads
    ``grad``, writes the moments, and writes the step to ``change``, or adds the step to ``param``
    where ``change`` is None. Each element must depend only on the elements at the same index,
    with the same roundings wherever a buffer is cut, and zeros must stay zeros.

    Args:
        make_state: ``make_state(count, *trees)``: a state of the number of steps taken (0-dim int64
            on the CPU) and of one tree like the parameters for each name.
        names: the attributes of the state that hold these trees, in the order in which the kernel
            takes the trees; all begin as zeros.
        kernel_at: ``kernel_at(count)`` returns the kernel of the step after ``count`` steps. With a
            second argument, ``kernel_at(count, taken)`` returns the kernel for leaves that have
            taken only ``taken`` of these steps, because :func:`zfun.zero` left out steps that did
            not use the leaves: a schedule follows ``count``, a bias correction ``taken``.

    Returns:
        An optimizer whose ``update`` and ``apply`` run the kernel. Leaves without a gradient
        (``Flat.missed``) stay unchanged.

    Example:
        >>> from zfun.optim import SgdState
        >>> def heavy_ball(param, grad, velocity, change):
        ...     velocity.mul_(0.5).add_(grad)
        ...     step = velocity * -0.1
        ...     param.add_(step) if change is None else change.copy_(step)
        >>> optimizer = elementwise(SgdState, ["velocity"], lambda count: heavy_ball)
        >>> params = {"w": torch.ones(2)}
        >>> optimizer.apply({"w": torch.ones(2)}, optimizer.init(params), params)[0]
        {'w': tensor([0.9000, 0.9000])}
    """
    return assemble(*_init_and_step(make_state, names, kernel_at))


def of_rules(
    make_state: Callable[..., Any], names: Sequence[str], kernel_at: Callable[..., Kernel]
) -> Optimizer:
    """Make an optimizer like :func:`elementwise` of kernels that take ``scale=`` and ``taken=``."""
    init, step = _init_and_step(make_state, names, kernel_at)

    def run(
        grads: Tree, state: State, params: Tree, donate: bool, scale: Any, taken: Any
    ) -> tuple[Tree, State]:
        return step(grads, state, params, Into(updates=False, donate=donate), scale, taken)

    return assemble(init, step)._replace(apply=ScalingApply(run))


def _init_and_step(
    make_state: Callable[..., Any], names: Sequence[str], kernel_at: Callable[..., Kernel]
) -> tuple[InitFn, Callable[..., tuple[Tree, State]]]:
    counts_twice = len(inspect.signature(kernel_at).parameters) > 1

    def init(params: Tree) -> State:
        check_trainable(params)
        return make_state(no_steps(), *(zeros_like(params) for _ in names))

    def step(
        grads: Tree,
        state: State,
        params: Tree,
        into: Into,
        scale: Tensor | float | None = None,
        taken: Tensor | None = None,
    ) -> tuple[Tree, State]:
        check_fields(state, "count", *names)
        rows = aligned(params, gradients=grads, **{name: getattr(state, name) for name in names})
        count, runs = step_count(state.count), runs_of(params, grads)
        missed = {0} if runs is None else {run.missed for its in runs for run in its}
        kernels = {
            each: kernel_at(count, count - each) if counts_twice else kernel_at(count)
            for each in missed
        }
        pairs = (("scale", scale), ("taken", taken))
        options = {name: value for name, value in pairs if value is not None}
        if options:
            kernels = {each: partial(kernel, **options) for each, kernel in kernels.items()}
        held = [own([row[2 + place] for row in rows], into.donate) for place in range(len(names))]
        targets, changes = into.targets([row[0] for row in rows])
        for index, (row, target, change) in enumerate(zip(rows, targets, changes, strict=True)):
            views = [target, row[1], *(moment[index] for moment in held), change]
            vectors = [None if x is None else flat_view(x) for x in views]
            if runs is None:
                kernels[0](*vectors)
                continue
            if change is not None:
                change.zero_()
            for start, stop, age in runs[index]:
                kernels[age](*(None if x is None else x[start:stop] for x in vectors))
        spec = tree.structure(params)
        count_after = state.count + (1 if taken is None else taken)
        after = make_state(count_after, *(tree.unflatten(spec, moment) for moment in held))
        return tree.unflatten(spec, into.results(targets, changes)), after

    return init, step


def no_steps() -> Tensor:
    """Return the count of a new state."""
    # Made from a Python number, whose value is known to traces of fake tensors too.
    return torch.tensor(0, dtype=torch.int64, device="cpu")


def zeros_like(params: Tree) -> Tree:
    """Return a tree like another, of zeros."""

    def zeros(p: Tensor) -> Tensor:
        return torch.zeros_like(p, memory_format=torch.contiguous_format, requires_grad=False)

    return tree.map(zeros, params)
