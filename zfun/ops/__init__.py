"""Kernels: tensors and integers only."""

from zfun.ops._blocks import dequantise, message_bytes, quantise, sum_dequantised
from zfun.ops._optimizers import adam_step, is_abstract, scale_into, sgd_step
from zfun.ops._ravel import fingerprint, ravel, squares_in_bins, total_of_bins, unravel
from zfun.ops._signs import pack_signs, unpack_signs
from zfun.ops._sums import sum_in_rank_order, wide

__all__ = [
    "adam_step",
    "dequantise",
    "fingerprint",
    "is_abstract",
    "message_bytes",
    "pack_signs",
    "quantise",
    "ravel",
    "scale_into",
    "sgd_step",
    "squares_in_bins",
    "sum_dequantised",
    "sum_in_rank_order",
    "total_of_bins",
    "unpack_signs",
    "unravel",
    "wide",
]
