"""The names of ``zf``, which ``zfun`` imports at their first use."""

import zfun.optim as optim
import zfun.stores as stores
from zfun.checkpoint import load, save
from zfun.collectives import Group, mesh, process_group, record, simulate, split
from zfun.errors import ZfunError
from zfun.flat import Flat
from zfun.modules import functional
from zfun.parallel import pipeline, tensor_parallel
from zfun.placement import P, R, S
from zfun.planner import plan
from zfun.recipes import Precision, zero
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
    shard,
    shard_grads,
    shard_optimizer,
    shard_params,
    unshard,
    value_and_grad,
    vjp,
    weighted_mean,
)
from zfun.tree import combine, partition

__all__ = [
    "Flat",
    "Group",
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
    "data_parallel",
    "describe",
    "functional",
    "gather",
    "load",
    "mesh",
    "offload",
    "optim",
    "partition",
    "pipeline",
    "plan",
    "process_group",
    "record",
    "redistribute",
    "remat",
    "replicate",
    "save",
    "shard",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "simulate",
    "split",
    "stores",
    "tensor_parallel",
    "unshard",
    "value_and_grad",
    "vjp",
    "weighted_mean",
    "zero",
]
