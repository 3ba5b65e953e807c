"""Groups of ranks, the collectives that groups start, and differentiable forms of collectives.

A collective is data (``_ops``). A group starts collectives (``_group``), and a started collective
is a value (``_work``). Everything else is built of these three: functions that can be
differentiated (``_functional``, ``_rows``, ``_borders``), and small host values, with a comparison
of ranks before anything depends on their agreement (``_agree``).

=================  ==================================================================
groups             modules
=================  ==================================================================
of one process     ``backends/``: ``_local`` (one rank), ``_simulated`` (threads; the
                   shortest group that sums, with ``_world``, which the
                   ranks share), ``_abstract`` (sends nothing)
of processes       ``launch/_init`` chooses: ``backends/_nccl``; ``gloo/``, messages
                   by direct exchange; ``shm/``, memory that ranks share;
                   ``gloo/_hierarchical``, both
of other groups    ``_mesh`` (named axes; ``_axes`` has their collectives, ``_roles``
                   says which ranks sum and agree), ``_record`` (a log), ``_debug``
                   (comparisons)
=================  ==================================================================

Groups of processes share ``backends/_base``, and notice lost ranks by ``backends/_watchdog``.
``launch/_launch`` starts processes.
"""

from __future__ import annotations

from zfun.collectives._agree import LeafRecord, barrier, check_same, exchange_values, gather_values
from zfun.collectives._agree import gather_json as gather_json
from zfun.collectives._agree import receive_json as receive_json
from zfun.collectives._agree import start_json as start_json
from zfun.collectives._borders import enter, leave
from zfun.collectives._debug import checked
from zfun.collectives._divide import mesh, split
from zfun.collectives._functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    reduce_scatter,
    replicated,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_permute,
    start_reduce_scatter,
)
from zfun.collectives._group import (
    Group,
    allocate,
    await_readers,
    global_ranks,
    is_checked,
    is_symmetric,
)
from zfun.collectives._group import board_of as board_of
from zfun.collectives._mesh import Mesh, NamedMesh
from zfun.collectives._ops import CALL as CALL
from zfun.collectives._ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Op,
    Permute,
    Reduce,
    ReduceScatter,
    Stream,
    UnequalAllToAll,
)
from zfun.collectives._pieces import from_rows as from_rows
from zfun.collectives._pieces import start_gather as start_gather
from zfun.collectives._pieces import start_scatter as start_scatter
from zfun.collectives._pieces import to_rows as to_rows
from zfun.collectives._record import MeshRecorder, Record, Recorder, record
from zfun.collectives._roles import DataAxes as DataAxes
from zfun.collectives._roles import (
    agreement_group,
    axis_of,
    check_shardable,
    start_reduce_scatter_over,
    sum_group,
)
from zfun.collectives._roles import axes_of as axes_of
from zfun.collectives._roles import data_axes as data_axes
from zfun.collectives._roles import model_groups as model_groups
from zfun.collectives._roles import replica_group as replica_group
from zfun.collectives._roles import whole_group as whole_group
from zfun.collectives._rows import exchange_rows as exchange_rows
from zfun.collectives._work import Work
from zfun.collectives.backends._abstract import NotLeftYet as NotLeftYet
from zfun.collectives.backends._abstract import ShapeBoard as ShapeBoard
from zfun.collectives.backends._abstract import abstract_group
from zfun.collectives.backends._abstract import group_with_board as group_with_board
from zfun.collectives.backends._abstract import is_abstract_group as is_abstract_group
from zfun.collectives.backends._local import single_group
from zfun.collectives.backends._simulated import simulate
from zfun.collectives.launch._init import process_group
from zfun.collectives.launch._launch import Workers, spawn

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "Group",
    "LeafRecord",
    "Mesh",
    "MeshRecorder",
    "NamedMesh",
    "Op",
    "Permute",
    "Record",
    "Recorder",
    "Reduce",
    "ReduceScatter",
    "Stream",
    "UnequalAllToAll",
    "Work",
    "Workers",
    "abstract_group",
    "agreement_group",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allocate",
    "await_readers",
    "axis_of",
    "barrier",
    "broadcast",
    "check_same",
    "check_shardable",
    "checked",
    "enter",
    "exchange_values",
    "gather_values",
    "global_ranks",
    "is_checked",
    "is_symmetric",
    "leave",
    "mesh",
    "permute",
    "process_group",
    "record",
    "reduce_scatter",
    "replicated",
    "simulate",
    "single_group",
    "spawn",
    "split",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_broadcast",
    "start_permute",
    "start_reduce_scatter",
    "start_reduce_scatter_over",
    "sum_group",
]
