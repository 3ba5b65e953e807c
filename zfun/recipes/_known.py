"""The comparison of a state with the options of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zfun.errors import SpecMismatch
from zfun.flat import Flat
from zfun.layout import logical_leaf
from zfun.placement import R, S
from zfun.recipes._options import ZeroOptions
from zfun.recipes._state import ZeroState
from zfun.stores import stored
from zfun.transforms import check_state, kind_of_state

_PARTS = ("params", "frozen", "opt_state", "buffers")


class KnownStates:
    """Compares a state with the options of a step, once for each kind of state."""

    def __init__(self, recipe: ZeroOptions) -> None:
        self._recipe = recipe
        # The trained leaves of the states that init() has made.
        self._made: list[dict[str, bool]] = []
        self._last: Any = None

    def made(self, trained: Flat, frozen: Flat | None) -> None:
        """Remember which leaves ``init`` has found to be trained."""
        self._made = [*self._made[-7:], _trained_leaves(trained, frozen)]

    def check(self, state: ZeroState) -> None:
        """Raise :class:`SpecMismatch` if the state was made with other options."""
        recipe, params, frozen = self._recipe, state.params, state.frozen
        offloaded = [part for part in _PARTS if stored(getattr(state, part))]
        kind = (
            params.placement,
            params.layout,
            None if frozen is None else frozen.layout,
            state.loss_scale is None,
            None if state.buffers is None else state.buffers.layout,
            kind_of_state(state.opt_state),
            offloaded,
        )
        if kind == self._last:
            return
        stage, group = recipe.stage, recipe.group
        placed = S if stage == 3 else R
        if params.placement is not placed:
            raise SpecMismatch(
                "state and step are of one stage; got a state with parameters of placement "
                f"{params.placement!r} for a step of stage {stage}, whose parameters "
                f"have {placed!r}; make a state with init() of this zero(), from params(state) of "
                "the other"
            )
        _check_places(recipe, state, offloaded)
        _check_buffers(recipe, state)
        self._check_trained(state)
        _check_precision(recipe, state)
        check_state(
            recipe.master_rule,
            state.opt_state,
            params,
            R if stage == 0 else S,
            params.group if stage == 0 else group,
            master=recipe.precision.master,
        )
        self._last = kind

    def _check_trained(self, state: ZeroState) -> None:
        trained, rule = _trained_leaves(state.params, state.frozen), self._recipe.trainable
        if trained in self._made:
            return
        own = next((own for own in self._made if own.keys() == trained.keys()), None)
        for path, is_trained in trained.items():
            if own is not None:
                wanted = own[path]
            else:
                wanted = rule is None or _is_trained(rule, path, is_trained, state)
            if wanted is not is_trained:
                raise _mismatch(
                    "set of trained leaves",
                    f"in which leaf {path!r} is {'trained' if is_trained else 'frozen'} for a step "
                    f"that {'trains' if wanted else 'freezes'} the leaf",
                    "trainable",
                    path,
                )


def _check_places(recipe: ZeroOptions, state: ZeroState, offloaded: list[str]) -> None:
    offload = recipe.offload
    stores = {"params": offload.params, "frozen": offload.params, "opt_state": offload.optimizer}
    for part in offloaded:
        if stores.get(part) is None:
            raise SpecMismatch(
                f"state and step have one place for each part; got a state with {part} in a "
                f"store for a step that keeps {part} on the device; bring the state back "
                "with zf.stores.reload(state, store), or pass the offload= of the state"
            )
    if offload.params is not None and "params" not in offloaded and state.params.buffers:
        raise SpecMismatch(
            "state and step have one place for each part; got a state with params on the "
            "device for a step that keeps params in a store; move the parts with "
            "state._replace(params=zf.offload(state.params, store)), frozen alike"
        )


def _check_buffers(recipe: ZeroOptions, state: ZeroState) -> None:
    rule, path = recipe.buffers, None
    if rule is not None:
        slots = state.params.layout.leaves
        path = next((x.path for x in slots if rule(x.path, logical_leaf(x)) is not None), None)
    elif state.buffers is not None:
        path = state.buffers.layout.leaves[0].path
    if path is not None:
        got, wanted = ("trained", "a buffer") if rule is not None else ("a buffer", "no buffer")
        raise _mismatch(
            "set of buffers",
            f"in which leaf {path!r} is {got} for a step in which the leaf is {wanted}",
            "buffers",
            path,
        )


def _check_precision(recipe: ZeroOptions, state: ZeroState) -> None:
    dtype, has_scale = recipe.precision.param, recipe.precision.loss_scale is not None
    for slot in state.params.layout.leaves:
        if dtype is not None and slot.dtype.is_floating_point and slot.dtype != dtype:
            raise _mismatch(
                "precision",
                f"with leaf {slot.path!r} in {slot.dtype} where the precision of the step keeps "
                f"parameters in {dtype}",
                "precision",
                slot.path,
            )
    if has_scale is (state.loss_scale is None):
        got, wanted = ("without", "with") if has_scale else ("with", "without")
        words = f"{got} a loss scale for a step {wanted}"
        raise _mismatch("precision", words, "precision")


def _mismatch(part: str, words: str, option: str, leaf: str | None = None) -> SpecMismatch:
    return SpecMismatch(
        f"state and step have one {part}; got a state {words}; make a state with init() of this "
        f"zero(), or pass the {option}= of the state",
        leaf=leaf,
    )


def _trained_leaves(trained: Flat, frozen: Flat | None) -> dict[str, bool]:
    """Map the path of every leaf to whether the leaf is trained."""
    still = {} if frozen is None else dict.fromkeys(frozen.layout.paths, False)
    return dict.fromkeys(trained.layout.paths, True) | still


def _is_trained(
    trainable: Callable[[str, Any], bool], path: str, is_trained: bool, state: ZeroState
) -> bool:
    """Ask ``trainable`` about a leaf of a state; where it cannot answer, believe the state."""
    flat = state.params if is_trained or state.frozen is None else state.frozen
    # The leaf may be sharded, so its metadata stands for it.
    leaf = logical_leaf(flat.layout.leaves[flat.layout.positions[flat.layout.paths.index(path)]])
    try:
        return bool(trainable(path, torch.nn.Parameter(leaf) if is_trained else leaf))
    except Exception:  # noqa: BLE001, the user's code may read numbers that are not there
        return is_trained
