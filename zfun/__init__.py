"""zfun: functional sharding of training state for PyTorch."""

from zfun import checkpoint as checkpoint
from zfun import collectives as collectives
from zfun import compression as compression
from zfun import errors as errors
from zfun import optim, stores
from zfun import parallel as parallel
from zfun import planner as planner
from zfun import policies as policies
from zfun import sources as sources
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

__version__ = "0.1.0"

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
