"""zfun: functional sharding of training state for PyTorch."""

from zfun import collectives as collectives
from zfun import compression, optim, planner, policies, stores
from zfun import errors as errors
from zfun.collectives import Group, process_group, record, simulate, split
from zfun.compression import Compression
from zfun.errors import ZfunError
from zfun.flat import Flat
from zfun.placement import P, R, S
from zfun.recipes import Precision, zero
from zfun.stores import Offload
from zfun.transforms import (
    ScheduleOptions,
    accumulate,
    apply,
    cast,
    data_parallel,
    describe,
    gather,
    offload,
    redistribute,
    remat,
    replicate,
    scale_loss,
    shard,
    shard_grads,
    shard_optimizer,
    shard_params,
    unshard,
    value_and_grad,
    weighted_mean,
)
from zfun.tree import combine, partition

__all__ = [
    "Compression",
    "Flat",
    "Group",
    "Offload",
    "P",
    "Precision",
    "R",
    "S",
    "ScheduleOptions",
    "ZfunError",
    "accumulate",
    "apply",
    "cast",
    "combine",
    "compression",
    "data_parallel",
    "describe",
    "gather",
    "offload",
    "optim",
    "partition",
    "planner",
    "policies",
    "process_group",
    "record",
    "redistribute",
    "remat",
    "replicate",
    "scale_loss",
    "shard",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "simulate",
    "split",
    "stores",
    "unshard",
    "value_and_grad",
    "weighted_mean",
    "zero",
]
