"""The laws of zfun for your own property tests (needs hypothesis)."""

from zfun.testing._compositions import Composition, Run, all_compositions, train
from zfun.testing._invariants import (
    assert_same_bits,
    check_compositions,
    check_padding,
    check_redistribution,
    check_round_trip,
    same_bits,
)
from zfun.testing._strategies import bucket_sizes, compositions, tensors, trees

__all__ = [
    "Composition",
    "Run",
    "all_compositions",
    "assert_same_bits",
    "bucket_sizes",
    "check_compositions",
    "check_padding",
    "check_redistribution",
    "check_round_trip",
    "compositions",
    "same_bits",
    "tensors",
    "train",
    "trees",
]
