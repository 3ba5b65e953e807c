"""``deepspeed.runtime``: the modules from which scripts import functions."""

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime import dataloader, lr_schedules, zero

__all__ = ["dataloader", "lr_schedules", "zero"]

__getattr__ = absent("runtime", globals())
