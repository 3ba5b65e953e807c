"""Compare the state of an optimizer with the state that the optimizer would make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zfun import tree
from zfun.collectives import Group
from zfun.errors import SpecMismatch
from zfun.flat import FLAT, Flat, empty_like
from zfun.optim import MasterState, Optimizer
from zfun.options import FLOATING, instance, takes
from zfun.placement import Placement
from zfun.stores import Stored
from zfun.transforms.optimizer._placing import layout_for

_REMEDY = "make the state with the init() that belongs to the step, or step with its options"


@takes(
    optimizer=instance(Optimizer, "an optimizer of zf.optim", "zf.optim.sgd(0.1)"),
    params=FLAT,
    placement=instance(Placement, "a placement", "zf.S"),
    master=FLOATING | None,
)
def check_state(
    optimizer: Optimizer,
    state: Any,
    params: Flat,
    placement: Placement,
    group: Group,
    *,
    master: torch.dtype | None = None,
) -> None:
    """Refuse a state that an optimizer would not make for some parameters.

    The ``init`` of the optimizer runs on tensors without memory, so the comparison holds no bytes.
    A state that ``init`` cannot make in this way is not compared.

    Args:
        optimizer: the optimizer before it is sharded or offloaded.
        state: the state, in memory or in a store.
        params: the parameters, of any placement.
        placement: of the values in the state.
        group: the ranks that share these values.
        master: the dtype of the values that ``init`` receives in place of narrower parameters.

    Raises:
        SpecMismatch: the structure, a placement, a layout or a dtype differs.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     params = zf.shard({"w": torch.ones(3)}, group)
        ...     state = zf.optim.sgd(0.1).init(params)
        ...     zf.transforms.check_state(zf.optim.lion(0.1), state, params, zf.S, group)
        >>> zf.simulate(1, main)
        Traceback (most recent call last):
        ...
        zfun.errors.SpecMismatch: a state belongs to one kind of optimizer; got SgdState(...
    """
    expected = _expected(optimizer, params, placement, group, master)
    if expected is None:
        return
    wanted, spec = tree.flatten(expected, is_leaf=_is_part)
    parts = tree.subtrees(spec, state)
    if parts is None or not all(map(_is_alike, parts, wanted)):
        got, makes = _shown(state), _shown(expected)
        if isinstance(state, MasterState) != isinstance(expected, MasterState):
            raise SpecMismatch(
                "state and step have one precision, with master weights or without; got "
                f"{got} where the precision of the step makes {makes}; {_REMEDY}"
            )
        raise SpecMismatch(
            f"a state belongs to one kind of optimizer; got {got} where the optimizer of the step "
            f"makes {makes}; {_REMEDY}"
        )
    for place, part, like in zip(spec.accessors(), parts, wanted, strict=True):
        _check_part(place.codify("opt_state"), part, like)


def _check_part(path: str, part: Any, like: Any) -> None:
    """Refuse a part of a state with another placement, layout or dtype."""
    if isinstance(like, Flat):
        if part.placement is not like.placement:
            raise SpecMismatch(
                "state and step are of one stage, whole at stage 0 and sharded from stage 1 on; "
                f"got {path} with placement {part.placement!r} where "
                f"the stage of the step has {like.placement!r}; {_REMEDY}",
                leaf=path,
            )
        if part.layout != like.layout:
            raise SpecMismatch(
                f"a state has the leaves of its parameters; got {path} "
                f"with {len(part.layout.leaves)} leaves for {len(like.layout.leaves)}; {_REMEDY}",
                leaf=path,
            )
    if not _is_part(like):
        return
    for found, wanted in zip(_dtypes_of(part), _dtypes_of(like), strict=True):
        if found != wanted:
            raise SpecMismatch(
                f"state and step have one precision; got {path} in "
                f"{found} where the precision of the step has {wanted}; {_REMEDY}",
                leaf=path,
            )


def kind_of_state(state: Any) -> tuple[Any, ...]:
    """Return a value that is equal for states of one structure, placements, layouts and dtypes."""
    parts, spec = tree.flatten(state, is_leaf=_is_part)
    return spec, [
        # One buffer stands for all, because this runs in every step.
        (part.placement, part.layout, [buffer.dtype for buffer in part.buffers[:1]])
        if isinstance(part, Flat)
        else _dtypes_of(part)
        for part in parts
    ]


def _expected(
    optimizer: Optimizer,
    params: Flat,
    placement: Placement,
    group: Group,
    master: torch.dtype | None,
) -> Any:
    """Make a state without memory; ``None`` if the optimizer cannot."""
    if optimizer.placement is not None:
        return None
    layout = layout_for(optimizer, params.layout)
    dtypes = [
        master if master is not None and bucket.dtype.itemsize < master.itemsize else bucket.dtype
        for bucket in layout.buckets
    ]
    with _disable_current_modes():
        params = empty_like(Flat((), placement, layout, group), dtypes, "meta")
        try:
            return optimizer.init(params)
        except Exception:  # noqa: BLE001, the user's code runs here and may raise anything
            return None


def _is_part(value: Any) -> bool:
    return isinstance(value, (Flat, Tensor, Stored))


def _is_alike(part: Any, like: Any) -> bool:
    """Whether a part is flat, a tensor or another value where another part is."""
    return isinstance(part, Flat) is isinstance(like, Flat) and _is_part(part) is _is_part(like)


def _dtypes_of(part: Any) -> tuple[Any, ...]:
    """Return the dtypes of a part of a state; of a value that is no tensor, the type."""
    if isinstance(part, Flat):
        return tuple(buffer.dtype for buffer in part.buffers)
    return (part.dtype,) if isinstance(part, (Tensor, Stored)) else (type(part),)


def _shown(state: Any) -> str:
    """Name the structure of a state."""
    text = str(tree.structure(state, is_leaf=_is_part))
    return (
        text.removeprefix("PyTreeSpec(")
        .removesuffix(")")
        .removesuffix(f", namespace={tree.NAMESPACE!r}")
    )
