"""zfun: functional sharding of training state for PyTorch."""

from zfun import optim, stores
from zfun.collectives import (
    Group,
    Lane,
    Pending,
    abstract_group,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    process_group,
    record,
    reduce_scatter,
    simulate,
    spawn,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_permute,
    start_reduce_scatter,
)
from zfun.errors import (
    AliasChanged,
    CollectiveMismatch,
    DonatedStateError,
    LeafError,
    NonFiniteError,
    NotElementwiseError,
    OffloadError,
    OptionError,
    PeerLost,
    PlacementError,
    SpecMismatch,
    ZfunError,
)
from zfun.flat import Flat, global_norm
from zfun.layout import Layout, layout_of
from zfun.placement import P, Placement, R, S
from zfun.recipes import StepInfo, Zero, ZeroState, zero
from zfun.transforms import (
    WeightedMean,
    accumulate,
    apply,
    data_parallel,
    describe,
    gather,
    offload,
    redistribute,
    replicate,
    shard,
    shard_grads,
    shard_optimizer,
    shard_params,
    unshard,
    value_and_grad,
    weighted_mean,
)
from zfun.tree import combine, partition
