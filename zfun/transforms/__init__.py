"""The transforms: functions that take a loss, a gradient function or an optimizer, and return one of the same type."""

from zfun.transforms._describe import Description, describe
from zfun.transforms._gradient import GradientFunction, WeightedMean, accumulate, data_parallel, shard_grads, value_and_grad, weighted_mean
from zfun.transforms._offload import offload, offload_grads, offload_loss, offload_optimizer, offload_params
from zfun.transforms._optimizer import apply, shard_optimizer
from zfun.transforms._redistribute import check_agreement, gather, redistribute, replicate, shard, unshard
from zfun.transforms._shard_params import shard_params

__all__ = [
    "Description",
    "GradientFunction",
    "WeightedMean",
    "accumulate",
    "apply",
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
    "replicate",
    "shard",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "unshard",
    "value_and_grad",
    "weighted_mean",
]
