"""``deepspeed.accelerator``: the device of this process, by the names that scripts use.

A name that is in none of the tables is the one of ``torch.cuda`` or ``torch.cpu``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._ranks import local_device


def _resident(device_index: Any = None) -> int:
    """Return the bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _pages()


def _peak(device_index: Any = None) -> int:
    """Return the most bytes of memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _pages(name: str = "") -> int:
    """Return the bytes of a page, or of the pages of a number of the system."""
    return os.sysconf("SC_PAGE_SIZE") * (os.sysconf(name) if name else 1)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _no_context(*args: Any, **kwargs: Any) -> Any:
    """Return a context that does nothing."""
    return contextlib.nullcontext()


def _module() -> ModuleType:
    return torch.cuda if torch.cuda.is_available() else torch.cpu


def _is_synchronous() -> bool:
    """Return whether an operation is done when its call returns."""
    return not torch.cuda.is_available()


def _device_name(device_index: int | None = None) -> str:
    """Return ``"cuda"`` or ``"cpu"``, with the index if there is one."""
    kind = local_device().type
    return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"


def _current_device() -> Any:
    """Return the index of the device; on CPUs the string ``"cpu"``."""
    device = local_device()
    return device.type if device.index is None else device.index


def _choose(current_env: Any, local_accelerator_ids: Any) -> None:
    """Choose devices in an environment."""
    current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


def _dtypes() -> list[torch.dtype]:
    """Return the floating dtypes in which a model trains."""
    half = [torch.bfloat16] if get_accelerator().is_bf16_supported() else []
    return [torch.float32, torch.float16, *half]


# On both kinds of device.
_BOTH: Mapping[str, Callable[..., Any]] = {
    "amp": lambda: _module().amp,
    "build_extension": lambda: import_module("torch.utils.cpp_extension").BuildExtension,
    "current_device": _current_device,
    "current_device_name": lambda: str(local_device()),
    "device_count": lambda: max(1, torch.cuda.device_count()),
    "device_name": _device_name,
    "export_envs": lambda: ["NCCL", "LD_LIBRARY", "PATH"],
    "is_available": lambda: True,
    "is_fp16_supported": lambda: True,
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "lazy_call": lambda callback: callback(),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "on_accelerator": lambda tensor: tensor.device.type == local_device().type,
    "op_builder_dir": lambda: "deepspeed.ops.op_builder",
    "prefer_triton_grouped_mm": lambda: False,
    "random": lambda: torch.random,
    "set_visible_devices_envs": _choose,
    "supported_dtypes": _dtypes,
    "unpin_memory": _nothing,
    "visible_devices_envs": lambda: ["CUDA_VISIBLE_DEVICES"],
    # No kernel is built.
    "create_op_builder": _nothing,
    "get_op_builder": _nothing,
    **dict.fromkeys(("is_synchronized_device", "use_host_timers"), _is_synchronous),
    **dict.fromkeys(("resolves_data_dependency", "handles_memory_backpressure"), _is_synchronous),
}
# On a CPU the memory of the process stands for the allocator's, and each operation is done when its
# call returns, so there are no streams, events and graphs.
_CPU: Mapping[str, Any] = {
    "Event": None,
    "Stream": None,
    "available_memory": lambda device_index=None: _pages("SC_AVPHYS_PAGES"),
    "capture_to_graph": _no_context,
    "communication_backend_name": lambda: "gloo",
    "create_graph": _nothing,
    "current_stream": _nothing,
    "default_generator": lambda device_index=0: torch.default_generator,
    "default_stream": _nothing,
    "device": _no_context,
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "initial_seed": lambda *args: torch.initial_seed(),
    "is_bf16_supported": lambda: True,
    "is_triton_supported": lambda: False,
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _resident(),
        "allocated_bytes.all.peak": _peak(),
    },
    "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor,
    "range_pop": _nothing,
    "range_push": _nothing,
    "replay_graph": _nothing,
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "stream": _no_context,
    "total_memory": lambda device_index=None: _pages("SC_PHYS_PAGES"),
    **dict.fromkeys(("memory_allocated", "memory_cached", "memory_reserved"), _resident),
    **dict.fromkeys(("max_memory_allocated", "max_memory_cached", "max_memory_reserved"), _peak),
    **dict.fromkeys(("empty_cache", "ipc_collect", "set_device", "synchronize"), _nothing),
    **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), _nothing),
    "reset_peak_memory_stats": _nothing,
}
# Other names are torch.cuda's.
_CUDA: Mapping[str, Callable[..., Any]] = {
    "available_memory": lambda device_index=None: torch.cuda.mem_get_info(device_index)[0],
    "capture_to_graph": lambda graph, pool=None, stream=None: torch.cuda.graph(graph, pool, stream),
    "communication_backend_name": lambda: "nccl",
    "create_graph": torch.cuda.CUDAGraph,
    "default_generator": lambda device_index=0: torch.cuda.default_generators[device_index],
    "get_rng_state": lambda device_index=None: torch.cuda.get_rng_state(_index(device_index)),
    "initial_seed": lambda *args: torch.cuda.initial_seed(),
    "is_triton_supported": lambda: torch.cuda.get_device_capability()[0] >= 8,
    "max_memory_cached": lambda device_index=None: torch.cuda.max_memory_reserved(device_index),
    "memory_cached": lambda device_index=None: torch.cuda.memory_reserved(device_index),
    "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor.pin_memory(),
    "range_pop": lambda domain=None: torch.cuda.nvtx.range_pop(),
    "range_push": lambda msg, domain=None, category=None: torch.cuda.nvtx.range_push(msg),
    "replay_graph": lambda graph: graph.replay(),
    "reset_max_memory_cached": lambda device_index=None: torch.cuda.reset_peak_memory_stats(
        device_index
    ),
    "set_rng_state": lambda new_state, device_index=None: torch.cuda.set_rng_state(
        new_state, _index(device_index)
    ),
    "total_memory": lambda device_index=None: (
        torch.cuda.get_device_properties(_index(device_index)).total_memory
    ),
}
_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


def _index(device_index: int | None) -> int:
    return torch.cuda.current_device() if device_index is None else device_index


class DeepSpeedAccelerator:
    """The device of this process: the CUDA device of the local rank, or the CPU."""

    supports_nvtx_domain = False
    _compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _DTYPES:
            return functools.partial(self._tensor, _DTYPES[name])
        table = {**_BOTH, **(_CUDA if torch.cuda.is_available() else _CPU)}
        return table[name] if name in table else getattr(_module(), name)

    def _tensor(self, dtype: torch.dtype, *args: Any) -> Tensor:
        """Make a tensor as ``torch.FloatTensor`` does: of values, or of a size."""
        if args and isinstance(args[0], int):
            return torch.empty(args, dtype=dtype, device=local_device())
        return torch.tensor(*args or ([],), dtype=dtype, device=local_device())

    def get_compile_backend(self) -> str:
        """Return the backend for ``torch.compile``."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend for ``torch.compile``."""
        self._compile_backend = backend


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the device of this process.

    Example:
        >>> get_accelerator().is_available()
        True
    """
    return DeepSpeedAccelerator()


__getattr__ = absent("accelerator", globals())
