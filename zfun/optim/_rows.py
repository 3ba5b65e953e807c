"""The leaves of parameters, gradients and states, row by row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError, SpecMismatch
from zfun.flat import flats
from zfun.options import shown
from zfun.sources.deferred import memory_of
from zfun.tree import Tree


def check_trainable(params: Tree) -> None:
    """Refuse leaves that cannot have a gradient.

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


def check_fields(state: Any, *names: str) -> None:
    """Refuse a state without some attributes, which is the state of another optimizer.

    Raises:
        SpecMismatch: an attribute is missing, or ``count`` is no tensor; plain tuples have a method
            of this name.
    """
    for name in names:
        if not hasattr(state, name) or (name == "count" and not isinstance(state.count, Tensor)):
            raise SpecMismatch(
                f"an optimizer takes the state that its init returned; got {shown(state)} "
                f"without {name!r}; pass optimizer.init(params) or the state of the last step"
            )


def aligned(params: Tree, **others: Tree) -> list[tuple[Tensor, ...]]:
    """Return the leaves of several trees, row by row.

    Args:
        params: a tree of tensors.
        others: trees of the same structure and shapes, by the name in error messages.

    Returns:
        For each leaf of ``params`` the leaf and its counterparts.

    Raises:
        LeafError: a parameter is no tensor, or holds integers or booleans.
        SpecMismatch: a tree has another structure, or a leaf another shape, is sparse, or is
            complex where the parameter is real; the message names both.
    """
    rows: list[tuple[Tensor, ...]] = []

    def collect(*row: Tensor) -> Tensor:
        rows.append(row)
        return row[0]

    try:
        tree.map(collect, params, *others.values())
    except (TypeError, ValueError) as error:
        _explain(params, others, error)
    for place, (p, *rest) in enumerate(rows):
        # The paths take longer than the rest of the check, and only a message shows them.
        if not (_is_trainable(p) and all(_is_like(p, x) for x in rest)):
            _refuse_row(tree.paths(params)[place], p, dict(zip(others, rest, strict=True)))
    return rows


def _is_trainable(p: Any) -> bool:
    return isinstance(p, Tensor) and (p.is_floating_point() or p.is_complex())


def _is_like(p: Tensor, x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.shape == p.shape
        and x.is_complex() is p.is_complex()
        and x.layout is torch.strided
    )


def _refuse_row(path: str, p: Any, others: dict[str, Any]) -> NoReturn:
    """Say why a parameter, or the counterparts of a parameter, are refused."""
    if not isinstance(p, Tensor):
        raise LeafError(
            f"parameters are tensors; leaf {path!r} is {type(p).__name__}; pass "
            "torch.as_tensor(leaf), or leave the leaf out with zf.partition()",
            leaf=path,
        )
    _check_dtype(path, p.dtype)
    name, x = next((name, x) for name, x in others.items() if not _is_like(p, x))
    if not isinstance(x, Tensor) or x.shape != p.shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else None if x is None else type(x).__name__
        raise SpecMismatch(
            f"{name} must have the shapes of the parameters; leaf {path!r} is "
            f"{tuple(p.shape)} in params and {got} in {name}; pass {name} of these "
            "parameters, and zeros for a leaf without a gradient",
            leaf=path,
        )
    kind = x.dtype if x.layout is torch.strided else f"a {x.layout} tensor"
    raise SpecMismatch(
        f"{name} must be dense, and complex where the parameters are complex; leaf "
        f"{path!r} is {p.dtype} in params and {kind} in {name}; pass values of the "
        "parameter's own kind, to_dense() of a sparse tensor",
        leaf=path,
    )


def _explain(params: Tree, others: dict[str, Tree], error: Exception) -> NoReturn:
    names = tree.paths(params)
    for name, other in others.items():
        theirs = tree.paths(other)
        missing = [path for path in names if path not in set(theirs)]
        extra = [path for path in theirs if path not in set(names)]
        if missing or extra:
            raise SpecMismatch(
                f"{name} must have the tree of the parameters; missing {missing[:3]}, unexpected "
                f"{extra[:3]}; pass {name} of these parameters, and zeros for a leaf without a "
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

    With ``donate`` a contiguous leaf is returned as it is. A second tie of a leaf is copied,
    because two steps would write the same memory.
    """
    seen: set[Hashable] = set()
    mine = []
    for leaf in leaves:
        if donate and leaf.is_contiguous() and not leaf.is_conj() and not leaf.is_neg():
            memory = memory_of(leaf)
            if memory not in seen:
                seen.add(memory)
                mine.append(leaf)
                continue
        mine.append(_dense(leaf).clone(memory_format=torch.contiguous_format))
    return mine


def _dense(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg()


def flat_view(x: Tensor) -> Tensor:
    """View a tensor as a real vector, a complex number as two; copy only if not contiguous."""
    if x.dim() == 1 and x.is_contiguous() and not (x.requires_grad or x.is_complex() or x.is_neg()):
        return x
    dense = _dense(x)
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1)


def step_count(count: Tensor) -> int:
    """Return the number of steps that a state has taken."""
    return int(count)
