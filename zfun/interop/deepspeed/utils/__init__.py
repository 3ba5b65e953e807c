"""``deepspeed.utils``: a logger, and functions for single parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime.dataloader import RepeatingLoader
from zfun.interop.deepspeed.utils import zero_to_fp32

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_set_full_fp32_param",
    "set_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]

logger = logging.getLogger("zfun.interop.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: the text.
        ranks: the ranks that log; all by default, or where -1 is among the ranks.
        level: of ``logging``.

    Example:
        >>> log_dist("step 10", ranks=[0])
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Return the modules of the classes; none needs a mark.

    The order of collectives does not depend on the parameters that a rank uses.

    Args:
        model: the model.
        leaf_module_classes: classes, or their names.
        raise_if_not_found: whether to refuse a model without such modules.

    Raises:
        OptionError: there is none.

    Example:
        >>> len(set_z3_leaf_modules(nn.Sequential(nn.Linear(1, 1)), [nn.Linear]))
        1
    """
    names = {one if isinstance(one, str) else one.__name__ for one in leaf_module_classes}
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found and raise_if_not_found:
        raise OptionError(
            f"leaf_module_classes are classes of the model; got {sorted(names)}, of which the "
            "model has none; leave the call out: no module needs a mark"
        )
    return found


def z3_leaf_module(model: nn.Module) -> bool:
    """Return ``False``: no module needs a mark.

    Example:
        >>> z3_leaf_module(nn.Linear(1, 1))
        False
    """
    return False


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole value of a parameter of an engine, from the master weight if there is one.

    Every rank must call.

    Args:
        param: a parameter of ``engine.module``.

    Returns:
        The value; ``None`` for a parameter without an engine.

    Example:
        >>> safe_get_full_fp32_param(nn.Linear(1, 1).weight) is None
        True
    """
    read = getattr(param, "_zfun_read", None)
    return None if read is None else read().float()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the whole value of a parameter of an engine, and its master weight.

    Every rank must call with the same value.

    Args:
        param: a parameter of ``engine.module``.
        value: of the parameter's shape.

    Raises:
        OptionError: the parameter has no engine, or another shape.
    """
    write = getattr(param, "_zfun_write", None)
    if write is None or value.shape != param.shape:
        raise OptionError(
            "safe_set_full_fp32_param() takes a parameter of an engine's module and a value of "
            f"its shape; got {tuple(value.shape)} for "
            f"{'a parameter without an engine' if write is None else tuple(param.shape)}; call "
            "deepspeed.initialize() first"
        )
    with torch.no_grad():
        write(value)


__getattr__ = absent("utils", globals())
