"""Transforms: functions from a loss, a gradient function or an optimizer to one of the same type.

===============  ==================================================================================
``values``       placement changes (the one place that chooses a collective), and ``describe``
``grads``        gradient functions; the reduction of each bucket starts inside backward
``params``       stage 3: gathers where a loss uses its parameters, on a schedule
``optimizer``    the update on values of any placement, and sharded state
``remat``        recomputation of activations
alone            ``_cast`` (mixed precision), ``_offload`` (stores), ``_batches`` (any nodes),
                 ``buffers`` (leaves that a loss writes)
a profile        ``_notes``, and the parameters and hooks that take notes, ``_watched``
===============  ==================================================================================
"""

from zfun.transforms._batches import MicroBatches, map_batch, split_batch
from zfun.transforms._batches import open_batch as open_batch
from zfun.transforms._cast import CastLoss, cast
from zfun.transforms._notes import EventKind, Noted, Notes, watching
from zfun.transforms._offload import (
    offload,
    offload_grads,
    offload_loss,
    offload_optimizer,
    offload_params,
)
from zfun.transforms.call._reducer import MAX_IN_FLIGHT
from zfun.transforms.call._trace import Event, Phase, Step, Trace, TracedBucket
from zfun.transforms.grads._accumulate import accumulate, add_grads, scale_grads
from zfun.transforms.grads._gradient import data_parallel, scale_loss, value_and_grad, vjp
from zfun.transforms.grads._gradient_function import GradientFunction
from zfun.transforms.grads._pullback import Pullback
from zfun.transforms.grads._sum_grads import replicate_grads, shard_grads
from zfun.transforms.grads._tape import Tape
from zfun.transforms.grads._value import WeightedMean, weighted_mean
from zfun.transforms.optimizer._apply import apply
from zfun.transforms.optimizer._plan import UPDATE as UPDATE
from zfun.transforms.optimizer._plan import UpdatePlan, UpdateStep, plan_update
from zfun.transforms.optimizer._probe import probe
from zfun.transforms.optimizer._shard_optimizer import shard_optimizer
from zfun.transforms.optimizer._states import check_state, kind_of_state
from zfun.transforms.params._cursor import UntoldUse, told_order
from zfun.transforms.params._schedule import SCHEDULE as SCHEDULE
from zfun.transforms.params._schedule import Schedule, schedule
from zfun.transforms.params._schedule_options import ScheduleOptions, secondary_of
from zfun.transforms.params._shard_params import ShardedLoss, shard_params
from zfun.transforms.remat import Remat, remat
from zfun.transforms.values._agreement import check_agreement
from zfun.transforms.values._describe import Description, describe
from zfun.transforms.values._redistribute import redistribute
from zfun.transforms.values._shard import replicate, shard
from zfun.transforms.values._unshard import gather, unshard

__all__ = [
    "MAX_IN_FLIGHT",
    "CastLoss",
    "Description",
    "Event",
    "EventKind",
    "GradientFunction",
    "MicroBatches",
    "Noted",
    "Notes",
    "Phase",
    "Pullback",
    "Remat",
    "Schedule",
    "ScheduleOptions",
    "ShardedLoss",
    "Step",
    "Tape",
    "Trace",
    "TracedBucket",
    "UpdatePlan",
    "UpdateStep",
    "WeightedMean",
    "accumulate",
    "add_grads",
    "apply",
    "cast",
    "check_agreement",
    "check_state",
    "data_parallel",
    "describe",
    "gather",
    "kind_of_state",
    "map_batch",
    "offload",
    "offload_grads",
    "offload_loss",
    "offload_optimizer",
    "offload_params",
    "plan_update",
    "probe",
    "redistribute",
    "remat",
    "replicate",
    "replicate_grads",
    "scale_grads",
    "scale_loss",
    "schedule",
    "secondary_of",
    "shard",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "split_batch",
    "unshard",
    "value_and_grad",
    "vjp",
    "watching",
    "weighted_mean",
]
