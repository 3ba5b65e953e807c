"""Loss scales: factors of the loss that keep float16 gradients from vanishing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.errors import NonFiniteError, OptionError, checked_options

__all__ = ["LossScale", "LossScaleState", "dynamic_loss_scale", "static_loss_scale"]


class LossScaleState(NamedTuple):
    """State of a :class:`LossScale`: 0-dim tensors on the CPU.

    Attributes:
        scale: the factor of the next step's loss, float32.
        hysteresis: how many more overflows until the scale shrinks, int64.
        count: steps seen, skipped ones included, int64.
        last_overflow: the step of the last overflow, -1 before the first, int64.
    """

    scale: Tensor
    hysteresis: Tensor
    count: Tensor
    last_overflow: Tensor


class LossScale(NamedTuple):
    """How the number that a loss is multiplied with goes on from step to step: pure functions.

    Attributes:
        init: ``init() -> state``.
        update: ``update(state, finite) -> state``; ``finite`` says whether all gradients of the
            step were finite, on all ranks.

    Example:
        >>> rule = dynamic_loss_scale(4.0, hysteresis=1)
        >>> state = rule.init()
        >>> rule.update(state, False).scale
        tensor(2.)
    """

    init: Callable[[], LossScaleState]
    update: Callable[[LossScaleState, bool | Tensor], LossScaleState]


@checked_options
def dynamic_loss_scale(
    initial: float = 2.0**16,
    *,
    window: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
    consecutive_hysteresis: bool = False,
    raise_at_min: bool = False,
) -> LossScale:
    """A loss scale that doubles after a while without overflow, and halves on overflow.

    Equal to DeepSpeed's ``DynamicLossScaler``. At a step that overflows, the scale halves if only
    one overflow is left to tolerate; else one less is left. After ``window`` clean steps, and each
    ``window`` after that, the scale doubles, and ``hysteresis`` overflows may come again. Since the
    step after an overflow is number 0, the first growth needs ``window + 1`` clean steps.

    Args:
        initial: the scale of the first step; powers of two change no bit.
        window: clean steps to a doubling.
        hysteresis: overflows to a halving; with 1 every overflow halves.
        min_scale: the scale never falls below.
        consecutive_hysteresis: let a clean step restore all the overflows to tolerate.
        raise_at_min: raise where the scale would have to fall below ``min_scale``, instead of
            staying there.

    Returns:
        The loss scale. Without ``raise_at_min`` the host does not wait for ``finite``.

    Raises:
        OptionError: a number out of range.
        NonFiniteError: from ``update``, with ``raise_at_min``.

    Example:
        >>> rule = dynamic_loss_scale(256.0, window=2, hysteresis=2)
        >>> state, scales = rule.init(), []
        >>> for finite in (False, False, True, False, True, True, True):
        ...     state = rule.update(state, finite)
        ...     scales.append(int(state.scale))
        >>> scales
        [256, 128, 128, 64, 64, 64, 128]

    After Micikevicius et al., "Mixed Precision Training" (2018).
    """
    initial, min_scale = _checked_scale(initial), _checked_scale(min_scale)
    if window < 1 or hysteresis < 1:
        raise OptionError(f"window and hysteresis are at least 1; got {window} and {hysteresis}")

    def init() -> LossScaleState:
        return LossScaleState(
            torch.tensor(initial, device="cpu"), _integer(hysteresis), _integer(0), _integer(-1)
        )

    def update(state: LossScaleState, finite: bool | Tensor) -> LossScaleState:
        clean = torch.as_tensor(finite, device="cpu")
        exhausted = state.hysteresis == 1
        if raise_at_min and bool(~clean & exhausted & (state.scale <= min_scale)):
            raise NonFiniteError(
                "gradients must be finite at some loss scale; got some that are not at the least "
                f"one, {min_scale}; lower the learning rate, clip, or compute in bfloat16",
                step=int(state.count),
            )
        since = state.count - state.last_overflow - 1
        grows = clean & (since > 0) & (since % window == 0)
        shrinks = ~clean & exhausted
        halved = torch.clamp(state.scale / 2.0, min=min_scale)
        scale = torch.where(grows, state.scale * 2.0, torch.where(shrinks, halved, state.scale))
        restored = grows | clean if consecutive_hysteresis else grows
        left = torch.where(~clean & ~exhausted, state.hysteresis - 1, state.hysteresis)
        return LossScaleState(
            scale,
            torch.where(restored, torch.full_like(left, hysteresis), left),
            state.count + 1,
            torch.where(clean, state.last_overflow, state.count),
        )

    return LossScale(init, update)


def static_loss_scale(scale: float) -> LossScale:
    """A constant loss scale.

    Args:
        scale: the number, above 0; a power of two changes no bit.

    Returns:
        The loss scale.

    Raises:
        OptionError: a number out of range.

    Example:
        >>> rule = static_loss_scale(128.0)
        >>> rule.update(rule.init(), False).scale
        tensor(128.)
    """
    scale = _checked_scale(scale)

    def init() -> LossScaleState:
        return LossScaleState(
            torch.tensor(scale, device="cpu"), _integer(1), _integer(0), _integer(-1)
        )

    def update(state: LossScaleState, finite: bool | Tensor) -> LossScaleState:
        clean = torch.as_tensor(finite, device="cpu")
        return state._replace(
            count=state.count + 1,
            last_overflow=torch.where(clean, state.last_overflow, state.count),
        )

    return LossScale(init, update)


def _integer(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device="cpu")


def _checked_scale(scale: float) -> float:
    if (
        isinstance(scale, bool)
        or not isinstance(scale, (int, float))
        or not math.isfinite(scale)
        or scale <= 0
    ):
        raise OptionError(
            f"a loss scale is a finite number above 0; got {scale!r}; use 2.0**16, or "
            "dynamic_loss_scale()"
        )
    return float(scale)
