"""The names of DeepSpeed that train, over zfun: ``import zfun.interop.deepspeed as deepspeed``.

A name that is not there raises an error that says what to use. The page "From DeepSpeed" shows a
script before and after.

==================  ===============================================================================
``_initialize``     ``initialize``, ``add_config_arguments``
``_engine``         ``DeepSpeedEngine``: names and counters
``_numbers``        sizes, rates, norms
``_inner``          the engine of zfun, and the values of the module's parameters
``_settings``       the configuration, the optimizer and the schedule of a run
``_rules``          parameter groups as pure optimizers
``_getters``        methods that return a value of the configuration
``_checkpoint``     tags and ``latest``
``_ranks``          process groups, devices
``_absent``         the names that are not there, with remedies
``comm``            ``torch.distributed``
``checkpointing``   recomputation in backward
``accelerator``     the device of this process
``ops``             optimizers
``runtime``         ``zero``, schedules, loaders
``utils``           single parameters, fp32 weights of a checkpoint
==================  ===============================================================================
"""

from zfun.interop.deepspeed import (
    accelerator,
    checkpointing,
    comm,
    moe,
    ops,
    pipe,
    runtime,
    utils,
)
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._engine import DeepSpeedEngine
from zfun.interop.deepspeed._initialize import add_config_arguments, initialize
from zfun.interop.deepspeed._ranks import init_distributed
from zfun.interop.deepspeed.accelerator import get_accelerator
from zfun.interop.deepspeed.runtime import dataloader, lr_schedules, zero
from zfun.interop.deepspeed.utils import log_dist, logger

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "dataloader",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "lr_schedules",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

# The version of DeepSpeed whose names these are, because scripts compare the number.
__version__ = "0.19.8"

__getattr__ = absent("", globals())
