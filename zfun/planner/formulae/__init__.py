"""Closed forms from papers and from DeepSpeed: memory, traffic, buffers and efficiency.

A formula needs no model and takes no time, and counts only the terms that the source names.
:func:`zfun.plan` counts every byte of a step, but needs the model. Bytes are of one rank
unless an entry says else, and a GB is 10**9 bytes, except in DeepSpeed's tables, which print GiB as
"GB".
"""

from zfun.planner.formulae._estimates import (
    Estimate,
    Estimates,
    bucket_buffer_bytes,
    estimate_zero2,
    estimate_zero3,
    sizes_of,
)
from zfun.planner.formulae._infinity import (
    InfinityMemory,
    aggregate_bandwidth,
    efficiency,
    infinity_memory,
    intensity,
    required_bandwidth,
    transformer_params,
)
from zfun.planner.formulae._zero import Volume, largest_model, zero_memory, zero_table, zero_volume

__all__ = [
    "Estimate",
    "Estimates",
    "InfinityMemory",
    "Volume",
    "aggregate_bandwidth",
    "bucket_buffer_bytes",
    "efficiency",
    "estimate_zero2",
    "estimate_zero3",
    "infinity_memory",
    "intensity",
    "largest_model",
    "required_bandwidth",
    "sizes_of",
    "transformer_params",
    "zero_memory",
    "zero_table",
    "zero_volume",
]
