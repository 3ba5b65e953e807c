"""Tensors with shapes and no numbers."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode(*, allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """Return a context in which operations on the CPU have shapes and compute nothing.

    Args:
        allow_non_fake_inputs: whether other tensors may take part.

    Example:
        >>> import torch
        >>> with fake_mode():
        ...     x = torch.empty(1 << 40) + 1
        >>> x.shape
        torch.Size([1099511627776])
    """
    return _CpuMode(allow_non_fake_inputs=allow_non_fake_inputs)


class _CpuMode(FakeTensorMode):
    # For a device that is absent, torch registers a substitute for the whole process, and the
    # substitute ends with the thread that registered it. Ranks are threads, so the next rank would
    # crash.
    @property
    def avoid_device_init(self) -> bool:
        return False
