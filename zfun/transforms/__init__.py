"""The transforms: functions that take a loss, a gradient function or an optimizer, and return one of the same type."""

from zfun.transforms._cast import CastLoss, cast
from zfun.transforms._describe import Description, describe
from zfun.transforms._gradient import (
    GradientFunction,
    WeightedMean,
    accumulate,
    data_parallel,
    scale_loss,
    shard_grads,
    value_and_grad,
    weighted_mean,
)
from zfun.transforms._offload import offload, offload_grads, offload_loss, offload_optimizer, offload_params
from zfun.transforms._optimizer import apply, shard_optimizer
from zfun.transforms._redistribute import check_agreement, gather, redistribute, replicate, shard, unshard
from zfun.transforms._remat import Remat, remat
from zfun.transforms._shard_params import shard_params

__all__ = [
    "CastLoss",
    "Description",
    "GradientFunction",
    "Remat",
    "WeightedMean",
    "accumulate",
    "apply",
    "cast",
    "check_agreement",
    "data_parallel",
    "describe",
    "gather",
    "offload",
    "offload_grads",
    "offload_loss",
    "offload_optimizer",
    "offload_params",
    "redistribute",
    "remat",
    "replicate",
    "scale_loss",
    "shard",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "unshard",
    "value_and_grad",
    "weighted_mean",
]
