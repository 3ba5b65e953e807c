"""Kernels: tensors and integers only."""

from zfun.ops._blocks import dequantise, message_bytes, quantise, sum_dequantised
from zfun.ops._fake import fake_mode
from zfun.ops._fingerprint import fingerprint
from zfun.ops._jit import is_abstract, use
from zfun.ops._norm import squares_in_bins, total_of_bins
from zfun.ops._optimizers import adagrad_step, adam_step, lamb_step, lion_step, scale_into, sgd_step
from zfun.ops._ravel import Measures, ravel, ravel_into, unravel, unravel_from
from zfun.ops._signs import pack_signs, unpack_signs
from zfun.ops._sums import sum_and_square, sum_in_rank_order, wide
from zfun.ops._table import AddressTable

__all__ = [
    "AddressTable",
    "Measures",
    "adagrad_step",
    "adam_step",
    "dequantise",
    "fake_mode",
    "fingerprint",
    "is_abstract",
    "lamb_step",
    "lion_step",
    "message_bytes",
    "pack_signs",
    "quantise",
    "ravel",
    "ravel_into",
    "scale_into",
    "sgd_step",
    "squares_in_bins",
    "sum_and_square",
    "sum_dequantised",
    "sum_in_rank_order",
    "total_of_bins",
    "unpack_signs",
    "unravel",
    "unravel_from",
    "use",
    "wide",
]
