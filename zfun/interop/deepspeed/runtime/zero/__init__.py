"""``deepspeed.zero``: parameters in pieces, before and after ``initialize``; estimators.

========================  =====================================================================
``partition_parameters``  ``Init`` and ``GatheredParameters``
``_owners``               where the values of a partitioned parameter are
========================  =====================================================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime.config import OffloadStateTypeEnum as OffloadStateTypeEnum
from zfun.interop.deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    register_external_parameter,
    unregister_external_parameter,
)
from zfun.planner.formulae import Estimates, estimate_zero2, estimate_zero3, sizes_of


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimates:
    """Print the memory that stage 2 takes for a model; see :func:`zfun.planner.plan` for bytes.

    Example:
        >>> rows = estimate_zero2_model_states_mem_needs_all_live(torch.nn.Linear(64, 64))
        Estimated memory needed for params, optim states and gradients for a:
        HW: Setup with 1 node, 1 GPU per node.
        ...
    """
    return estimate_zero2_model_states_mem_needs_all_cold(
        sizes_of(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimates:
    """Print the memory that stage 2 takes for a number of parameters."""
    machines = (num_gpus_per_node, num_nodes, additional_buffer_factor)
    return _shown(functools.partial(estimate_zero2, total_params), *machines)


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimates:
    """Print the memory that stage 3 takes for a model; see :func:`zfun.planner.plan` for bytes."""
    return estimate_zero3_model_states_mem_needs_all_cold(
        *sizes_of(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimates:
    """Print the memory that stage 3 takes for numbers of parameters."""
    machines = (num_gpus_per_node, num_nodes, additional_buffer_factor)
    estimate = functools.partial(estimate_zero3, total_params, largest_layer_params)
    return _shown(estimate, *machines)


def _shown(
    estimate: Callable[..., Estimates], gpus: int, nodes: int, buffer_factor: float
) -> Estimates:
    """Write the table on standard output, as DeepSpeed does, and return the rows."""
    rows = estimate(gpus_per_node=gpus, num_nodes=nodes, buffer_factor=buffer_factor)
    sys.stdout.write(f"{rows}\n")
    return rows


__getattr__ = absent("runtime.zero", globals(), "zero")
