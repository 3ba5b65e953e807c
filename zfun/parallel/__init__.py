"""Parallelism over axes beside data: leaves cut by meaning, and losses that know their axes."""

from zfun.parallel._cuts import LeafRule, ModelAxis, ParallelLoss, model_axes
from zfun.parallel._cuts import beside_model_axes as beside_model_axes
from zfun.parallel._local import LocalTree as LocalTree
from zfun.parallel._tensor import tensor_parallel
from zfun.parallel._tensor_styles import StylePlan, TensorStyle
from zfun.parallel._tensor_vocabulary import vocab_cross_entropy
from zfun.placement import Cut, Held

__all__ = [
    "Cut",
    "Held",
    "LeafRule",
    "ModelAxis",
    "ParallelLoss",
    "StylePlan",
    "TensorStyle",
    "model_axes",
    "tensor_parallel",
    "vocab_cross_entropy",
]
