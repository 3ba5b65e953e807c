"""Values, gradients and moments of single parameters of an engine.

Functions with ``full`` in the name have the whole value, and every rank must call. Those with
``local`` have the elements of this rank as a vector: a part, or all of them at stage 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import stores
from zfun.errors import CheckpointError, OptionError
from zfun.flat import Flat, leaf_spans
from zfun.interop._named import masters_of, named, write_leaves
from zfun.interop.engine import TORCH_NAMES, Engine
from zfun.interop.engine._reads import alive
from zfun.interop.engine._values import parts_of
from zfun.placement import S
from zfun.transforms import unshard


def _pair(place: str, kind: str) -> tuple[Callable[..., Tensor | None], Callable[..., None]]:
    """Return the functions that read and write a kind of values, whole or of this rank."""
    is_local, is_moment = place == "local", kind == "optimizer_state"
    names = [f"safe_{way}_{place}_{kind}" for way in ("get", "set")]

    def get(param: Tensor, optim_state_key: str = "") -> Tensor | None:
        _check_key(names[0], optim_state_key, is_moment)
        part = _part(param, kind, names[0], optim_state_key, is_local)
        if part is None:
            return None
        value = part.local() if is_local else part.whole()
        value = value.clone() if is_moment else value.float()
        return value / part.scale if kind == "grad" else value

    def set_(param: Tensor, value: Tensor, optim_state_key: str = "") -> None:
        _check_key(names[1], optim_state_key, is_moment)
        engine, leaf = _needed(param, names[1], None if is_local else value)
        if kind == "grad":
            _count_as_used(engine, leaf)
        if kind != "fp32_param":
            part = _part(param, kind, names[1], optim_state_key, is_local)
            if part is not None:
                part.write(value, local=is_local)
            elif kind == "grad":
                raise OptionError(
                    f"{names[1]}() changes a gradient of backward(); got a parameter without one; "
                    "call engine.backward(loss) first"
                )
        elif not is_local:
            with torch.no_grad():
                engine.replace({leaf: value})
        elif engine.state.params.placement is S:
            for copy in _copies(engine, leaf):
                copy.write(value, local=True)
        else:
            raise OptionError(
                f"a rank has elements of its own at stage 3; got {names[1]}() of {leaf!r} at "
                "another stage; call safe_set_full_fp32_param()"
            )

    whose = "this rank's elements" if is_local else "the whole values"
    for function, name in zip((get, set_), names, strict=True):
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"{name[5:8].capitalize()} {whose} of a parameter of an engine."
    return get, set_


# Parameters are those of the master weights. Gradients are what the step will take, the mean over
# the ranks without the loss scale; None before backward, and for a parameter that no rank has used.
# Moments have torch's names: "exp_avg".
safe_get_full_fp32_param, safe_set_full_fp32_param = _pair("full", "fp32_param")
safe_get_local_fp32_param, safe_set_local_fp32_param = _pair("local", "fp32_param")
safe_get_full_grad, safe_set_full_grad = _pair("full", "grad")
safe_get_local_grad, safe_set_local_grad = _pair("local", "grad")
safe_get_full_optimizer_state, safe_set_full_optimizer_state = _pair("full", "optimizer_state")
safe_get_local_optimizer_state, safe_set_local_optimizer_state = _pair("local", "optimizer_state")


def _check_key(function: str, key: str, is_moment: bool) -> None:
    if bool(key) != is_moment:
        raise TypeError(
            "optim_state_key names a moment, for functions of the optimizer's state alone; "
            f"got {key!r} in {function}(); {'pass a name' if is_moment else 'leave it out'}"
        )


def _part(param: Tensor, kind: str, function: str, key: str, is_local: bool) -> Any:
    """Return the values of a kind; ``None`` for a parameter without an engine, or without any."""
    if (found := _of(param)) is None:
        return None
    engine, name = found
    if kind == "fp32_param":
        return _copies(engine, name)[0]
    if kind == "optimizer_state":
        return _moments(engine, name, key)
    with torch._C.DisableTorchFunctionSubclass():
        # A read by the live parameter communicates.
        is_shown = name in engine._shown and param.grad is not None
    if is_shown and is_local:
        raise OptionError(
            f"{function}() takes the elements of one rank; got a gradient that a read of .grad has "
            f"made whole; call {function.replace('local', 'full')}()"
        )
    # A read also adds the passes since the last one; every rank has shown the same gradients.
    if is_shown and param.grad is not None:
        return _ShownGrad(param.grad, engine.loss_scale)
    engine._settle()
    if not is_local:
        # From here on the sum has the gradients from outside of calls, such as those of a penalty.
        engine._gathered()
    elif outside := engine._strays():
        raise OptionError(
            f"{function}() takes the elements of one rank; got a gradient of {min(outside)!r} from "
            "outside of calls, which no rank has sent; call "
            f"{function.replace('local', 'full')}()"
        )
    grads = engine.grads
    if grads is None or name not in grads.layout.paths:
        return None
    is_used = is_local or engine._sum.told([name not in grads.missed]).flags[0]
    return _LeafCopy(grads, name, engine.loss_scale) if is_used else None


def _count_as_used(engine: Engine, name: str) -> None:
    """Let the next step move a leaf, also where backward gave it no gradient."""
    grads = engine.grads
    if grads is not None and name in grads.missed:
        rest = {path: count for path, count in grads.missed.items() if path != name}
        engine._sum.grads = grads.with_missed(rest)


class _LeafCopy(NamedTuple):
    """A leaf of a part of the state; ``scale`` is in the part, and not in a caller's values."""

    flat: Flat
    leaf: str
    scale: float = 1.0

    def whole(self) -> Tensor:
        return named(unshard(self.flat, lambda path, leaf: path == self.leaf))[self.leaf].clone()

    def local(self) -> Tensor:
        """Return this rank's elements as a vector: a view, unless a store has them."""
        held = stores.resident(self.flat)
        span = next(span for span in leaf_spans(held) if span.path == self.leaf)
        return held.buffers[span.bucket][span.start : span.stop]

    def write(self, value: Tensor, *, local: bool = False) -> None:
        """Write in place the whole value, or the elements of this rank."""
        if not all(isinstance(buffer, Tensor) for buffer in self.flat.buffers):
            raise OptionError(
                "single values are written to a state in memory; got a state in a store; leave "
                "offload_optimizer out, or save and load with engine.save_checkpoint()"
            )
        if local and value.numel() != (size := self.local().numel()):
            raise CheckpointError(
                f"this rank has {size} elements of leaf {self.leaf!r}; got {value.numel()}; pass "
                "values of this rank, at the same stage and number of ranks"
            )
        value = value if self.scale == 1.0 else value * self.scale
        write_leaves(self.flat, {self.leaf: value}, local=local)


