"""For CUDA devices: kernels in Triton, which torch's CUDA wheels bring.

[Note: Triton kernels] They are compiled for sm_80 and sm_90 and run in Triton's interpreter by the
tests, where they give the bits of the readable forms. The parameters of Adam and Adagrad, whose
steps have a root and a quotient, are within two units in the last place and as much of the step.
**They have not been run on a GPU yet.**

One launch does a bucket, on torch's current stream. Products and sums are fused where the other
forms have ``fma``, and nowhere else (``enable_fp_fusion=False``), and quotients and roots are the
rounded ones, so that a number has the same bits on every device; this costs no time, because these
kernels wait for memory. bfloat16 travels as integers and is rounded by hand, to nearest and ties to
even, because the interpreter cuts it off. float64 is left to torch.

``_base`` has the parts that all of them use. ``_codes``, ``_ravel``, ``_squares`` and ``_steps``
have kernels, and below them their launches.
"""

from zfun.ops.triton._base import takes
from zfun.ops.triton._codes import dequantise, pack_signs, quantise, sum_dequantised, unpack_signs
from zfun.ops.triton._ravel import ravel_into
from zfun.ops.triton._squares import squares_in_bins
from zfun.ops.triton._steps import step
