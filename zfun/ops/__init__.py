"""Kernels: tensors and integers only.

What a kernel computes stands in plain torch, which is what to read first; then the same again, compiled, for CPUs (``*_cpu``) and for CUDA
devices (``_triton``), which computes the same bits. See [Note: twins].

=========================  ===============================  =================  ============
what                       in plain torch                   for CPUs           in _triton
=========================  ===============================  =================  ============
leaves, and one buffer     ``_ravel``                       ``_ravel_cpu``     ``_ravel``
the norm of a buffer       ``_norm``                        ``_squares_cpu``   ``_squares``
sums over ranks            ``_sums``                        ``_sums_cpu``
steps of optimizers        ``_optimizers`` (``_rounding``)  ``_steps_cpu``     ``_steps``
signs, and few bits        ``_signs``, ``_blocks``          ``_codes_cpu``     ``_codes``
=========================  ===============================  =================  ============

``_jit`` says when compiled code may run, ``_twins`` which; ``_steps`` takes an optimizer's tensors there, and ``_table`` the leaves of a
bucket.

What is compiled for CPUs is Python that Numba reads, in loops over vectors: ``_lanes`` begins with an example. It is made of
``_lanes_type`` (what a vector is), ``_numbers`` and ``_bits`` (operations that Numba has no name for) and, at the bottom, ``_emit`` (LLVM's
instructions).
"""

from zfun.ops._blocks import dequantise, message_bytes, quantise, sum_dequantised
from zfun.ops._dispatch import is_abstract, use, wide
from zfun.ops._fake import fake_mode
from zfun.ops._fingerprint import fingerprint
from zfun.ops._norm import squares_in_bins, total_of_bins
from zfun.ops._optimizers import adagrad_step, adam_step, lamb_step, lion_step, scale_into, sgd_step
from zfun.ops._ravel import Measures, ravel, ravel_into, unravel, unravel_from
from zfun.ops._signs import pack_signs, unpack_signs
from zfun.ops._sums import sum_in_rank_order
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
    "sum_dequantised",
    "sum_in_rank_order",
    "total_of_bins",
    "unpack_signs",
    "unravel",
    "unravel_from",
    "use",
    "wide",
]
