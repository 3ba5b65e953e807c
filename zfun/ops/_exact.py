"""Constants of the exact sum of squares, which every kind of kernel shares."""

from __future__ import annotations

# The squares of a unit of so many elements are added in float64 to eight sums. Leaves begin, and
# shards end, at multiples of a unit (zfun.layout.ALIGNMENT), so units stay whole in every layout.
UNIT = 32
SUMS = 8

# A long integer of so many limbs of 32 bits, the lowest bit of which stands for 2**LOWEST: the
# places of float64, and room above.
LIMBS = 70
LOWEST = -1100 - 53
