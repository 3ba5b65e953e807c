"""Flat: a tree of tensors as a few flat buffers that know their placement.

Nothing here communicates; ``zfun.reductions`` has the functions that need values of all ranks.
"""

from zfun.flat._flat import FLAT as FLAT
from zfun.flat._flat import Flat, Life, call_site, check_same_layout, consume, flats
from zfun.flat._flat import empty_like as empty_like
from zfun.flat._ravel import change_layout, ravel, unravel
from zfun.flat._ravel import ravel_buckets as ravel_buckets
from zfun.flat._ravel import unravel_buffers as unravel_buffers
from zfun.flat._spans import LeafSpan, leaf_spans
from zfun.flat._spans import local_shards as local_shards
from zfun.flat._spans import own_piece as own_piece
from zfun.flat._spans import own_pieces as own_pieces
from zfun.flat._spans import padding_spans as padding_spans

__all__ = [
    "Flat",
    "LeafSpan",
    "Life",
    "call_site",
    "change_layout",
    "check_same_layout",
    "consume",
    "flats",
    "leaf_spans",
    "ravel",
    "unravel",
]
