"""Parallelism over axes beside data: leaves cut by meaning, and losses that know their axes."""

from zfun.parallel import schedules
from zfun.parallel._cuts import LeafRule, ModelAxis, ParallelLoss, model_axes
from zfun.parallel._cuts import beside_model_axes as beside_model_axes
from zfun.parallel._cuts import knowing as knowing
from zfun.parallel._experts import check_experts as check_experts
from zfun.parallel._experts import dispatch, expert_parallel
from zfun.parallel._local import LocalTree as LocalTree
from zfun.parallel._pipeline import Pipeline, pipeline
from zfun.parallel._pipeline_run import StageFunction as StageFunction
from zfun.parallel._sequence import sequence_batch, sequence_piece, token_mean
from zfun.parallel._sequence_ring import ring_attention
from zfun.parallel._sequence_ulysses import check_heads as check_heads
from zfun.parallel._sequence_ulysses import ulysses
from zfun.parallel._tensor import tensor_parallel, vocab_cross_entropy
from zfun.parallel._tensor_styles import StylePlan, TensorStyle
from zfun.parallel._tiled import tiled
from zfun.placement import Cut, Held

__all__ = [
    "Cut",
    "Held",
    "LeafRule",
    "ModelAxis",
    "ParallelLoss",
    "Pipeline",
    "StylePlan",
    "TensorStyle",
    "dispatch",
    "expert_parallel",
    "model_axes",
    "pipeline",
    "ring_attention",
    "schedules",
    "sequence_batch",
    "sequence_piece",
    "tensor_parallel",
    "tiled",
    "token_mean",
    "ulysses",
    "vocab_cross_entropy",
]
