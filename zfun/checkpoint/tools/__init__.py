"""Tools that read and write checkpoints without a group, one leaf at a time."""

from zfun.checkpoint.tools._convert import convert
from zfun.checkpoint.tools._inspect import Problem, Verified, inspect, verify
from zfun.checkpoint.tools._open import export, leaves, training_state
from zfun.checkpoint.tools._prune import Pruned, prune

__all__ = [
    "Problem",
    "Pruned",
    "Verified",
    "convert",
    "export",
    "inspect",
    "leaves",
    "prune",
    "training_state",
    "verify",
]
