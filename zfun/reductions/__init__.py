"""Functions of a whole sharded value: they need values of every rank, and so communicate.

An optimizer rule that looks at whole leaves or at a norm calls these, and needs no collectives.
"""

from zfun.reductions._buffers import BufferRule, merge_buffers
from zfun.reductions._buffers import checked_rule as checked_rule
from zfun.reductions._leaves import map_leaves
from zfun.reductions._means import mean_metrics
from zfun.reductions._norms import Spent, global_norm, norm_and_counts, norm_on_device
from zfun.reductions._values import all_ranks, any_rank, gather_values
from zfun.reductions._values import whole_buffers as whole_buffers

__all__ = [
    "BufferRule",
    "Spent",
    "all_ranks",
    "any_rank",
    "gather_values",
    "global_norm",
    "map_leaves",
    "mean_metrics",
    "merge_buffers",
    "norm_and_counts",
    "norm_on_device",
]
