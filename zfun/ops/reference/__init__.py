"""Each kernel in plain torch: the form to read first, and the bits that the others must have."""

from zfun.ops.reference._codes import (
    dequantise,
    pack_signs,
    quantise,
    sum_dequantised,
    unpack_signs,
)
from zfun.ops.reference._norm import squares_in_bins
from zfun.ops.reference._ravel import ravel_into, unravel
from zfun.ops.reference._steps import lamb_apply, lamb_moments, scale_into, step
from zfun.ops.reference._sums import sum_in_rank_order
