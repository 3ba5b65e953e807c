"""The names of DeepSpeed that train, over zfun.

A script for DeepSpeed runs unmodified with ``python -m zfun.interop.deepspeed train.py``
(:mod:`~zfun.interop.deepspeed.launcher.runner`), or with :func:`install` as its first line, or
after one changed import: ``import zfun.interop.deepspeed as deepspeed``. A name that is not there
imports as a placeholder, which says what to use. The page "From DeepSpeed" shows a script.

===================  ==============================================================================
``_finder``          where ``import deepspeed`` looks; :func:`install`
``_absent``          the names that are not there, with remedies; ``_placeholders`` for them
``launcher``         the command line
``_initialize``      ``initialize``, ``add_config_arguments``
``_engine``          ``DeepSpeedEngine``: names, counters, and methods between steps
``_pipeline``        ``PipelineEngine``: steps of a ``PipelineModule``
``_answers``         methods that return a size, a number or a value of the configuration
``_core``            the engine of zfun, and the optimizer that ``initialize`` returns
``_settings``        the configuration, the optimizer and the schedule of a run
``_checkpoint``      weights, tags and ``latest``
``_ranks``           process groups, devices
``accelerator``      the device of this process
``comm``             ``torch.distributed``
``ops``              optimizers
``pipe``             ``PipelineModule``: layers on stages, topologies
``runtime``          ``zero``, ``config``, ``checkpointing``, schedules, loaders
``utils``            logs, groups, single parameters, fp32 weights of a checkpoint
===================  ==============================================================================
"""

from zfun.interop.deepspeed import accelerator, comm, launcher, ops, pipe, runtime, utils
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._engine import DeepSpeedEngine
from zfun.interop.deepspeed._finder import VERSION, add_finder, install
from zfun.interop.deepspeed._initialize import add_config_arguments, initialize
from zfun.interop.deepspeed._pipeline import PipelineEngine
from zfun.interop.deepspeed._ranks import init_distributed
from zfun.interop.deepspeed.accelerator import get_accelerator
from zfun.interop.deepspeed.pipe import PipelineModule
from zfun.interop.deepspeed.runtime import (
    DeepSpeedDataLoader,
    checkpointing,
    config,
    lr_schedules,
    zero,
)
from zfun.interop.deepspeed.runtime._constants import constants_of
from zfun.interop.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from zfun.interop.deepspeed.utils import OnDevice, log_dist, logger

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "config",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "install",
    "launcher",
    "log_dist",
    "logger",
    "lr_schedules",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

__version__ = version = VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
__git_hash__ = __git_branch__ = git_hash = git_branch = "zfun"
dist = comm
HAS_TRITON = False
globals().update(constants_of("constants", "runtime.constants", "runtime.config"))

# Modules of DeepSpeed that are no files of their own are found from now on.
add_finder()

__getattr__ = absent("", globals())
