"""Element-wise optimizers of torch.optim, and others with the same interface, as pure functions."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zfun import tree
from zfun.errors import NotElementwiseError, OptionError, SpecMismatch, ZfunError
from zfun.optim._base import (
    Optimizer,
    State,
    aligned,
    check_fields,
    check_trainable,
    flat_view,
    optimizer,
    remembered,
    step_count,
)
from zfun.optim._schedules import rate_at
from zfun.optim._stepping import no_steps
from zfun.options import Kind, shown, takes
from zfun.tree import Tree

__all__ = ["TorchState", "from_torch"]

# Torch's loops step the last elements of a tensor by other instructions, which round differently,
# and divide long tensors among threads. Therefore each piece is a whole number of vectors and no
# longer than a thread's share, so that bits do not depend on where a leaf was cut.
_PIECE = 1 << 15
_VECTORS = 64

_REFUSED = {
    "LBFGS": "searches along a line, over all parameters at once, and calls the loss again",
    "Adafactor": "keeps sums over rows and columns of a matrix",
    "Muon": (
        "makes whole matrices orthogonal; use zf.optim.muon, which sends each matrix to one rank"
    ),
    "SparseAdam": "takes sparse gradients",
}


class TorchState(NamedTuple):
    """State of :func:`from_torch`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        trees: the state of each element, by torch's names: trees like the parameters.
        scalars: the state of each tensor, by torch's names, equal for all tensors: 0-dim tensors on
            the CPU.
    """

    count: Tensor
    trees: dict[str, Tree]
    scalars: dict[str, Tensor]


def _is_torch_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, torch.optim.Optimizer)


@takes(make=Kind(_is_torch_class, ("a class of torch.optim",), "torch.optim.NAdam"))
@remembered
def from_torch(make: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    """Make a pure optimizer of an element-wise class of, or like, ``torch.optim``.

    Each step copies parameters, gradients and state in pieces to torch's optimizer and back, so the
    state may be sharded, offloaded and saved. :func:`sgd`, :func:`adam`, :func:`adamw` and
    :func:`adagrad` are faster, because they copy nothing.

    Args:
        make: the class, such as ``torch.optim.RMSprop``.
        options: the options of the class. ``lr`` may also be a function of the number of steps
            taken so far.

    Returns:
        An optimizer with :class:`TorchState`.

    Raises:
        OptionError: ``make`` is no such class, or does not take the options.
        NotElementwiseError: the class needs whole tensors, as LBFGS and Adafactor do, or the change
            of an element depends on where leaves are cut.

    Example:
        >>> optimizer = from_torch(torch.optim.RMSprop, lr=0.5, alpha=0.75)
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params, list(state.trees)
        ({'w': tensor([-1.0000,  1.0000])}, ['square_avg'])
    """
    if make.__name__ in _REFUSED:
        raise NotElementwiseError(
            "from_torch() takes optimizers that work element by element; "
            f"torch.optim.{make.__name__} {_REFUSED[make.__name__]}"
        )
    known = [name for name in inspect.signature(make).parameters if name != "params"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise OptionError(f"torch.optim.{make.__name__} has no option {name!r}; {remedy}")
    _check_takes(make, options)
    pure = _from_torch(make, options)
    _check_elementwise(pure, make.__name__)
    return pure


def _check_takes(make: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Refuse options that torch refuses, by torch's own words."""
    rate, given = options.get("lr"), dict(options)
    if callable(rate):
        given["lr"] = rate_at(rate, 0)
    with unset_fake_temporarily():
        try:
            make([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **given)
        except Exception as error:  # the code of any class runs here and may raise anything
            raise OptionError(
                f"from_torch() gives its options to the class; got {shown(options)} for "
                f"torch.optim.{make.__name__}, which raised {type(error).__name__}: {error}; pass "
                "the options of the class"
            ) from error


def _check_elementwise(pure: Optimizer, name: str) -> None:
    """Refuse an optimizer that mixes elements, because from_torch always cuts leaves."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def changes(sizes: list[int]) -> Tensor:
        params = list(values[0].split(sizes))
        state = pure.init(params)
        for grads in values[1:]:
            params, state = pure.apply(list(grads.split(sizes)), state, params)
        return torch.cat(params) - values[0]

    with unset_fake_temporarily():
        scale = torch.logspace(-3, 3, 48, dtype=torch.float64, device="cpu")
        values = [
            torch.randn(48, generator=generator, dtype=torch.float64, device="cpu") * scale
            for _ in range(4)
        ]
        try:
            one, other = changes([48]), changes([13, 1, 34])
        except ZfunError:
            raise
        except Exception as error:  # the code of any class runs here and may raise anything
            raise NotElementwiseError(
                f"an optimizer for from_torch() works element by element; {name} raised "
                f"{type(error).__name__} on a vector: {error}"
            ) from error
    wrong = ~torch.isclose(one, other, rtol=1e-9, atol=0.0)
    if wrong.any():
        raise NotElementwiseError(
            "an optimizer for from_torch() works element by element; in two cuts of one vector, "
            f"one element was changed by {one[wrong][0].item():.6g} and by "
            f"{other[wrong][0].item():.6g} by {name}; use one of zf.optim"
        )


def _from_torch(make: type[torch.optim.Optimizer], options: dict[str, Any]) -> Optimizer:
    schedule = options.get("lr")

    def at(before: int) -> dict[str, Any]:
        return {**options, "lr": rate_at(schedule, before)} if callable(schedule) else options

    @functools.lru_cache(maxsize=16)
    def kept(dtype: torch.dtype) -> dict[str, Any]:
        """Return torch's state of a tensor."""
        with unset_fake_temporarily():
            zeros = [torch.zeros(_VECTORS, dtype=dtype, device="cpu") for _ in range(2)]
            return {
                name: value
                for name, value in _stepped(make, at(0), zeros[:1], zeros[1:], [{}])[0].items()
                if value is not None
            }

    def init(params: Tree) -> TorchState:
        check_trainable(params)
        leaves, spec = tree.flatten(params)
        found = {name: value for leaf in leaves for name, value in kept(_real(leaf.dtype)).items()}

        def zeros(name: str, leaf: Tensor) -> Tensor:
            dtype = kept(_real(leaf.dtype))[name].dtype
            dtype = dtype.to_complex() if leaf.is_complex() else dtype
            return torch.zeros_like(
                leaf, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False
            )

        trees = {
            name: tree.unflatten(spec, [zeros(name, leaf) for leaf in leaves])
            for name, value in found.items()
            if _is_tree(value)
        }
        scalars = {
            name: torch.zeros_like(torch.as_tensor(value))
            for name, value in found.items()
            if not _is_tree(value)
        }
        return TorchState(no_steps(), trees, scalars)

    @torch.no_grad()
    def step(grads: Tree, state: State, params: Tree) -> tuple[list[Tensor], TorchState]:
        check_fields(state, *TorchState._fields)
        names = {name for p in tree.leaves(params) for name in kept(_real(p.dtype))}
        if names != {*state.trees, *state.scalars}:
            raise SpecMismatch(
                f"a state of from_torch() is of one class; got {[*state.trees, *state.scalars]} "
                f"where torch.optim.{make.__name__} keeps {sorted(names)}; pass "
                "optimizer.init(params) or the state of the last step"
            )
        rows = aligned(params, gradients=grads, **state.trees)
        before = step_count(state.count)
        scalars: dict[str, Tensor] = {}
        new: list[list[Tensor]] = []
        for row in rows:
            if row[0].numel() == 0:
                new.append(
                    [
                        x.detach().clone(memory_format=torch.contiguous_format)
                        for x in (row[0], *row[2:])
                    ]
                )
                continue
            values, gradients, *rest = [_pieces(x) for x in row]
            # Torch makes the first state itself, because that state need not be zeros.
            states = [
                _restored(state, kept(values[0].dtype), held) if before else {}
                for held in zip(*rest, strict=True)
            ]
            states = states or [
                _restored(state, kept(values[0].dtype), ()) if before else {} for _ in values
            ]
            after = _stepped(
                make,
                at(before),
                values,
                [g.to(p.dtype) for p, g in zip(values, gradients, strict=True)],
                states,
            )
            scalars = _same_for_all(make, scalars, state, after)
            parts = [values, *([found[name] for found in after] for name in state.trees)]
            new.append([_whole(part, x) for part, x in zip(parts, (row[0], *row[2:]), strict=True)])
        spec = tree.structure(params)
        trees = {
            name: tree.unflatten(spec, [leaf[1 + place] for leaf in new])
            for place, name in enumerate(state.trees)
        }
        return [leaf[0] for leaf in new], TorchState(
            state.count + 1, trees, scalars or dict(state.scalars)
        )

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, TorchState]:
        new, after = step(grads, state, params)
        # In float64 the difference of narrower numbers is exact, so adding the change gives
        # torch's bits.
        changes = [
            n.to(_wide(n)) - p.detach().to(_wide(n))
            for n, p in zip(new, tree.leaves(params), strict=True)
        ]
        return tree.unflatten(tree.structure(params), changes), after

    return optimizer(init, update)


