"""``deepspeed.runtime.zero.stage3``: the estimators of stage 3."""

from __future__ import annotations

import torch

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime.zero._shown import shown
from zfun.planner.formulae import Estimates, estimate_zero3, sizes_of

__all__ = [
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Estimates:
    """Print the memory that stage 3 takes for a model; see :func:`zfun.planner.plan` for bytes.

    Args:
        model: the module, on any device, ``meta`` included.
        num_gpus_per_node: devices of each machine.
        num_nodes: machines.
        additional_buffer_factor: factor of host memory for buffers.

    Returns:
        The rows, of which the table is printed on standard output.

    Example:
        >>> rows = estimate_zero3_model_states_mem_needs_all_live(torch.nn.Linear(64, 64))
        Estimated memory needed for params, optim states and gradients for a:
        HW: Setup with 1 node, 1 GPU per node.
        ...
    """
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
    """Print the memory that stage 3 takes for numbers of parameters.

    Args:
        total_params: the number of parameters.
        largest_layer_params: parameters of the largest layer.
        num_gpus_per_node: devices of each machine.
        num_nodes: machines.
        additional_buffer_factor: factor of host memory for buffers.

    Returns:
        The rows, of which the table is printed on standard output.

    Example:
        >>> rows = estimate_zero3_model_states_mem_needs_all_cold(3e9, 1e8)
        Estimated memory needed for params, optim states and gradients for a:
        HW: Setup with 1 node, 1 GPU per node.
        SW: Model with 3000M total params, 100M largest layer params.
        ...
    """
    return shown(
        estimate_zero3(
            total_params,
            largest_layer_params,
            gpus_per_node=num_gpus_per_node,
            num_nodes=num_nodes,
            buffer_factor=additional_buffer_factor,
        )
    )


__getattr__ = absent("runtime.zero.stage3", globals())
