"""``deepspeed.utils``: logs, ranges, leaf modules, and functions for single parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from logging import INFO, getLogger
from typing import Any, ParamSpec, TypeVar

import torch as pytorch  # utils.torch is a module of DeepSpeed
import torch.distributed as dist
from torch import Tensor

from zfun import tree
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.accelerator import get_accelerator
from zfun.interop.deepspeed.runtime import RepeatingLoader as RepeatingLoader
from zfun.interop.deepspeed.utils import groups as groups
from zfun.interop.deepspeed.utils import zero_to_fp32 as zero_to_fp32
from zfun.interop.deepspeed.utils._params import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zfun.interop.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")

logger = getLogger("zfun.interop.deepspeed")


# Logs and ranges


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on some ranks; on all by default, or where -1 is among the ranks.

    Example:
        >>> log_dist("step 10", ranks=[0])
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log the memory of the device, with ``force``."""
    if force:
        here = get_accelerator()
        now, peak = here.memory_allocated() / 2**30, here.max_memory_allocated() / 2**30
        log_dist(f"{message}: {now:.2f} GB, at most {peak:.2f} GB", ranks)


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Show the calls of a function in a profile.

    Example:
        >>> instrument_w_nvtx(lambda x: x + 1)(1)
        2
    """

    @functools.wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with pytorch.profiler.record_function(getattr(func, "__qualname__", "function")):
            return func(*args, **kwargs)

    return call


is_initialized = dist.is_initialized

# Tensors


class OnDevice(contextlib.ContextDecorator):
    """A context in which modules are made on a device, in a dtype.

    Example:
        >>> import torch
        >>> with OnDevice(dtype=torch.bfloat16, device="meta"):
        ...     layer = torch.nn.Linear(2, 2)
        >>> layer.weight.dtype, layer.weight.device.type
        (torch.bfloat16, 'meta')
    """

    def __init__(self, dtype: pytorch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled

    def __enter__(self) -> None:
        self._before = pytorch.get_default_dtype()
        self._stack = contextlib.ExitStack()
        if self._enabled:
            pytorch.set_default_dtype(self._dtype)
            self._stack.callback(pytorch.set_default_dtype, self._before)
            self._stack.enter_context(pytorch.device(self._device))

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


def move_to_device(item: Any, device: Any, criterion_func: Any = None) -> Any:
    """Return a tree of tensors on a device."""
    move = lambda x: isinstance(x, Tensor) and (criterion_func is None or criterion_func(x))
    return tree.map(lambda x: x.to(device) if move(x) else x, item)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return a copy of a tree of tensors, of which no tensor is a view of a larger one."""
    if isinstance(item, dict):
        return type(item)((k, clone_tensors_for_torch_save(x, device)) for k, x in item.items())
    copy = lambda x: x.detach().clone().to(device) if isinstance(x, Tensor) else x
    return tree.map(copy, item)


def empty_cache() -> None:
    """Return cached blocks of the CUDA allocator; on CPUs nothing."""
    get_accelerator().empty_cache()


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    pytorch.manual_seed(seed)


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether the version of torch is in a range."""
    # Versions of torch compare with text as versions do.
    now = pytorch.__version__
    return (not min_version or now >= str(min_version)) and (
        not max_version or now <= str(max_version)
    )


def recursive_getattr(model: pytorch.nn.Module, module_name: str) -> Any:
    """Return a part of a module by its path.

    Example:
        >>> import torch
        >>> recursive_getattr(torch.nn.Sequential(torch.nn.Tanh()), "0")
        Tanh()
    """
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: pytorch.nn.Module, module_name: str, module: Any) -> None:
    """Set a part of a module by its path.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Tanh()))
        >>> recursive_setattr(model, "0.0", torch.nn.ReLU())
        >>> model[0][0]
        ReLU()
    """
    *above, name = module_name.split(".")
    setattr(functools.reduce(getattr, above, model), name, module)


def is_moe_param(param: Tensor) -> bool:
    """Return whether DeepSpeed's experts own a parameter."""
    return hasattr(param, "allreduce") and not param.allreduce


__getattr__ = absent("utils", globals())
