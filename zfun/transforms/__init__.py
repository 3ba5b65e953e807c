"""Transforms: functions from a loss, a gradient function or an optimizer to one of the same type.

===============  ==================================================================================
``values``       placement changes (the one place that chooses a collective), and ``describe``
``grads``        gradient functions; the reduction of each bucket starts inside backward
``params``       stage 3: gathers where a loss uses its parameters, on a schedule
``optimizer``    the update on values of any placement, and sharded state
``remat``        recomputation of activations
alone            ``_cast`` (mixed precision), ``_offload`` (stores; of all three types)
a profile        ``_notes``, and the parameters and hooks that take notes, ``_watched``
===============  ==================================================================================
"""

from zfun.transforms._cast import CastLoss, cast
from zfun.transforms._notes import EventKind, Noted, Notes, watching
from zfun.transforms._offload import (
    offload,
    offload_grads,
    offload_loss,
    offload_optimizer,
    offload_params,
)
from zfun.transforms.grads._accumulate import accumulate
from zfun.transforms.grads._gradient import (
    GradientFunction,
    data_parallel,
    scale_loss,
    value_and_grad,
)
from zfun.transforms.grads._reducer import MAX_IN_FLIGHT
from zfun.transforms.grads._sum_grads import replicate_grads, shard_grads
from zfun.transforms.grads._value import WeightedMean, weighted_mean
from zfun.transforms.optimizer._apply import apply
from zfun.transforms.optimizer._probe import probe
from zfun.transforms.optimizer._shard_optimizer import shard_optimizer
from zfun.transforms.params._schedule import (
    Event,
    Phase,
    Schedule,
    ScheduleOptions,
    Step,
    Trace,
    TracedBucket,
    schedule,
    secondary_of,
)
from zfun.transforms.params._shard_params import ShardedLoss, shard_params
from zfun.transforms.remat import Remat, remat
from zfun.transforms.values._describe import Description, describe
from zfun.transforms.values._redistribute import (
    MAX_UNDER_WAY,
    check_agreement,
    gather,
    redistribute,
    replicate,
    shard,
    unshard,
)

__all__ = [
    "MAX_IN_FLIGHT",
    "MAX_UNDER_WAY",
    "CastLoss",
    "Description",
    "Event",
    "EventKind",
    "GradientFunction",
    "Noted",
    "Notes",
    "Phase",
    "Remat",
    "Schedule",
    "ScheduleOptions",
    "ShardedLoss",
    "Step",
    "Trace",
    "TracedBucket",
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
    "probe",
    "redistribute",
    "remat",
    "replicate",
    "replicate_grads",
    "scale_loss",
    "schedule",
    "secondary_of",
    "shard",
    "shard_grads",
    "shard_optimizer",
    "shard_params",
    "unshard",
    "value_and_grad",
    "watching",
    "weighted_mean",
]
