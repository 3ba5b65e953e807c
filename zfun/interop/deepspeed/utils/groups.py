"""``deepspeed.utils.groups``: the ranks of each kind of parallelism.

Parallelism here is over data: all ranks are the data parallel group, and each rank is alone among
model, tensor, sequence, pipeline and expert parallel ranks. There is no process group of one rank,
so the functions that return such a group are placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zfun.interop.deepspeed import comm
from zfun.interop.deepspeed._absent import absent

mpu = None

_ALL: dict[str, Callable[[], Any]] = {
    "group": comm.get_world_group,
    "rank": comm.get_rank,
    "world_size": comm.get_world_size,
}
_ALONE: dict[str, Callable[[], Any]] = {"rank": lambda: 0, "world_size": lambda: 1}
_OVER_DATA = ("data_parallel", "sequence_data_parallel")
_OTHERS = (
    "model_parallel",
    "tensor_model_parallel",
    "expert_model_parallel",
    "expert_parallel",
    "sequence_parallel",
    "pipeline_parallel",
)
# The functions of DeepSpeed, some of which begin with an underscore.
TABLE: dict[str, Callable[[], Any]] = {
    **{f"get_{kind}_{what}": find for kind in _OVER_DATA for what, find in _ALL.items()},
    **{f"get_{kind}_{what}": find for kind in _OTHERS for what, find in _ALONE.items()},
    "get_world_group": comm.get_world_group,
    "clone_world_group": comm.get_world_group,
    "get_broadcast_src_rank": lambda: 0,
    "get_sequence_data_parallel_src_rank": lambda: 0,
}

_absent = absent("utils.groups", globals(), "groups")


def __getattr__(name: str) -> Any:
    found = TABLE.get(name.removeprefix("_"))
    return _absent(name) if found is None else found
