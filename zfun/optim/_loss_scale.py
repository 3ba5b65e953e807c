"""Loss scales: factors of the loss that keep float16 gradients from vanishing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zfun.errors import NonFiniteError
from zfun.options import integer, number, takes


class LossScaleState(NamedTuple):
    """State of a :class:`LossScale`: 0-dim tensors on the CPU.

    They lie on the device where the device leaves steps out (``zf.zero(max_skipped=None)``).

    Attributes:
        scale: the factor of the next step's loss, float32.
        hysteresis: how many more overflows until the scale halves, int64.
        count: steps seen, skipped ones included, int64.
        last_overflow: the step of the last overflow, -1 before the first, int64.
    """

    scale: Tensor
    hysteresis: Tensor
    count: Tensor
    last_overflow: Tensor


class LossScale(NamedTuple):
    """A loss scale as two pure functions: the first state, and the state of the next step.

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


# The normal numbers of float32, because the scale lies in a tensor of float32.
SCALE = number(2.0**-126, below=2.0**128, example="2.0**16")


_LARGEST = 2.0**127


@takes(initial=SCALE, window=integer(1), hysteresis=integer(1), min_scale=SCALE)
def dynamic_loss_scale(
    initial: float = 2.0**16,
    *,
    window: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
    consecutive_hysteresis: bool = False,
    raise_at_min: bool = False,
) -> LossScale:
    """A loss scale that doubles after steps without overflow, and halves on overflow.

    Equal to DeepSpeed's ``DynamicLossScaler``. A count starts at ``hysteresis``. A step that
    overflows halves the scale if the count is 1, and else lowers the count by one. After ``window``
    clean steps, and each ``window`` after that, the scale doubles, and the count starts again.
    Because the step after an overflow is number 0, the first growth needs ``window + 1`` clean
    steps.

    Args:
        initial: the scale of the first step; powers of two change no bit.
        window: clean steps until the scale doubles.
        hysteresis: overflows until the scale halves; with 1 every overflow halves the scale.
        min_scale: the least scale.
        consecutive_hysteresis: whether every clean step sets the count back to ``hysteresis``.
        raise_at_min: raise instead of staying at ``min_scale`` when the scale would fall below.

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
    initial, min_scale = float(initial), float(min_scale)

    def init() -> LossScaleState:
        return LossScaleState(
            torch.tensor(initial, device="cpu"), _integer(hysteresis), _integer(0), _integer(-1)
        )

    def update(state: LossScaleState, finite: bool | Tensor) -> LossScaleState:
        clean = torch.as_tensor(finite, device=state.count.device)
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
        # Infinity could not be halved again.
        doubled = torch.clamp(state.scale * 2.0, max=_LARGEST)
        scale = torch.where(grows, doubled, torch.where(shrinks, halved, state.scale))
        restored = grows | clean if consecutive_hysteresis else grows
        left = torch.where(~clean & ~exhausted, state.hysteresis - 1, state.hysteresis)
        return LossScaleState(
            scale,
            torch.where(restored, torch.full_like(left, hysteresis), left),
            state.count + 1,
            torch.where(clean, state.last_overflow, state.count),
        )

    return LossScale(init, update)


def grad_scaler(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> LossScale:
    """The loss scale of ``torch.amp.GradScaler``, with its arguments."""

    def init() -> LossScaleState:
        return LossScaleState(
            torch.tensor(init_scale, device="cpu"), _integer(1), _integer(0), _integer(-1)
        )

    def update(state: LossScaleState, finite: bool | Tensor) -> LossScaleState:
        clean = torch.as_tensor(finite, device=state.count.device)
        # The clean steps since the last overflow, with this one.
        number = state.count - state.last_overflow
        exact = state.scale.double()  # As torch multiplies.
        grown = (exact * growth_factor).float()
        grows = clean & (number % growth_interval == 0) & grown.isfinite()
        kept = torch.where(grows, grown, state.scale)
        return state._replace(
            scale=torch.where(clean, kept, (exact * backoff_factor).float()),
            count=state.count + 1,
            last_overflow=torch.where(clean, state.last_overflow, state.count),
        )

    return LossScale(init, update)


@takes(scale=SCALE)
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
    scale = float(scale)

    def init() -> LossScaleState:
        return LossScaleState(
            torch.tensor(scale, device="cpu"), _integer(1), _integer(0), _integer(-1)
        )

    def update(state: LossScaleState, finite: bool | Tensor) -> LossScaleState:
        clean = torch.as_tensor(finite, device=state.count.device)
        return state._replace(
            count=state.count + 1,
            last_overflow=torch.where(clean, state.last_overflow, state.count),
        )

    return LossScale(init, update)


def _integer(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int64, device="cpu")
