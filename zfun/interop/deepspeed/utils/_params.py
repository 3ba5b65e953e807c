"""Values, gradients and moments of single parameters of an engine.

Functions with ``full`` in the name have the whole value, and every rank must call. Those with
``local`` have the elements of this rank as a vector: a part, or all of them at stage 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zfun import stores, tree
from zfun.errors import CheckpointError, OptionError
from zfun.flat import Flat, leaf_spans
from zfun.interop._named import masters_of, write_leaves
from zfun.interop.engine import TORCH_NAMES, Engine
from zfun.interop.engine._values import parts_of
from zfun.placement import S
from zfun.transforms import unshard


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole value of a parameter, from the master weight if there is one.

    Args:
        param: a parameter of ``engine.module``.

    Returns:
        The value; ``None`` for a parameter without an engine.

    Example:
        >>> safe_get_full_fp32_param(torch.nn.Linear(1, 1).weight) is None
        True
    """
    return None if (part := _fp32(param)) is None else part.whole().float()


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the whole value of a parameter, and of its master weight.

    Args:
        param: a parameter of ``engine.module``.
        value: of the parameter's shape, the same on every rank.

    Raises:
        OptionError: the parameter has no engine, or another shape.
    """
    engine, name = _needed(param, "safe_set_full_fp32_param", value)
    with torch.no_grad():
        engine.replace({name: value})


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this rank's elements of a parameter, or of its master weight."""
    return None if (part := _fp32(param)) is None else part.local().float()


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's elements of a parameter of stage 3, and of its master weight."""
    engine, name = _needed(param, "safe_set_local_fp32_param")
    if engine.state.params.placement is not S:
        raise OptionError(
            "a rank has elements of its own at stage 3; got safe_set_local_fp32_param() of "
            f"{name!r} at another stage; call safe_set_full_fp32_param()"
        )
    for part in _copies(engine, name):
        part.write(value, local=True)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole gradient that the calls of a step have so far, without the loss scale.

    Returns:
        The mean over the ranks, as the step will take; ``None`` before backward.
    """
    part = _shown(param) or _grad(param)
    return None if part is None else part.whole().float() / part.scale


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the whole gradient of a parameter for the next step, the same on every rank."""
    _needed(param, "safe_set_full_grad", value)
    (_shown(param) or _needed_grad(param, "safe_set_full_grad")).write(value)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's elements of the gradient, without the loss scale.

    Raises:
        OptionError: a read of ``.grad`` has made the gradient whole on each rank.
    """
    _check_in_parts(param, "safe_get_local_grad")
    return None if (part := _grad(param)) is None else part.local().float() / part.scale


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's elements of the gradient for the next step."""
    _check_in_parts(param, "safe_set_local_grad")
    _needed_grad(param, "safe_set_local_grad").write(value, local=True)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return the whole moments of a parameter.

    Args:
        param: a parameter of ``engine.module``.
        optim_state_key: as torch names the moments: ``"exp_avg"``, ``"exp_avg_sq"``,
            ``"momentum_buffer"``.

    Returns:
        The moments; ``None`` for a parameter without an engine, or one that is not trained.

    Raises:
        OptionError: the optimizer has no moments of this name.
    """
    return None if (part := _moments(param, optim_state_key)) is None else part.whole()


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set the whole moments of a parameter, the same on every rank."""
    _needed(param, "safe_set_full_optimizer_state", value)
    if (part := _moments(param, optim_state_key)) is not None:
        part.write(value)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return this rank's elements of the moments of a parameter."""
    return None if (part := _moments(param, optim_state_key)) is None else part.local().clone()


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's elements of the moments of a parameter."""
    _needed(param, "safe_set_local_optimizer_state")
    if (part := _moments(param, optim_state_key)) is not None:
        part.write(value, local=True)


class _LeafCopy(NamedTuple):
    """A leaf of a part of the state; ``scale`` is in the part, and not in a caller's values."""

    flat: Flat
    leaf: str
    scale: float = 1.0

    def whole(self) -> Tensor:
        part = unshard(self.flat, lambda path, leaf: path == self.leaf)
        return dict(zip(tree.paths(part), tree.leaves(part), strict=True))[self.leaf].clone()

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

    def write(self, value: Tensor) -> None:
        self.grad.copy_(value * self.scale)


def _of(param: Tensor) -> tuple[Engine, str] | None:
    """Return the engine of a parameter, and its name there."""
    ref, name = getattr(param, "_zfun_engine", (None, ""))
    if ref is None:
        return None
    engine = ref()
    if engine is None:
        raise OptionError(
            f"the value of a parameter is with an engine; got {name!r}, whose engine is gone; "
            "keep the engine"
        )
    return engine, name


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


def _fp32(param: Tensor) -> _LeafCopy | None:
    return None if (found := _of(param)) is None else _copies(*found)[0]


def _grad(param: Tensor) -> _LeafCopy | None:
    found = _of(param)
    if found is None or (grads := found[0].grads) is None or found[1] not in grads.layout.paths:
        return None
    return _LeafCopy(grads, found[1], found[0].loss_scale)


def _shown(param: Tensor) -> _ShownGrad | None:
    found = _of(param)
    if found is None or found[1] not in found[0]._shown:
        return None
    # Also adds the passes since the last read; every rank has shown the same gradients.
    grad = param.grad
    return None if grad is None else _ShownGrad(grad, found[0].loss_scale)


def _check_in_parts(param: Tensor, function: str) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        # A read by the live parameter communicates.
        has_grad = param.grad is not None
    if has_grad and (found := _of(param)) is not None and found[1] in found[0]._shown:
        raise OptionError(
            f"{function}() takes the elements of one rank; got a gradient that a read of .grad has "
            f"made whole; call {function.replace('local', 'full')}()"
        )


def _needed_grad(param: Tensor, function: str) -> _LeafCopy:
    part = _grad(param)
    if part is None:
        raise OptionError(
            f"{function}() changes a gradient of backward(); got a parameter without one; call "
            "engine.backward(loss) first"
        )
    return part


def _moments(param: Tensor, key: str) -> _LeafCopy | None:
    if (found := _of(param)) is None:
        return None
    engine, name = found
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
