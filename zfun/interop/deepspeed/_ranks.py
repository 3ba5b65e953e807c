"""The ranks of a script: groups of ``torch.distributed`` as groups of zfun."""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zfun.collectives import Group, process_group, single_group
from zfun.collectives.launch._environment import launched
from zfun.errors import OptionError
from zfun.options import GROUP


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise ``torch.distributed`` from the launcher; one rank where there is no launcher.

    A second call does nothing. The arguments are DeepSpeed's; a launcher names the port and the
    ranks, so ``auto_mpi_discovery``, ``distributed_port``, ``verbose`` and ``config`` are not used.

    Example:
        >>> init_distributed(dist_init_required=False)
    """
    if dist_init_required is False or dist.is_initialized():
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    tell_accelerate(backend)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if init_method is not None:
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world_size, **options
        )
    elif launched():
        dist.init_process_group(backend, **options)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)


def tell_accelerate(backend: str) -> None:
    """Let accelerate count the ranks of a CPU.

    Without a device, accelerate chooses no backend, calls ``deepspeed.comm``, and takes each rank
    for the only one, because it has no backend.
    """
    states = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = {} if states is None else states.PartialState._shared_state
    if "backend" in shared and shared["backend"] is None:
        shared["backend"] = backend


def init_from_launcher() -> None:
    """Initialise ``torch.distributed`` where a launcher has started this process."""
    if launched():
        init_distributed()


def group_of(ranks: Any = None) -> Group:
    """Return the group of zfun for a process group, a group of zfun, or all ranks."""
    if GROUP.accepts(ranks):
        return ranks
    if ranks is None and not dist.is_initialized():
        return single_group()
    return _group(dist.group.WORLD if ranks is None else ranks)


def data_ranks(mpu: Any) -> Any:
    """Return the data parallel ranks of the ``mpu`` of a script, whose other ranks stand alone.

    Raises:
        OptionError: ranks that share a layer, a sequence or a pipeline, because norm, clipping and
            skipped steps would count the parts of each rank alone.
    """
    if not hasattr(mpu, "get_data_parallel_group"):
        raise OptionError(
            "an mpu tells the data parallel ranks by get_data_parallel_group(); got "
            f"{type(mpu).__name__} without it; leave mpu out where all ranks are data parallel"
        )
    for kind, remedy in _AXES.items():
        size = getattr(mpu, f"get_{kind}_world_size", lambda: 1)()
        if size > 1:
            raise OptionError(
                f"initialize() takes data parallel ranks from an mpu; got get_{kind}_world_size() "
                f"{size}; {remedy}"
            )
    return mpu.get_data_parallel_group()


_TENSOR = "leave the layers whole, and shard them with stage 3; or train with zf.tensor_parallel"
_STAGES = "pass a PipelineModule"
_SEQUENCES = "train with zf.parallel.sequence_batch and zf.parallel.token_mean"
_AXES = {
    "model_parallel": _TENSOR,
    "tensor_model_parallel": _TENSOR,
    "slice_parallel": _TENSOR,
    "pipe_parallel": _STAGES,
    "pipeline_model_parallel": _STAGES,
    "sequence_parallel": _SEQUENCES,
    "context_parallel": _SEQUENCES,
    "expert_model_parallel": "leave the experts whole, and shard them with stage 3",
}

# One group for each process group, because a group has connections of its own.
_group = functools.lru_cache(maxsize=16)(process_group)


def local_rank() -> int:
    """Return the number of this process on the host, as the launcher gave it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_device() -> torch.device:
    """Return the device of this process: the CUDA device of the local rank, or the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")
