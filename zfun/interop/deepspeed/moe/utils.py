"""Experts: not there, because plain modules will do."""

from zfun.interop.deepspeed._absent import absent

__getattr__ = absent("moe", globals())
