"""``deepspeed.comm``: the functions of ``torch.distributed``, and where ranks stand.

A name that is not defined here is the one of ``torch.distributed``; DeepSpeed's arguments for its
log (``prof``, ``log_name``, ``debug``) are accepted and not used. Without a process group there is
one rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from zfun.interop.deepspeed._absent import ABSENT, absent
from zfun.interop.deepspeed._placeholders import is_dunder
from zfun.interop.deepspeed._ranks import init_distributed as init_distributed
from zfun.interop.deepspeed._ranks import local_rank, tell_accelerate

_LOG = frozenset(["debug", "log_name", "prof"])
# DeepSpeed's names that torch spells otherwise; newer ones stand first.
_TORCH = {
    "all_gather_into_tensor": ("all_gather_single", "all_gather_into_tensor"),
    "allgather_fn": ("all_gather_single", "all_gather_into_tensor"),
    "inference_all_reduce": ("all_reduce",),
    "reduce_scatter_fn": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "reduce_scatter_tensor": ("reduce_scatter_single", "reduce_scatter_tensor"),
}


def is_initialized() -> bool:
    """Return whether there is a process group."""
    if is_begun := dist.is_initialized():
        tell_accelerate(dist.get_backend())
    return is_begun


def get_rank(group: Any = None) -> int:
    """Return the rank of this process.

    Example:
        >>> get_rank()
        0
    """
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks.

    Example:
        >>> get_world_size()
        1
    """
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank among all ranks of a rank of a group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of a group, among all ranks.

    Example:
        >>> get_all_ranks_from_group()
        [0]
    """
    return [get_global_rank(group, rank) for rank in range(get_world_size(group))]


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **log: Any) -> Any:
    """Wait for all ranks.

    Example:
        >>> barrier()
    """
    if dist.is_initialized():
        return dist.barrier(group, async_op, device_ids)
    return None


def all_gather_coalesced(
    output_tensors: Sequence[Any], input_tensors: Sequence[Any], group: Any = None, **options: Any
) -> Any:
    """Gather each tensor of a list from all ranks into one tensor."""
    *pairs, last = zip(output_tensors, input_tensors, strict=True)
    gather = __getattr__("all_gather_into_tensor")
    for output, own in pairs:
        gather(output, own, group=group)
    return gather(*last, group=group, **options)


def configure(*args: Any, **options: Any) -> None:
    """Do nothing: torch.profiler and ``zf.record`` measure collectives, so there is no log."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log nothing, as :func:`configure`."""
    return {} if return_dict else None


reset_log = configure
get_local_rank = local_rank
get_world_group = lambda: dist.group.WORLD
has_all_gather_into_tensor = has_reduce_scatter_tensor = has_coalescing_manager = lambda: True


@functools.cache
def _of_torch(name: str) -> Any:
    """Return a name of ``torch.distributed``, with DeepSpeed's names of arguments."""
    found = getattr(dist, name)
    if not inspect.isfunction(found):
        return found
    own = inspect.signature(found).parameters
    inputs = next((x for x in ("input_tensor", "input") if x in own), "tensor")
    spellings = {
        "tensor": inputs,
        "output_tensor": "output" if "output" in own else "output_tensor",
    }

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {
            key if key in own else spellings.get(key, key): value
            for key, value in kwargs.items()
            if key not in _LOG
        }
        return found(*args, **given)

    return call


_absent = absent("comm", {**vars(dist), **globals()})


def __getattr__(name: str) -> Any:
    torchs = next((x for x in _TORCH.get(name, (name,)) if hasattr(dist, x)), None)
    if name in ABSENT["comm"] or is_dunder(name) or torchs is None:
        return _absent(name)
    return _of_torch(torchs)
