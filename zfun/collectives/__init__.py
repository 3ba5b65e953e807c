"""Groups of ranks, the collectives that they start, and their differentiable forms.

A collective is data (``_calls``), a group has two numbers and one method that starts it (``_group``), and what has been started is a value
(``_pending``). That much all of the others share, and ``_primitives`` (with ``_rows``) make functions of it that can be differentiated.

==================  ==================================================================================================================
groups              modules
==================  ==================================================================================================================
of one process      ``_single``; ``_simulate``, which is the shortest that sums; ``_abstract``, in which nothing moves
of processes        ``_process`` chooses: nccl (``_native``); messages over gloo (``_direct``, ``_exchange``, ``_workspace``, ``_turns``,
                    ``_connections``); memory that ranks share (``_meeting``, and ``_shared``, which names its parts); both (``_hosts``)
of other groups     ``_mesh``, of two axes; ``_record``, which writes down what it sends; ``_checked``, which compares it
==================  ==================================================================================================================

What groups of processes have in common is in ``_base``, and what tells them that a rank is lost in ``_monitor``. ``_agree`` compares ranks
before anything depends on it, and ``_launch`` starts some.
"""

from __future__ import annotations

from zfun.collectives._abstract import abstract_group
from zfun.collectives._agree import Entry, agree
from zfun.collectives._calls import AllGather, AllReduce, AllToAll, Broadcast, Call, Lane, Op, Permute, Reduce, ReduceScatter
from zfun.collectives._checked import checked
from zfun.collectives._group import Group, allocate, await_readers, global_ranks, is_checked, is_symmetric
from zfun.collectives._launch import Workers, spawn
from zfun.collectives._mesh import Mesh, axis_of, check_shardable, mesh_of, split, start_reduce_scatter_over
from zfun.collectives._pending import Pending
from zfun.collectives._primitives import (
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
from zfun.collectives._process import process_group
from zfun.collectives._record import MeshRecorder, Record, Recorder, record
from zfun.collectives._simulate import simulate
from zfun.collectives._single import single_group
from zfun.collectives._values import barrier, exchange_values, gather_values

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Call",
    "Entry",
    "Group",
    "Lane",
    "Mesh",
    "MeshRecorder",
    "Op",
    "Pending",
    "Permute",
    "Record",
    "Recorder",
    "Reduce",
    "ReduceScatter",
    "Workers",
    "abstract_group",
    "agree",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allocate",
    "await_readers",
    "axis_of",
    "barrier",
    "broadcast",
    "check_shardable",
    "checked",
    "exchange_values",
    "gather_values",
    "global_ranks",
    "is_checked",
    "is_symmetric",
    "mesh_of",
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
]
