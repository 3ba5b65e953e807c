"""Optimizers of ``accelerate`` whose steps are those of an engine."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from zfun import optim
from zfun.interop._attached import StepEngine, check_last
from zfun.interop.engine import ParamGroups
from zfun.interop.engine._moments import empty_state
from zfun.interop.engine._parameter import LiveParameter
from zfun.interop.engine._reads import alive, live_of
from zfun.interop.engine._torch_states import with_own_constants

# The attributes of an optimizer that belong to an engine.
_ATTACHED = ("_zfun_engine", "step", "zero_grad")
# One group more, so that an optimizer of torch alone refuses a state whose moments lie elsewhere.
_ELSEWHERE: dict[str, Any] = {
    "params": [],
    "zfun": "the moments are in the folder zfun beside this file",
}


def groups_of(
    optimizer: Any,
    whole: nn.Module,
    own: dict[str, Any],
    ema_decay: float | optim.Schedule | None,
) -> ParamGroups:
    """Return the groups of an optimizer, with the parameters ``own`` of its engine."""
    known = set(map(id, whole.parameters()))
    all_params = [p for group in optimizer.param_groups for p in group["params"]]
    # Parameters of a loss, which belong to no model.
    others = (p for p in all_params if id(p) not in known)
    extra = {f"optimizer.{index}": p for index, p in enumerate(others)}
    groups = ParamGroups(optimizer.optimizer, {**own, **extra}, extra=extra, norm_of_all=True)
    groups.ema_decay = ema_decay
    return groups


def attach(
    optimizer: Any, engine: StepEngine, groups: ParamGroups, has_moments: Callable[[], bool]
) -> None:
    """Let the steps of an ``AcceleratedOptimizer``, and of its inner one, be those of an engine.

    Loaded groups keep the constants of this run. Every rank asks for a state that has moments.
    """
    inner, joined = optimizer.optimizer, dict(vars(optimizer.optimizer))

    def step(closure: Any = None) -> Any:
        check_last(engine)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        info = engine.step(boundary=True)
        # torch's GradScaler lets fused optimizers skip by themselves, and nobody hears of it.
        is_fused = getattr(inner, "_step_supports_amp_scaling", False)
        is_told = engine.state.loss_scale is None or not is_fused
        optimizer._is_overflow = info is not None and info.skipped and is_told
        return loss

    def zero_grad(set_to_none: bool = True) -> None:
        engine.zero_grad(set_to_none)
        for group in inner.param_groups:
            for param in group["params"]:
                # Parameters of a loss have gradients of their own.
                if not isinstance(param, LiveParameter) and param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param)

    def state_dict() -> dict[str, Any]:
        if has_moments():
            return joined["state_dict"]()
        with empty_state(inner, hooks=True):
            found = type(inner).state_dict(inner)
        return {**found, "param_groups": [*found["param_groups"], _ELSEWHERE]}

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        # Code may have written whole moments into a file that had none.
        if has_moments() or state_dict["state"]:
            joined["load_state_dict"](state_dict)
            return
        given = [group for group in state_dict["param_groups"] if "zfun" not in group]
        saved = with_own_constants(engine.state.opt_state, groups, given)
        with empty_state(inner, hooks=True):
            type(inner).load_state_dict(inner, {**state_dict, "param_groups": saved})

    if (module := live_of(engine.module)) is not None:
        module.keeper = engine  # a model may outlive its optimizer
    inner._zfun_own = {name: vars(inner)[name] for name in _ATTACHED if name in vars(inner)}
    inner._zfun_engine, inner.step, inner.zero_grad = engine, groups.hooked(step), zero_grad
    inner.state_dict, inner.load_state_dict = state_dict, load_state_dict


def release(model: nn.Module, kept: Container[Any]) -> None:
    """Let a model be a plain one with whole values, if engines that are not ``kept`` have it.

    Every rank must call.
    """
    ids = set(map(id, model.parameters()))
    for param in model.parameters():
        if not isinstance(param, LiveParameter):
            continue
        owner = alive(param._live._owner, "the value of a parameter")
        if owner not in kept and ids.issuperset(map(id, owner.leaves.values())):
            owner.hand_on() if isinstance(owner, StepEngine) else owner.close()


def engine_in(optimizer: Any) -> StepEngine | None:
    """Return the engine that an optimizer of torch steps, or has stepped at last."""
    return vars(optimizer).get("_zfun_engine")


def detach(optimizer: Any) -> None:
    """Let the steps of an optimizer of torch be its own again."""
    own = optimizer._zfun_own
    for name in (*_ATTACHED, "_zfun_own"):
        del vars(optimizer)[name]
    vars(optimizer).update(own)


def set_free(optimizer: Any) -> None:
    """Let an optimizer of torch be a plain one with its moments; every rank must call."""
    if (engine := engine_in(optimizer)) is not None:
        engine.hand_on()
        detach(optimizer)
        engine.give_back()
