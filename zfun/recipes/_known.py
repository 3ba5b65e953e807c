"""The comparison of a state with the options of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Group
from zfun.errors import SpecMismatch
from zfun.flat import Flat
from zfun.layout import LeafSlot
from zfun.optim import Optimizer
from zfun.placement import R, S
from zfun.recipes._precision import Precision
from zfun.recipes._state import ZeroState
from zfun.reductions import BufferRule
from zfun.stores import Offload, Stored
from zfun.transforms import check_state, kind_of_state

_PARTS = ("params", "frozen", "opt_state", "buffers")


class KnownStates:
    """Compares a state with the options of a step, once for each kind of state.

    Args:
        stage: of the step.
        group: the ranks that share the state.
        rule: the optimizer before it is sharded or offloaded.
        trainable: the option of :func:`zero`.
        policy: the precision.
        buffers: the option of :func:`zero`.
        offload: the option of :func:`zero`.
    """

    def __init__(
        self,
        stage: int,
        group: Group,
        rule: Optimizer,
        trainable: Callable[[str, Any], bool] | None,
        policy: Precision,
        buffers: BufferRule | None,
        offload: Offload,
    ) -> None:
        self._stage = stage
        self._group = group
        self._rule = rule
        self._trainable = trainable
        self._policy = policy
        self._buffers = buffers
        self._offload = offload
        self._own: list[dict[str, bool]] = []
        self._last: Any = None

    def made(self, trained: Flat, frozen: Flat | None) -> None:
        """Remember which leaves ``init`` has found to be trained."""
        self._own = [*self._own[-7:], _trained_leaves(trained, frozen)]

    def check(self, state: ZeroState) -> None:
        """Raise :class:`SpecMismatch` if the state was made with other options."""
        frozen = state.frozen
        kind = (
            state.params.placement,
            state.params.layout,
            None if frozen is None else frozen.layout,
            state.loss_scale is None,
            None if state.buffers is None else state.buffers.layout,
            kind_of_state(state.opt_state),
            stored := [part for part in _PARTS if _is_stored(getattr(state, part))],
        )
        if kind == self._last:
            return
        placed = S if self._stage == 3 else R
        if state.params.placement is not placed:
            raise SpecMismatch(
                "state and step are of one stage; got a state with parameters of placement "
                f"{state.params.placement!r} for a step of stage {self._stage}, whose parameters "
                f"have {placed!r}; make a state with init() of this zero(), from params(state) of "
                "the other"
            )
        self._check_places(state, stored)
        self._check_buffers(state)
        self._check_trained(_trained_leaves(state.params, frozen), state)
        self._check_precision(state)
        whole = self._stage == 0
        check_state(
            self._rule,
            state.opt_state,
            state.params,
            R if whole else S,
            state.params.group if whole else self._group,
            master=self._policy.master,
        )
        self._last = kind

    def _check_places(self, state: ZeroState, stored: list[str]) -> None:
        stores = {"params": self._offload.params, "opt_state": self._offload.optimizer}
        stores["frozen"] = stores["params"]
        for part in stored:
            if stores.get(part) is None:
                raise SpecMismatch(
                    f"state and step have one place for each part; got a state with {part} in a "
                    f"store for a step that keeps {part} on the device; bring the state back "
                    "with zf.stores.reload(state, store), or pass the offload= of the state"
                )
        if self._offload.params is not None and "params" not in stored and state.params.buffers:
            raise SpecMismatch(
                "state and step have one place for each part; got a state with params on the "
                "device for a step that keeps params in a store; move the parts with "
                "state._replace(params=zf.offload(state.params, store)), frozen alike"
            )

    def _check_trained(self, found: dict[str, bool], state: ZeroState) -> None:
        if found in self._own:
            return
        own = next((own for own in self._own if own.keys() == found.keys()), None)
        for path, is_trained in found.items():
            if own is not None:
                wanted = own[path]
            elif self._trainable is None:
                wanted = True
            else:
                wanted = _is_trained(self._trainable, path, is_trained, state)
            if wanted is not is_trained:
                raise SpecMismatch(
                    "state and step have one set of trained leaves; got a state in which leaf "
                    f"{path!r} is {'trained' if is_trained else 'frozen'} for a step that "
                    f"{'trains' if wanted else 'freezes'} the leaf; make a state with "
                    "init() of this zero(), or pass the trainable= of the state",
                    leaf=path,
                )

    def _check_buffers(self, state: ZeroState) -> None:
        rule, path = self._buffers, None
        if rule is None and state.buffers is not None:
            path = state.buffers.layout.leaves[0].path
        elif rule is not None:
            slots = state.params.layout.leaves
            path = next((x.path for x in slots if rule(x.path, _meta(x)) is not None), None)
        if path is not None:
            raise SpecMismatch(
                "state and step have one set of buffers; got a state in which leaf "
                f"{path!r} is {'a buffer' if rule is None else 'trained'} for a step in which the "
                f"leaf is {'no buffer' if rule is None else 'a buffer'}; make a state with init() "
                "of this zero(), or pass the buffers= of the state",
                leaf=path,
            )

    def _check_precision(self, state: ZeroState) -> None:
        dtype, has_scale = self._policy.param, self._policy.loss_scale is not None
        for slot in state.params.layout.leaves:
            if dtype is not None and slot.dtype.is_floating_point and slot.dtype != dtype:
                raise SpecMismatch(
                    f"state and step have one precision; got leaf {slot.path!r} in {slot.dtype} "
                    f"where the precision of the step keeps parameters in {dtype}; make a state "
                    "with init() of this zero(), or pass the precision= of the state",
                    leaf=slot.path,
                )
        if has_scale is (state.loss_scale is None):
            raise SpecMismatch(
                "state and step have one precision; got a state "
                f"{'without' if has_scale else 'with'} a loss scale for a step "
                f"{'with' if has_scale else 'without'}; make a state with init() of this zero(), "
                "or pass the precision= of the state"
            )


def _is_stored(part: Any) -> bool:
    return any(isinstance(leaf, Stored) for leaf in tree.leaves(part))


def _trained_leaves(trained: Flat, frozen: Flat | None) -> dict[str, bool]:
    """Map the path of every leaf to whether the leaf is trained."""
    still = {} if frozen is None else dict.fromkeys(frozen.layout.paths, False)
    return dict.fromkeys(trained.layout.paths, True) | still


def _is_trained(
    trainable: Callable[[str, Any], bool], path: str, is_trained: bool, state: ZeroState
) -> bool:
    """Ask ``trainable`` about a leaf of a state; where it cannot answer, believe the state.

    The leaf may be sharded, so ``trainable`` gets the metadata: a parameter where the state trains
    the leaf, else a tensor that requires no gradient.
    """
    flat = state.params if is_trained or state.frozen is None else state.frozen
    leaf = _meta(flat.layout.leaves[flat.layout.positions[flat.layout.paths.index(path)]])
    try:
        return bool(trainable(path, torch.nn.Parameter(leaf) if is_trained else leaf))
    except Exception:  # noqa: BLE001, the user's code may read numbers that are not there
        return is_trained


def _meta(slot: LeafSlot) -> Tensor:
    """Return a tensor without numbers for a leaf, which may be sharded."""
    return torch.empty(slot.shape, dtype=slot.dtype, device="meta")
