"""Stands where Python looks for DeepSpeed, and gives way to ``zfun.interop.deepspeed``."""

from zfun.interop.deepspeed import install

install()
