"""Optimizers by the names of DeepSpeed's kernels; the engine runs zfun's."""

from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]

__getattr__ = absent("ops", globals())
