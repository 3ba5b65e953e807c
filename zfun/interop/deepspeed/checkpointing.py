"""``deepspeed.checkpointing``: recompute a block in backward, by :func:`zfun.remat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zfun import stores
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._ranks import group_of
from zfun.interop.ds_config._read import read
from zfun.stores import Store
from zfun.transforms import remat

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


@dataclass(slots=True)
class _Choices:
    """The options of ``configure``, for the whole process, as in DeepSpeed."""

    is_made: bool = False
    store: Store | None = None
    shard_over: Group | None = None


_CHOICES = _Choices()


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose where :func:`checkpoint` keeps the inputs of a block.

    Args:
        mpu_: an object with ``get_model_parallel_group()``, for ``partition_activations``.
        deepspeed_config: the configuration, whose section ``activation_checkpointing`` counts
            where an argument is ``None``.
        partition_activations: whether model parallel ranks keep one part each.
        contiguous_checkpointing: accepted and not used; the allocator keeps blocks.
        num_checkpoints: accepted and not used.
        checkpoint_in_cpu: whether the inputs are kept in host memory.
        synchronize: accepted and not used.
        profile: accepted and not used.

    Example:
        >>> configure(None, checkpoint_in_cpu=True)
        >>> is_configured()
        True
        >>> reset()
    """
    section: Mapping[str, Any] = {}
    if deepspeed_config is not None:
        section = read(deepspeed_config)[0].get("activation_checkpointing", {})
    in_host = section.get("cpu_checkpointing") if checkpoint_in_cpu is None else checkpoint_in_cpu
    parts = (
        section.get("partition_activations")
        if partition_activations is None
        else partition_activations
    )
    _CHOICES.is_made = True
    _CHOICES.store = stores.host() if in_host else None
    _CHOICES.shard_over = (
        group_of(mpu_.get_model_parallel_group()) if parts and mpu_ is not None else None
    )


def is_configured() -> bool:
    """Return whether :func:`configure` was called.

    Example:
        >>> is_configured()
        False
    """
    return _CHOICES.is_made


def reset() -> None:
    """Forget what :func:`configure` chose.

    Example:
        >>> reset()
    """
    _CHOICES.is_made, _CHOICES.store, _CHOICES.shard_over = False, None, None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, keep the inputs only, and call the function again in backward.

    Args:
        function: a block of the model.
        args: of the function; tensors and anything else.

    Returns:
        The results of the function.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(lambda x: (x * x).sum(), x).backward()
        >>> x.grad
        tensor([2., 2.])
    """
    return remat(function, store=_CHOICES.store, shard_over=_CHOICES.shard_over)(*args)


non_reentrant_checkpoint = checkpoint


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Refuse to partition without model parallel ranks, which :func:`configure` takes.

    Raises:
        OptionError: ``True``, and :func:`configure` was not called with ranks.

    Example:
        >>> partition_activations_in_checkpoint(False)
    """
    if not partition_activation:
        _CHOICES.shard_over = None
    elif _CHOICES.shard_over is None:
        raise OptionError(
            "inputs of blocks are partitioned over model parallel ranks; got True without ranks; "
            "call configure(mpu, partition_activations=True)"
        )


def set_num_layers(nlayers: int) -> None:
    """Do nothing: inputs are not kept in one contiguous buffer.

    Example:
        >>> set_num_layers(12)
    """


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed torch's generators, which :func:`checkpoint` restores in backward.

    Example:
        >>> model_parallel_cuda_manual_seed(0)
    """
    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed

__getattr__ = absent("checkpointing", globals())
