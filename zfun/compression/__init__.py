"""Compressed communication: codecs, collectives that use codecs, and error feedback."""

from zfun.compression._codecs import CODEC as CODEC
from zfun.compression._codecs import BlockCodec, Codec, Compression, int4, int8
from zfun.compression._codecs import check_repeatable as check_repeatable
from zfun.compression._collectives import gather_bucket, start, start_over, sum_bucket
from zfun.compression._differentiable import all_gather, all_reduce, reduce_scatter
from zfun.compression._feedback import ErrorFeedback, error_feedback
from zfun.compression._signs import answer_signs as answer_signs
from zfun.compression._signs import compressed_all_reduce
from zfun.compression._signs import own_chunk as own_chunk
from zfun.compression._signs import packed_bytes as packed_bytes
from zfun.compression._signs import read_signs as read_signs
from zfun.compression._signs import send_signs as send_signs

__all__ = [
    "BlockCodec",
    "Codec",
    "Compression",
    "ErrorFeedback",
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
