"""The law of laws: a composition on ranks trains like a plain loop in one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group, NamedMesh, simulate
from zfun.collectives import mesh as named_mesh
from zfun.errors import OptionError
from zfun.layout import DEFAULT_BUCKET_BYTES, layout_of
from zfun.optim import as_optimizer
from zfun.options import FLOATING, FUNCTION, NAMES, each, instance, integer, number, takes
from zfun.testing import _plain
from zfun.testing._case import STANDARD, Case, Seams, feasible, names_of_model_axes
from zfun.testing._compositions import COMPOSITION, Composition
from zfun.testing._difference import Failure
from zfun.testing._laws import assert_same_bits
from zfun.testing._search import Search
from zfun.typing import Gradient, Loss


@takes(
    loss_fn=FUNCTION,
    mesh=instance(Mapping, "sizes by name", "{'dp': 2, 'tp': 2}") | None,
    compositions=each(COMPOSITION, "a sequence of compositions", "[Composition()]", least=1) | None,
    sizes=each(integer(1), "a sequence of numbers of ranks", "(1, 2, 4)", least=1) | None,
    num_micro_batches=each(integer(1), "a sequence of numbers", "(1, 2)", least=1) | None,
    unmoved=NAMES,
    dtype=FLOATING | None,
    tolerance=number(0) | None,
)
def assert_invariant(
    loss_fn: Loss,
    params: tree.Tree,
    batch: Any,
    optimizer: Any,
    make: Callable[[Any], Any] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    transform: Callable[[Gradient], Gradient] | None = None,
    wrap_group: Callable[[Group], Group] | None = None,
    compositions: Sequence[Composition] | None = None,
    sizes: Sequence[int] | None = None,
    num_micro_batches: Sequence[int] | None = None,
    num_steps: int = 3,
    split: Callable[[Any, int], Sequence[Any]] | None = None,
    trainable: Callable[[str, Any], bool] | None = None,
    unmoved: Collection[str] = (),
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
) -> tree.Tree:
    """Assert that training on any number of ranks, in any composition, is training in one process.

    The plain loop knows nothing of ranks: autograd on the whole batch, and the optimizer on the
    whole tree, in float64. Every composition runs on simulated ranks, each with a part of the
    batch, and must have the same loss, gradients and parameters in every step. A case that fails is
    reduced to a smaller one that fails too. Then known mistakes are made in the plain loop on
    purpose, and one that gives the same wrong numbers is the likely cause.

    Args:
        loss_fn: ``(params, batch) -> scalar``, or with aux, or :func:`zfun.weighted_mean`.
        params: a tree of tensors.
        batch: the batch of all ranks together, or a function of the step that returns the batch.
        optimizer: an optimizer, or an ``(init, update)`` pair.
        make: ``make(group)`` returns the ``init``, ``step`` and ``params`` of a whole loop, such as
            ``zf.zero(...)`` or a :class:`zfun.recipes.Zero` of your own, in place of compositions.
            With ``mesh=``, ``make(mesh)`` returns the loss over the mesh, such as
            ``zf.tensor_parallel(loss_fn, mesh["tp"], plan)``.
        mesh: sizes of axes by name, as for :func:`zfun.mesh` without -1. Stages 0 to 3 run
            over the axes that the loss of ``make(mesh)`` does not cut; batches differ along these.
            Ranks that share a leaf must keep equal bits of it.
        transform: your transform of gradient functions, ``gradient_fn -> gradient_fn``: outermost
            in every composition, and around plain autograd.
        wrap_group: ``group -> group``, your own group around the simulated one.
        compositions: by default the stages of ZeRO, with donation, offload and recomputation.
        sizes: numbers of ranks; by default those of 1, 2, 3 and 4 that divide the batch, and
            leave ``num_micro_batches`` even parts.
        num_micro_batches: numbers of micro-batches, which the compositions take in turn; each
            divides the part of every rank. By default 1, and 2 where the parts have an even number
            of rows. Your own loop of ``make`` has its own.
        num_steps: number of steps; a stale value shows from the second on.
        split: ``split(batch, n)`` returns the batches of n ranks; by default parts of the rows.
            Over a mesh n is the number of data ranks, of which the first axis counts fastest.
        trainable: which leaves are trained, by path and leaf; by default floating and complex ones.
        unmoved: paths of trained leaves that may keep their values.
        dtype: of floating leaves and batches in all runs; None keeps theirs, and then the plain
            loop alone computes in float64.
        tolerance: the largest error of a leaf, relative to the size of its gradient or change; by
            default 1e-9, and without ``dtype`` what the leaves' dtype can hold.

    Returns:
        The parameters of the plain loop after the last step.

    Raises:
        AssertionError: a run differs. The message has the smallest case, the first leaf that
            differs, and the likely cause.
        OptionError: a batch without enough rows, or one that the given numbers do not divide.

    Example:
        >>> import zfun as zf
        >>> loss_fn = lambda params, batch: ((params["w"] - batch) ** 2).mean()
        >>> params, batch = {"w": torch.zeros(1)}, torch.tensor([1.0, 3.0, 1.0, 3.0])
        >>> assert_invariant(loss_fn, params, batch, zf.optim.sgd(0.25), num_steps=2)
        {'w': tensor([1.5000], dtype=torch.float64)}
    """
    layout_of(tree.partition(params, _is_trained(None))[0])  # names a leaf that is no tensor
    batches = [batch(step) if callable(batch) else batch for step in range(num_steps)]
    problem_in = functools.partial(
        _problem, loss_fn, params, batches, optimizer, transform, trainable, split
    )
    exact = problem_in(torch.float64)
    plain = _plain.plain_loop(exact)
    _check_plain(exact, plain, _plain.plain_loop(exact, beside=True), unmoved)
    problem = exact if dtype == torch.float64 else problem_in(dtype)
    if tolerance is None:
        tolerance = _tolerance(problem)
    if mesh is None:
        seams = Seams(make, wrap_group)
        cases = _cases(problem, make is not None, compositions, sizes, num_micro_batches)
    else:
        given = {
            "transform": transform,
            "wrap_group": wrap_group,
            "compositions": compositions,
            "sizes": sizes,
            "num_micro_batches": num_micro_batches,
        }
        seams = Seams(loss_over=make)
        cases = _cases_over_mesh(problem, make, mesh, [x for x in given if given[x] is not None])
    search = Search(problem, exact, plain, seams, tolerance)
    for case in cases:
        found = search.find(case)
        if found is not None:
            case, found = search.shrink(case, found)
            text = search.message(case, found)
            cause = found.error if isinstance(found, Failure) else None
            raise AssertionError(text) from cause
    return exact.unflatten(plain[-1].after)


def _is_trained(
    trainable: Callable[[str, Any], bool] | None,
) -> Callable[[str, Any], bool]:
    def chosen(path: str, leaf: Any) -> bool:
        if trainable is not None:
            return trainable(path, leaf)
        return not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex()

    return chosen


def _problem(
    loss_fn: Loss,
    params: tree.Tree,
    batches: Sequence[Any],
    optimizer: Any,
    transform: Callable[[Gradient], Gradient] | None,
    trainable: Callable[[str, Any], bool] | None,
    split: Callable[[Any, int], Sequence[Any]] | None,
    dtype: torch.dtype | None,
) -> _plain.PlainProblem:
    def cast(x: Tensor) -> Tensor:
        return x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach()

    trained, rest = tree.partition(_plain.mapped(cast, params), _is_trained(trainable))
    frozen = (rest,) if tree.leaves(rest) else ()
    if dtype is not None:
        batches = [_plain.cast_floats(one, dtype) for one in batches]
    loss = (lambda params, batch: loss_fn(tree.combine(params, *frozen), batch)) if frozen else None
    rule = as_optimizer(optimizer)
    return _plain.PlainProblem(
        loss or loss_fn, trained, frozen, rule, transform, batches, split or _plain.split_rows
    )


def _tolerance(problem: _plain.PlainProblem) -> float:
    dtypes = {leaf.dtype for leaf in tree.leaves(problem.params)}
    worst = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    return 1e-9 if worst < 1e-12 else min(0.1, 1000 * worst)


_LOSS = (
    "a loss that reads a clock or draws random numbers, as dropout does, or a module whose buffers "
    "change, is not a function of parameters and batch; turn that off"
)
_TRANSFORM = (
    "loss and gradients agree, and transform= makes others of them; keep no values between calls "
    "in a closure, a global or an attribute"
)
_OPTIMIZER = (
    "the gradients agree, and the optimizer updates otherwise beside another run; keep its values "
    "in the state that init() makes and update() returns, not in a closure, a global or an "
    "attribute"
)


def _check_plain(
    problem: _plain.PlainProblem,
    plain: Sequence[_plain.PlainStep],
    again: Sequence[_plain.PlainStep],
    unmoved: Collection[str],
) -> None:
    """Refuse parts that are no functions, values that are not finite, and a leaf without use."""
    for step, (one, other) in enumerate(zip(plain, again, strict=True)):
        names = dict(zip(problem.paths, one.grads, strict=True))
        bad = [f"of leaf {path!r}" for path, g in names.items() if not torch.isfinite(g).all()]
        if bad or not math.isfinite(one.loss):
            raise AssertionError(
                f"the plain loop is finite; in step {step} the loss is {one.loss:.6g}, and "
                f"{len(bad)} gradients are not finite{f', first that {bad[0]}' if bad else ''}; "
                "lower the learning rate, or pass another batch"
            )
        named = lambda leaves: dict(zip(problem.paths, leaves, strict=True))
        for words, mine, others in (
            (_LOSS, (one.loss, named(one.raw)), (other.loss, named(other.raw))),
            (_TRANSFORM, named(one.grads), named(other.grads)),
            (_OPTIMIZER, named(one.after), named(other.after)),
        ):
            assert_same_bits(mine, others, f"two runs of the plain loop ({words}) in step {step}:")
    for path, old, new in zip(problem.paths, plain[0].before, plain[-1].after, strict=True):
        if old.numel() and path not in unmoved and torch.equal(old, new):
            raise AssertionError(
                f"training changes every trained leaf; leaf {path!r} kept its values; let the "
                f"loss use that leaf, or pass unmoved=[{path!r}]"
            )


def _cases(
    problem: _plain.PlainProblem,
    is_made: bool,
    compositions: Sequence[Composition] | None,
    sizes: Sequence[int] | None,
    num_micro_batches: Sequence[int] | None,
) -> Iterator[Case]:
    """Yield the cases, small groups first; micro-batches and bucket sizes take turns."""
    if is_made and num_micro_batches is not None:
        raise OptionError(
            "a loop of make= has its own micro-batches; got num_micro_batches="
            f"{tuple(num_micro_batches)} beside make=; pass it to the loop, as in "
            "zf.zero(..., num_micro_batches=2)"
        )
    chosen: Sequence[Composition | None] = compositions or STANDARD
    if is_made:
        chosen = [None]
    elif compositions is None and problem.transform is not None:
        # A transform outside of offload would see handles of a store in place of tensors.
        chosen = [one for one in STANDARD if "offload" not in one.grads]
    smallest = min(leaf.numel() * leaf.itemsize for leaf in tree.leaves(problem.params))
    buckets = (DEFAULT_BUCKET_BYTES, max(1, smallest))
    num_steps = len(problem.batches)
    divides = lambda size, count: feasible(problem, Case(None, size, num_steps, count))
    for size in _sizes(problem, sizes, num_micro_batches):
        if is_made:
            counts: Sequence[int] = (1,)
        elif num_micro_batches is None:
            counts = (1, 2) if divides(size, 2) else (1,)
        else:
            counts = num_micro_batches
            for count in counts:
                if not divides(size, count):
                    raise OptionError(
                        f"micro-batches divide the part of every rank evenly; {count} do not "
                        f"divide the parts of {_plain.rows_of(problem.batches[0])} rows for "
                        f"{size} rank{'s' if size > 1 else ''}; pass other num_micro_batches=, "
                        "sizes= or a batch of more rows"
                    )
        turns = list(itertools.product(buckets, counts))
        # Every count and every composition runs, whichever are more.
        for turn in range(max(len(chosen), 1 if is_made else len(turns))):
            bucket, count = turns[turn % len(turns)]
            yield Case(chosen[turn % len(chosen)], size, num_steps, count, bucket)


def _cases_over_mesh(
    problem: _plain.PlainProblem,
    loss_over: Callable[[NamedMesh], Loss] | None,
    sizes: Mapping[str, int],
    refused: Sequence[str],
) -> Iterator[Case]:
    """Yield the stages of ZeRO over a mesh."""
    if loss_over is None or refused:
        got = "no make=" if loss_over is None else f"{refused[0]}="
        raise OptionError(
            "a law over a mesh takes make(mesh), which returns the loss, and runs it at each stage;"
            f" got {got} beside mesh={dict(sizes)}; pass make=lambda mesh: zf.tensor_parallel("
            "loss_fn, mesh['tp'], plan), and leave the other out"
        )

    def names(group: Group) -> tuple[str, ...]:
        named = named_mesh(group, **sizes)
        known = names_of_model_axes(named, loss_over(named))
        return tuple(name for name in named.names if name not in known)

    data = simulate(math.prod(sizes.values()), names)[0]
    size = math.prod(sizes[name] for name in data)
    rows = _plain.rows_of(problem.batches[0])
    if problem.split is _plain.split_rows and rows is not None and rows % size:
        raise OptionError(
            f"the ranks along {', '.join(data)} divide the batch; got {rows} rows for {size} ranks;"
            f" pass a batch of {size * (rows // size + 1)} rows, or split="
        )
    case = Case(None, size, len(problem.batches), mesh=tuple(sizes.items()), data=data)
    for stage in range(4):
        yield dataclasses.replace(case, stage=stage)


def _sizes(
    problem: _plain.PlainProblem,
    sizes: Sequence[int] | None,
    num_micro_batches: Sequence[int] | None,
) -> Sequence[int]:
    rows = _plain.rows_of(problem.batches[0])
    each_rank = math.lcm(*(num_micro_batches or (1,)))
    if sizes is not None:
        for size in sizes:
            problem.split(problem.batches[0], size)  # refuses a batch that is too short
        return sizes
    found = [size for size in (1, 2, 3, 4) if rows is None or rows % (size * each_rank) == 0]
    if found in ([], [1]):
        micro = f" with {each_rank} micro-batches each" if each_rank > 1 else ""
        raise OptionError(
            f"the batch is divided among the ranks; got {rows} rows, which 2, 3 and 4{micro} do "
            f"not divide; pass a batch of {12 * each_rank} rows, or sizes="
        )
    return found
