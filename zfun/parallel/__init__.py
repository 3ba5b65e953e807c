"""Parallelism over axes beside data: leaves cut by meaning, and losses that know their axes."""

from zfun.parallel import schedules
from zfun.parallel._cuts import LeafRule, ModelAxis, ParallelLoss, model_axes
from zfun.parallel._cuts import beside_model_axes as beside_model_axes
from zfun.parallel._local import LocalTree as LocalTree
from zfun.parallel._pipeline import Pipeline, pipeline
from zfun.placement import Cut, Held

__all__ = [
    "Cut",
    "Held",
    "LeafRule",
    "ModelAxis",
    "ParallelLoss",
    "Pipeline",
    "model_axes",
    "pipeline",
    "schedules",
]
