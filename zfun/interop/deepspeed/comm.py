"""``deepspeed.comm``: the functions of ``torch.distributed``, and where ranks stand.

A name that is not defined here is the one of ``torch.distributed``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zfun.interop.deepspeed._absent import ABSENT, refusal
from zfun.interop.deepspeed._ranks import init_distributed, local_rank

__all__ = [
    "barrier",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
]


def is_available() -> bool:
    """Return whether ``torch.distributed`` can be used.

    Example:
        >>> is_available()
        True
    """
    return dist.is_available()


def get_local_rank() -> int:
    """Return the number of this process on the host.

    Example:
        >>> get_local_rank()
        0
    """
    return local_rank()


def get_rank(group: Any = None) -> int:
    """Return the rank of this process; 0 where there is no process group.

    Example:
        >>> get_rank()
        0
    """
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; 1 where there is no process group.

    Example:
        >>> get_world_size()
        1
    """
    return dist.get_world_size(group) if dist.is_initialized() else 1


def barrier(group: Any = None) -> None:
    """Wait for all ranks.

    Example:
        >>> barrier()
    """
    if dist.is_initialized():
        dist.barrier(group)


def get_world_group() -> Any:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def __getattr__(name: str) -> Any:
    if name in ABSENT["comm"] or name.startswith("__") or not hasattr(dist, name):
        raise refusal("comm", name, {**globals(), **vars(dist)})
    return getattr(dist, name)
