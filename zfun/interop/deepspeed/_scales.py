"""The loss scale of fp16, which a script or a checkpoint may change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zfun.errors import OptionError
from zfun.interop.ds_config._parts import dynamic_scale_of
from zfun.interop.ds_config._values import Values
from zfun.optim import LossScale, LossScaleState, static_loss_scale

_NAMES = (
    "loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale "
    "consecutive_hysteresis"
)


class Scaling:
    """The rule of a loss scale, which follows numbers that a load changes.

    Attributes:
        numbers: the keys of the rule.
        fixed: the scale of ``override_loss_scale()`` in place of the rule's.
        rule: the rule.
    """

    def __init__(self, values: Values) -> None:
        self.numbers = {key: values[key] for key in (f"fp16.{name}" for name in _NAMES.split())}
        self.fixed: float | None = None
        self.rule = LossScale(self._today().init, self._update)

    def _today(self) -> LossScale:
        constant = self.fixed or self.numbers["fp16.loss_scale"]
        return static_loss_scale(constant) if constant else dynamic_scale_of(self.numbers)

    def _update(self, state: LossScaleState, finite: bool | Tensor) -> LossScaleState:
        return self._today().update(state, finite)


def set_scale(engine: Any, value: float, *, stays: bool = False) -> None:
    """Set the loss scale of an engine; with ``stays``, for good."""
    scaling, core = engine._settings.scaling, engine._core
    if value == core.loss_scale and not stays:
        return
    if scaling is None:
        raise OptionError(
            f"a loss scale goes with fp16; got {value} for an engine without one; leave it at 1, "
            'or write "fp16": {"enabled": true} into the configuration'
        )
    if core._sum.num_passes:
        raise OptionError(
            f"the backward passes of a step have one loss scale; got {value} between two of them; "
            "set it after engine.step()"
        )
    new = static_loss_scale(value).init().scale
    scaling.fixed = value if stays else scaling.fixed
    if scaling.fixed in (None, value):
        held = core._state.loss_scale
        new = held._replace(scale=new.to(held.scale.device))
        core._state = core._state._replace(loss_scale=new)


def go_on(engine: Any, saved: Mapping[str, Any]) -> None:
    """Take the rule of a saved run, as DeepSpeed does, whatever the configuration says now."""
    if (scaling := engine._settings.scaling) is not None:
        scaling.numbers |= {key: x for key, x in saved.items() if key in scaling.numbers}
        if scaling.fixed is not None:
            set_scale(engine, scaling.fixed, stays=True)
