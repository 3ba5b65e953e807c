"""Optimizers, parts of optimizers, and schedules: pure functions of trees, without ranks."""

from typing import NoReturn

import torch

from zfun.optim._base import (
    InitFn,
    Optimizer,
    State,
    UpdateFn,
    apply_updates,
    as_optimizer,
    optimizer,
)
from zfun.optim._base import PrepareInner as PrepareInner
from zfun.optim._base import prepared as prepared
from zfun.optim._chain import chain
from zfun.optim._cycles import one_cycle, one_cycle_momentum
from zfun.optim._factors import deciding_on_host as deciding_on_host
from zfun.optim._hyperparams import (
    HyperparamsState,
    hyperparams,
    inject_hyperparams,
    set_hyperparams,
)
from zfun.optim._labels import by_label
from zfun.optim._leaves import MuonState, lamb, muon
from zfun.optim._loss_scale import LossScale, LossScaleState, dynamic_loss_scale, static_loss_scale
from zfun.optim._loss_scale import grad_scaler as grad_scaler
from zfun.optim._missed import MissedSteps
from zfun.optim._onebit import OneBitState, onebit_adam
from zfun.optim._rules import (
    AdagradState,
    AdamState,
    LionState,
    SgdState,
    adagrad,
    adam,
    adamw,
    lion,
    sgd,
)
from zfun.optim._schedules import (
    Schedule,
    constant,
    join,
    linear,
    lr_range_test,
    warmup,
    warmup_cosine,
    warmup_linear,
)
from zfun.optim._stepping import Kernel, elementwise
from zfun.optim._transforms import (
    ScheduleState,
    add_decayed_weights,
    clip_by_global_norm,
    masked,
    scale,
    scale_by_adagrad,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_schedule,
    trace,
)
from zfun.optim.copies import EmaState, MasterState, ema, with_master
from zfun.optim.copies import averages_of as averages_of
from zfun.optim.copies import masters_of as masters_of
from zfun.optim.of_torch import TorchState, from_torch

__all__ = [
    "AdagradState",
    "AdamState",
    "EmaState",
    "HyperparamsState",
    "InitFn",
    "Kernel",
    "LionState",
    "LossScale",
    "LossScaleState",
    "MasterState",
    "MissedSteps",
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
    "add_decayed_weights",
    "apply_updates",
    "as_optimizer",
    "by_label",
    "chain",
    "clip_by_global_norm",
    "constant",
    "dynamic_loss_scale",
    "elementwise",
    "ema",
    "from_torch",
    "hyperparams",
    "inject_hyperparams",
    "join",
    "lamb",
    "linear",
    "lion",
    "lr_range_test",
    "masked",
    "muon",
    "one_cycle",
    "one_cycle_momentum",
    "onebit_adam",
    "optimizer",
    "scale",
    "scale_by_adagrad",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_schedule",
    "set_hyperparams",
    "sgd",
    "static_loss_scale",
    "trace",
    "warmup",
    "warmup_cosine",
    "warmup_linear",
    "with_master",
]


def __getattr__(name: str) -> NoReturn:
    near = [x for x in __all__ if x == name.lower()]
    if near:
        remedy = f"; the rule is zf.optim.{near[0]}(...), which takes no parameters"
    elif hasattr(torch.optim, name):
        remedy = f"; pass zf.optim.from_torch(torch.optim.{name}, lr=...)"
    else:
        remedy = ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{remedy}")
