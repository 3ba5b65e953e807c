"""Sources of parameters that make one leaf at a time, for models that no rank can hold whole.

A tree of :class:`Deferred` leaves stands for a tree of tensors: every leaf knows shape and dtype,
and makes the values when asked. :func:`zfun.zero`'s ``init``, :func:`zfun.shard` and
:func:`zfun.replicate` take such a tree, ask for one leaf at a time, keep this rank's part of the
leaf, and drop the rest. Deferred leaves and tensors may stand in one tree.

A :class:`Source` has deferred leaves by name: the tensors of a state dict, a model folder, or a
checkpoint of another library. Each is read when asked for, and pickles are read without running
their code.
"""

from zfun.sources._compare import Comparison, compare
from zfun.sources._dcp import dcp, write_dcp
from zfun.sources._deepspeed import deepspeed
from zfun.sources._safetensors import safetensors
from zfun.sources._source import Placed, Source, TrainingState, joined, place, tensors
from zfun.sources._state_dict import huggingface, state_dict
from zfun.sources._write import Written, write_safetensors
from zfun.sources.deferred import Deferred, initialised

__all__ = [
    "Comparison",
    "Deferred",
    "Placed",
    "Source",
    "TrainingState",
    "Written",
    "compare",
    "dcp",
    "deepspeed",
    "huggingface",
    "initialised",
    "joined",
    "place",
    "safetensors",
    "state_dict",
    "tensors",
    "write_dcp",
    "write_safetensors",
]