def _is_tree(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _restored(state: TorchState, kinds: dict[str, Any], held: Sequence[Tensor]) -> dict[str, Any]:
    """Return the state of a piece in torch's form."""
    # Torch counts in place, so every piece needs a count of its own.
    scalars = {
        name: value.clone() if isinstance(kinds[name], Tensor) else type(kinds[name])(value.item())
        for name, value in state.scalars.items()
    }
    return {**dict(zip(state.trees, held, strict=False)), **scalars}


def _same_for_all(
    make: type[torch.optim.Optimizer],
    before: dict[str, Tensor],
    state: TorchState,
    after: Sequence[dict[str, Any]],
) -> dict[str, Tensor]:
    """Return torch's state of each tensor, which may depend on the number of steps only."""
    first = before or {name: torch.as_tensor(after[0][name]).clone() for name in state.scalars}
    for found in after:
        for name, value in first.items():
            if not torch.equal(torch.as_tensor(found[name]), value):
                raise NotElementwiseError(
                    "an optimizer that runs on shards works element by element; "
                    f"torch.optim.{make.__name__} keeps {name!r}, which is one number for each "
                    f"tensor; got {value.item():.6g} for one and {float(found[name]):.6g} "
                    "for another; use an optimizer that keeps a number for each element"
                )
    return first


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _pieces(x: Tensor) -> list[Tensor]:
    """Copy a leaf into pieces of real numbers, the last one filled up with zeros."""
    # Copies, because each piece must begin at a boundary of a vector and of a cache line.
    return [
        torch.nn.functional.pad(piece, (0, -piece.numel() % _VECTORS)).clone()
        for piece in flat_view(x).split(_PIECE)
    ]


def _whole(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Join pieces, in the shape and dtype of a leaf."""
    flat = torch.cat(list(pieces))[: flat_view(like).numel()].clone()
    return (
        torch.view_as_complex(flat.view(*like.shape, 2))
        if like.is_complex()
        else flat.view(like.shape)
    ).to(like.dtype)


def _stepped(
    make: type[torch.optim.Optimizer],
    options: dict[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Let torch take a step on ``values``, in place, and return torch's state."""
    twins = [torch.nn.Parameter(value, requires_grad=False) for value in values]
    made = make(twins, **options)
    for twin, grad, state in zip(twins, grads, states, strict=True):
        twin.grad = grad
        if state:
            made.state[twin] = state
    step: Callable[[], Any] = made.step
    step()
    return [dict(made.state[twin]) for twin in twins]