class _ShownGrad(NamedTuple):
    """A gradient that the engine has moved to ``.grad``, whole, where code has read it."""

    grad: Tensor
    scale: float

    def whole(self) -> Tensor:
        return self.grad.clone()

    def write(self, value: Tensor, *, local: bool = False) -> None:
        self.grad.copy_(value * self.scale)


def _of(param: Tensor) -> tuple[Engine, str] | None:
    """Return the engine of a parameter, and its name there."""
    ref, name = getattr(param, "_zfun_engine", (None, ""))
    return None if ref is None else (alive(ref, f"the value of parameter {name!r}"), name)


def _needed(param: Tensor, function: str, value: Tensor | None = None) -> tuple[Engine, str]:
    found = _of(param)
    if found is None or (value is not None and value.shape != param.shape):
        got = "a parameter without an engine" if found is None else tuple(param.shape)
        shape = "no value" if value is None else tuple(value.shape)
        raise OptionError(
            f"{function}() takes a parameter of an engine's module and a value of its shape; got "
            f"{shape} for {got}; call deepspeed.initialize() first"
        )
    return found


def _copies(engine: Engine, name: str) -> list[_LeafCopy]:
    """Return the parts of the state with the value of a leaf, the most exact one first."""
    state = engine.state
    flats = (*masters_of(state.opt_state), state.params, state.frozen)
    return [_LeafCopy(x, name) for x in flats if x is not None and name in x.layout.paths]


def _moments(engine: Engine, name: str, key: str) -> _LeafCopy | None:
    own = {
        TORCH_NAMES.get(field := path.rpartition(".")[2], field): part
        for path, part in zip(*parts_of(engine.state.opt_state), strict=True)
        if isinstance(part, Flat) and name in part.layout.paths
    }
    if own and key not in own:
        raise OptionError(
            f"an optimizer has moments by torch's names; got {key!r}, and leaf {name!r} has "
            f"{sorted(own)}; pass one of these"
        )
    return _LeafCopy(own[key], name) if own else None
