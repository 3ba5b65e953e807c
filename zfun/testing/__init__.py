"""The laws of zfun as assertions and strategies, for tests of your own (needs hypothesis)."""

from zfun.testing._compositions import Composition, all_compositions
from zfun.testing._costs import assert_adjoint, assert_memory, assert_traffic
from zfun.testing._invariant import assert_invariant
from zfun.testing._laws import (
    assert_padding,
    assert_redistribution,
    assert_round_trip,
    assert_same_bits,
    assert_same_runs,
    same_bits,
)
from zfun.testing._strategies import (
    bucket_sizes,
    compositions,
    group_sizes,
    layouts,
    micro_batch_splits,
    placements,
    schedules,
    tensors,
    trees,
)
from zfun.testing._train import Run, train

__all__ = [
    "Composition",
    "Run",
    "all_compositions",
    "assert_adjoint",
    "assert_invariant",
    "assert_memory",
    "assert_padding",
    "assert_redistribution",
    "assert_round_trip",
    "assert_same_bits",
    "assert_same_runs",
    "assert_traffic",
    "bucket_sizes",
    "compositions",
    "group_sizes",
    "layouts",
    "micro_batch_splits",
    "placements",
    "same_bits",
    "schedules",
    "tensors",
    "train",
    "trees",
]
