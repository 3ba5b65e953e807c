"""Optimizers, schedules and clipping: pure functions over trees, which know nothing of ranks."""

from zfun.optim._base import InitFn, Optimizer, State, UpdateFn, apply_updates, as_optimizer, optimizer
from zfun.optim._chain import chain
from zfun.optim._labels import by_label
from zfun.optim._leaves import MuonState, lamb, muon
from zfun.optim._loss_scale import LossScale, LossScaleState, dynamic_loss_scale, static_loss_scale
from zfun.optim._master import MasterState, with_master
from zfun.optim._onebit import OneBitState, onebit_adam
from zfun.optim._rules import AdagradState, AdamState, LionState, SgdState, adagrad, adam, adamw, lion, sgd
from zfun.optim._schedules import (
    Schedule,
    constant,
    join,
    linear,
    lr_range_test,
    one_cycle,
    one_cycle_momentum,
    warmup,
    warmup_cosine,
    warmup_linear,
)
from zfun.optim._torch import TorchState, from_torch
from zfun.optim._transforms import ScheduleState, clip_by_global_norm, scale, scale_by_schedule

__all__ = [
    "AdagradState",
    "AdamState",
    "InitFn",
    "LionState",
    "LossScale",
    "LossScaleState",
    "MasterState",
    "MuonState",
    "OneBitState",
    "Optimizer",
    "Schedule",
    "ScheduleState",
    "SgdState",
    "State",
    "TorchState",
    "UpdateFn",
    "adagrad",
    "adam",
    "adamw",
    "apply_updates",
    "as_optimizer",
    "by_label",
    "chain",
    "clip_by_global_norm",
    "constant",
    "dynamic_loss_scale",
    "from_torch",
    "join",
    "lamb",
    "linear",
    "lion",
    "lr_range_test",
    "muon",
    "one_cycle",
    "one_cycle_momentum",
    "onebit_adam",
    "optimizer",
    "scale",
    "scale_by_schedule",
    "sgd",
    "static_loss_scale",
    "warmup",
    "warmup_cosine",
    "warmup_linear",
    "with_master",
]
