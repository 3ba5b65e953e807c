"""For CPUs: kernels in plain loops, compiled by Numba when they are first called.

``_compile`` compiles, keeps and calls them; ``_float_bits`` reads and writes half types; ``_simd``
has the four operations that are not plain Numba, and says which kernel needs each.
"""

from zfun.ops.numba._codes import dequantise, pack_signs, quantise, sum_dequantised, unpack_signs
from zfun.ops.numba._compile import seconds_compiled
from zfun.ops.numba._ravel import ravel_into
from zfun.ops.numba._squares import squares_in_bins
from zfun.ops.numba._steps import lamb_apply, lamb_moments, step
from zfun.ops.numba._sums import sum_in_rank_order
