"""Compressed communication: what is sent in few bits, and what that does to the numbers."""

from zfun.wire._collectives import all_gather, all_reduce, reduce_scatter, start, start_over
from zfun.wire._feedback import ErrorFeedback, error_feedback
from zfun.wire._formats import BlockCodec, Compression, Wire, int4, int8
from zfun.wire._formats import check_wire as check_wire
from zfun.wire._signs import answer_signs as answer_signs
from zfun.wire._signs import compressed_all_reduce
from zfun.wire._signs import own_chunk as own_chunk
from zfun.wire._signs import packed_bytes as packed_bytes
from zfun.wire._signs import read_signs as read_signs
from zfun.wire._signs import send_signs as send_signs

__all__ = [
    "BlockCodec",
    "Compression",
    "ErrorFeedback",
    "Wire",
    "all_gather",
    "all_reduce",
    "compressed_all_reduce",
    "error_feedback",
    "int4",
    "int8",
    "reduce_scatter",
    "start",
    "start_over",
]
