"""The dtypes of arguments and buffers under 16 bits, by the rules of DeepSpeed."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from zfun.interop.ds_config._values import Values

_CAST = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def set_dtypes(module: nn.Module, values: Values) -> None:
    """Let a module have the dtypes of ``data_types``, and cast arguments for ``fp16.auto_cast``."""
    if values["fp16.auto_cast"]:
        # As in DeepSpeed, to float16 under bf16 too, and arguments by position alone.
        module.register_forward_pre_hook(_halved_before)
    if not (values["fp16.enabled"] or values["bf16.enabled"]):
        return
    dtype, patterns = values["data_types.buffer_dtype"], _patterns(module, values)
    named = list(module.named_buffers(remove_duplicate=False))
    wide = {id(x) for name, x in named if any(re.search(one, name) for one in patterns)}
    for _, buffer in named:
        new = torch.float32 if id(buffer) in wide else dtype
        if new is not None and buffer.dtype in _CAST:
            buffer.data = buffer.data.to(new)


def _halved_before(module: nn.Module, args: Any) -> Any:
    return _halved(args)


def _halved(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_halved(x) for x in value])
    if isinstance(value, dict):
        return {key: _halved(x) for key, x in value.items()}
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value


def _patterns(module: nn.Module, values: Values) -> list[str]:
    """Return patterns for the buffers in float32: those given, or of the classes of the model."""
    given, as_pattern = values["data_types.keep_in_fp32_modules"], lambda x: x.replace("*", ".*")
    if given != "auto":
        return [as_pattern(name) for name in given]
    # transformers takes the second list under float16 alone.
    lists = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")[: 1 + values["fp16.enabled"]]
    return [
        (rf"^{re.escape(path)}\..*" if path else "") + as_pattern(name)
        for path, part in module.named_modules()
        for key in lists
        for name in getattr(part, key, None) or ()
    ]
