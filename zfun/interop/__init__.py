"""Bridges from other libraries. Nothing of this folder is imported by ``import zfun``.

================  =================================================================
``ds_config``     a configuration of DeepSpeed becomes the options of ``zf.zero``
``deepspeed``     the names of DeepSpeed that train; import this one by name
``engine``        a module with a training state, for imperative loops
``transformers``  ``transformers.Trainer`` over ``zf.zero``; import this one by name
``accelerate``    an ``Accelerator`` over ``zf.zero``; import this one by name
``lightning``     strategies for Lightning, which needs the extra ``lightning``
``dtensor``       DTensors become leaves of a state, and a state becomes DTensors
``loggers``       the numbers of a step go to CSV, TensorBoard and Weights & Biases
``_named``        values of a state by the names of a module
``_configured``   parameter groups of torch and of configurations, as rules of ``zf.optim``
================  =================================================================
"""

from zfun.interop.ds_config import (
    AutoValues,
    Recipe,
    batch_of,
    from_ds_config,
    parse_auto_values,
    solve_batch,
)
from zfun.interop.engine import Engine

__all__ = [
    "AutoValues",
    "Engine",
    "Recipe",
    "batch_of",
    "from_ds_config",
    "parse_auto_values",
    "solve_batch",
]
