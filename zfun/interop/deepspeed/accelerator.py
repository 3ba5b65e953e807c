"""``deepspeed.accelerator``: the device of this process, by the names that scripts use."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._ranks import local_device

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """The device of this process; other names are those of ``torch.cuda`` or ``torch.cpu``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def _module(self) -> ModuleType:
        return torch.cuda if torch.cuda.is_available() else torch.cpu

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``"cuda"`` or ``"cpu"``, with the index if there is one."""
        kind = local_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        """Return the device as a string for ``torch.device``."""
        return str(local_device())

    def current_device(self) -> Any:
        """Return the index of the device; on CPUs the string ``"cpu"``."""
        device = local_device()
        return device.type if device.index is None else device.index

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which the device is the current one."""
        return self._module.device(device_index)

    def device_count(self) -> int:
        """Return the number of CUDA devices, or 1 on CPUs."""
        return max(1, torch.cuda.device_count())

    def communication_backend_name(self) -> str:
        """Return ``"nccl"`` or ``"gloo"``."""
        return "nccl" if torch.cuda.is_available() else "gloo"

    def is_available(self) -> bool:
        """Return ``True``: a CPU is a device too."""
        return True

    def set_device(self, device_index: int) -> None:
        """Make a CUDA device the current one; on CPUs nothing."""
        if torch.cuda.is_available():
            torch.cuda.set_device(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generators."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Return cached blocks of the CUDA allocator; on CPUs nothing."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return ``True``."""
        return True


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the device of this process.

    Example:
        >>> get_accelerator().is_available()
        True
    """
    return Accelerator()


__getattr__ = absent("accelerator", globals())
