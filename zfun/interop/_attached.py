"""Engines of loops that drop the gradients themselves, and the optimizers of ``accelerate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfun.errors import OptionError
from zfun.interop.engine import Engine, ParamGroups
from zfun.interop.engine._live import live_of
from zfun.interop.engine._moments import empty_state
from zfun.interop.engine._torch_states import with_own_constants

# The attributes of an optimizer that belong to an engine.
_ATTACHED = ("_zfun_engine", "step", "zero_grad")
# One group more, so that an optimizer of torch alone refuses a state whose moments lie elsewhere.
_ELSEWHERE: dict[str, Any] = {
    "params": [],
    "zfun": "the moments are in the folder zfun beside this file",
}


class StepEngine(Engine):
    """An engine whose loop drops the gradients between two steps, as a loop of torch does."""

    is_clean = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.is_clean = True

    def show_grads(self, name: str) -> None:
        # After a step there are none, so code that drops what it sees drops all.
        super().show_grads(name)
        self.is_clean = True

    def step(self, *, boundary: bool | None = None) -> Any:
        if not self.is_clean:
            raise OptionError(
                "a step drops the gradients, where torch would keep them; got two steps without "
                "zero_grad() between; call optimizer.zero_grad()"
            )
        info = super().step(boundary=boundary)
        self.is_clean = False
        return info


def attach(
    optimizer: Any, engine: Engine, groups: ParamGroups, has_moments: Callable[[], bool]
) -> None:
    """Let the steps of an ``AcceleratedOptimizer``, and of its inner one, be those of an engine.

    Loaded groups keep the constants of this run. Every rank asks for a state that has moments.
    """
    inner, joined = optimizer.optimizer, dict(vars(optimizer.optimizer))

    def step(closure: Any = None) -> Any:
        live = live_of(engine.module)
        if live is None or live.owner is not engine:
            raise OptionError(
                "a model has one optimizer, the last one that prepare() got; got a step of another "
                "one; pass one optimizer with a parameter group for each, as in torch.optim.AdamW("
                '[{"params": body, "lr": 1e-4}, {"params": head, "lr": 1e-3}])'
            )
        loss = None if closure is None else closure()
        info = engine.step(boundary=True)
        optimizer._is_overflow = info is not None and info.skipped
        return loss

    def zero_grad(set_to_none: bool = True) -> None:
        engine.zero_grad()
        for group in inner.param_groups:
            for param in group["params"]:
                param.grad = None

    def state_dict() -> dict[str, Any]:
        if has_moments():
            return joined["state_dict"]()
        with empty_state(inner, hooks=True):
            found = type(inner).state_dict(inner)
        return {**found, "param_groups": [*found["param_groups"], _ELSEWHERE]}

    def load_state_dict(state_dict: dict[str, Any]) -> None:
        if has_moments():
            joined["load_state_dict"](state_dict)
            return
        given = [group for group in state_dict["param_groups"] if "zfun" not in group]
        saved = with_own_constants(engine.state.opt_state, groups, given)
        with empty_state(inner, hooks=True):
            type(inner).load_state_dict(inner, {**state_dict, "param_groups": saved})

    # A scheduler that wraps step() looks for its mark, and may have wrapped it before.
    step._wrapped_by_lr_sched = True  # pyrefly: ignore[missing-attribute]
    inner._zfun_own = {name: vars(inner)[name] for name in _ATTACHED if name in vars(inner)}
    inner._zfun_engine, inner.step, inner.zero_grad = engine, step, zero_grad
    inner.state_dict, inner.load_state_dict = state_dict, load_state_dict


def detach(optimizer: Any) -> None:
    """Let the steps of an optimizer be its own again."""
    inner, own = optimizer.optimizer, optimizer.optimizer._zfun_own
    for name in (*_ATTACHED, "_zfun_own"):
        del vars(inner)[name]
    vars(inner).update(own)
