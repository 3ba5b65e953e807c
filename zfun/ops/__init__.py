"""Kernels: tensors and integers only.

The modules of this folder have the public functions, with their documentation, and choose a kernel
by where the tensors live (``_dispatch``; see [Note: twins]). Each kernel is written up to three
times and computes the same bits each time: in plain torch (``reference``), which is the form to
read first, for CPUs (``numba``) and for CUDA devices (``triton``).

==========================  ===========  ============================  ===========  ==========
kernels                     functions    reference                     numba        triton
==========================  ===========  ============================  ===========  ==========
leaves and one buffer       ``_ravel``   ``_ravel``                    ``_ravel``   ``_ravel``
the norm of a buffer        ``_norm``    ``_norm``                     ``_squares`` ``_squares``
sums over ranks             ``_sums``    ``_sums``                     ``_sums``
steps of optimizers         ``_steps``   ``_steps``, ``_rounding``     ``_steps``   ``_steps``
few bits for a number       ``_codes``   ``_codes``                    ``_codes``   ``_codes``
==========================  ===========  ============================  ===========  ==========

``_table`` has the addresses of a bucket's leaves, ``_exact`` the constants that all exact norms
share, ``_fingerprint`` a digest of a tensor, and ``_fake`` tensors with shapes and no numbers.
"""

from zfun.ops._codes import (
    dequantise,
    message_bytes,
    pack_signs,
    quantise,
    sum_dequantised,
    unpack_signs,
)
from zfun.ops._fake import fake_mode
from zfun.ops._fingerprint import fingerprint
from zfun.ops._norm import squares_in_bins, total_of_bins, total_on_device
from zfun.ops._ravel import ravel, ravel_into, unravel
from zfun.ops._steps import AdagradRule, AdamRule, LambRule, LionRule, SgdRule, scale_into
from zfun.ops._sums import sum_in_rank_order
from zfun.ops._table import AddressTable
from zfun.ops._tensors import apart, is_abstract, is_capturing, uncompiled, use, wide

__all__ = [
    "AdagradRule",
    "AdamRule",
    "AddressTable",
    "LambRule",
    "LionRule",
    "SgdRule",
    "apart",
    "dequantise",
    "fake_mode",
    "fingerprint",
    "is_abstract",
    "is_capturing",
    "message_bytes",
    "pack_signs",
    "quantise",
    "ravel",
    "ravel_into",
    "scale_into",
    "squares_in_bins",
    "sum_dequantised",
    "sum_in_rank_order",
    "total_of_bins",
    "total_on_device",
    "uncompiled",
    "unpack_signs",
    "unravel",
    "use",
    "wide",
]
