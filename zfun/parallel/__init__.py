"""Parallelism over axes beside data: leaves cut by meaning, and losses that know their axes."""

from zfun.parallel import schedules
from zfun.parallel._cuts import Cut, Held, LeafRule, ModelAxis, ParallelLoss, model_axes
from zfun.parallel._pipeline import Pipeline, pipeline

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
