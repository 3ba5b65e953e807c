"""The estimators of DeepSpeed, with the same tables."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch

from zfun import tree
from zfun.options import ANY, integer, number, takes

_COUNT = number(0, example="7.5e9")


@takes(gather_bucket=_COUNT, reduce_bucket=_COUNT, itemsize=integer(1))
def bucket_buffer_bytes(
    gather_bucket: float, reduce_bucket: float, *, itemsize: int = 2
) -> Fraction:
    """Return the bytes that DeepSpeed's documentation states for the buckets of stages 1 and 2.

    Args:
        gather_bucket: ``allgather_bucket_size``, in elements.
        reduce_bucket: ``reduce_bucket_size``, in elements.
        itemsize: bytes of an element.

    Returns:
        4.5 times the bytes of both buckets, with ``overlap_comm``.

    Example:
        >>> [float(bucket_buffer_bytes(n, n)) / 1e9 for n in (2e8, 5e8)]
        [3.6, 9.0]

    After DeepSpeed's integration into Hugging Face's Trainer (2021), ``overlap_comm``.
    """
    return Fraction(9, 2) * itemsize * (Fraction(gather_bucket) + Fraction(reduce_bucket))


class Estimate(NamedTuple):
    """A row of an estimator.

    Attributes:
        host: bytes of host memory of a machine.
        device: bytes of each device.
        options: the options of the row, as DeepSpeed writes them.
    """

    host: int
    device: int
    options: str


class Estimates(NamedTuple):
    """The rows of an estimator; ``print`` shows DeepSpeed's table.

    Attributes:
        rows: in DeepSpeed's order.
        header: the lines that say for which machines and for which model.
    """

    rows: tuple[Estimate, ...]
    header: str

    def __str__(self) -> str:
        rows = [
            f" {row.host / 2**30:7.2f}GB | {row.device / 2**30:6.2f}GB | {row.options}"
            for row in self.rows
        ]
        return "\n".join([self.header, "  per CPU  |  per GPU |   Options", *rows])


_MACHINES = {
    "gpus_per_node": integer(1),
    "num_nodes": integer(1),
    "buffer_factor": number(0, example="1.5"),
}


@takes(num_params=_COUNT, **_MACHINES)
def estimate_zero2(
    num_params: float, *, gpus_per_node: int = 1, num_nodes: int = 1, buffer_factor: float = 1.5
) -> Estimates:
    """Return the rows of DeepSpeed's ``estimate_zero2_model_states_mem_needs_all_cold``.

    Args:
        num_params: the number of parameters; :func:`sizes_of` counts those of a model.
        gpus_per_node: devices of each machine.
        num_nodes: machines.
        buffer_factor: factor of host memory for buffers.

    Returns:
        Two rows: with and without an offloaded optimizer.

    Example:
        >>> print(estimate_zero2(2_783_959_040))
        Estimated memory needed for params, optim states and gradients for a:
        HW: Setup with 1 node, 1 GPU per node.
        SW: Model with 2783M total params.
          per CPU  |  per GPU |   Options
           62.23GB |   5.19GB | offload_optimizer=cpu
           15.56GB |  51.86GB | offload_optimizer=none

    After DeepSpeed (2026), ``runtime/zero/stage_1_and_2.py``.
    """
    size = gpus_per_node * num_nodes
    rows = (
        Estimate(
            int(num_params * max(4 * size, 16) * buffer_factor),
            int(2 * num_params),
            "offload_optimizer=cpu",
        ),
        Estimate(
            int(num_params * 4 * gpus_per_node * buffer_factor),
            int(2 * num_params + int(18 * num_params / size)),
            "offload_optimizer=none",
        ),
    )
    return Estimates(rows, _header(num_params, None, gpus_per_node, num_nodes))


@takes(num_params=_COUNT, largest_layer=_COUNT, **_MACHINES)
def estimate_zero3(
    num_params: float,
    largest_layer: float,
    *,
    gpus_per_node: int = 1,
    num_nodes: int = 1,
    buffer_factor: float = 1.5,
) -> Estimates:
    """Return the rows of DeepSpeed's ``estimate_zero3_model_states_mem_needs_all_cold``.

    Args:
        num_params: the number of parameters; :func:`sizes_of` counts those of a model.
        largest_layer: parameters of the largest layer.
        gpus_per_node: devices of each machine.
        num_nodes: machines.
        buffer_factor: factor of host memory for buffers.

    Returns:
        Six rows: with everything, only the optimizer, and nothing offloaded; each for parameters
        that are made in shards (``zero_init=1``) or whole.

    Example:
        >>> print(estimate_zero3(2_783_959_040, 65_798_144))
        Estimated memory needed for params, optim states and gradients for a:
        HW: Setup with 1 node, 1 GPU per node.
        SW: Model with 2783M total params, 65M largest layer params.
          per CPU  |  per GPU |   Options
           70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
           70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
           62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
           62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
            0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1
           15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0

    After DeepSpeed (2026), ``runtime/zero/stage3.py``.
    """
    size, layer = gpus_per_node * num_nodes, 4 * largest_layer
    # Bytes of a parameter in host memory and on all devices, by which parts are offloaded.
    places = (("cpu ", "cpu ", 18, 0), ("none", "cpu ", 16, 2), ("none", "none", 0, 18))
    rows = []
    for params_at, optimizer_at, on_host, on_devices in places:
        for is_sharded in (True, False):
            whole = 4 * gpus_per_node
            if on_host:
                share = on_host * (1 / num_nodes)
                host = num_params * (share if is_sharded else max(whole, share))
            else:
                host = (largest_layer if is_sharded else num_params) * whole
            device = layer + int(on_devices * num_params / size)
            options = (
                f"offload_param={params_at}, offload_optimizer={optimizer_at}, "
                f"zero_init={int(is_sharded)}"
            )
            rows.append(Estimate(int(host * buffer_factor), int(device), options))
    return Estimates(tuple(rows), _header(num_params, largest_layer, gpus_per_node, num_nodes))


def _header(
    num_params: float, largest_layer: float | None, gpus_per_node: int, num_nodes: int
) -> str:
    layer = "" if largest_layer is None else f", {int(largest_layer / 1e6)}M largest layer params"
    return (
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {num_nodes} node{'s' * (num_nodes > 1)}, {gpus_per_node} "
        f"GPU{'s' * (gpus_per_node > 1)} per node.\n"
        f"SW: Model with {int(num_params / 1e6)}M total params{layer}."
    )


@takes(model=ANY)
def sizes_of(model: Any) -> tuple[int, int]:
    """Count the parameters of a model, and those of the largest layer, for the estimators.

    Args:
        model: a ``torch.nn.Module`` or a tree of tensors; ``meta`` tensors will do.

    Returns:
        The number of parameters, tied ones counted once, and the largest number of parameters that
        one module, or one node of the tree, holds itself.

    Example:
        >>> sizes_of({"in": {"w": torch.ones(3, 4), "b": torch.ones(4)}, "out": torch.ones(5)})
        (21, 16)
    """
    if isinstance(model, torch.nn.Module):
        total = sum(p.numel() for p in model.parameters())
        layers = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
        return total, max(layers, default=0)
    leaves = [x for x in tree.leaves(model) if isinstance(x, torch.Tensor)]
    layers_of: dict[str, int] = {}
    for path, leaf in zip(tree.paths(model), tree.leaves(model), strict=True):
        if isinstance(leaf, torch.Tensor):
            parent = path.rpartition(".")[0]
            layers_of[parent] = layers_of.get(parent, 0) + leaf.numel()
    return sum(x.numel() for x in {id(x): x for x in leaves}.values()), max(
        layers_of.values(), default=0
    )
