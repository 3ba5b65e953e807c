"""Kernels: tensors and integers only."""

from zfun.ops._optimizers import adam_step, is_abstract, scale_into, sgd_step
from zfun.ops._ravel import fingerprint, ravel, sum_of_squares, unravel

__all__ = ["adam_step", "fingerprint", "is_abstract", "ravel", "scale_into", "sgd_step", "sum_of_squares", "unravel"]
from zfun.ops._sums import sum_in_rank_order as sum_in_rank_order
