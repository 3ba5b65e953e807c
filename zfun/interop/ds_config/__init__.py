"""Configurations of DeepSpeed: a table of all keys, and the options that they make.

=================  ===============================================================================
``table``          the table: the default of each key, and the option that a key becomes
``_read``          a dict, a file with comments, or base64
``_auto``          the values of a run, which fill ``"auto"``
``_values``        the pass: the value of every key, and the mistakes of single keys
``_rules``         the mistakes of keys that do not go together
``_build``         the options of ``zf.zero``
``_optimizers``    the optimizer and the schedule, for all leaves or for a parameter group
``_batch``         batch sizes, elastic ones too
``_mistakes``      the error that lists all mistakes
``_parts``         the parts of a recipe, in order
``_recipe``        the record of all options
``_explain``       the account of what became of each key
=================  ===============================================================================
"""

from zfun.interop.ds_config._auto import AutoValues, parse_auto_values
from zfun.interop.ds_config._batch import Batch, ElasticBatch, batch_of, solve_batch
from zfun.interop.ds_config._build import StoreChoice
from zfun.interop.ds_config._explain import Entry
from zfun.interop.ds_config._mistakes import Mistake
from zfun.interop.ds_config._optimizers import Rule, momentum_for, rule_for, schedule_for
from zfun.interop.ds_config._read import is_config
from zfun.interop.ds_config._recipe import Recipe, from_ds_config
from zfun.interop.ds_config.table import KEYS as KEYS
from zfun.interop.ds_config.table import kind_of
from zfun.interop.ds_config.table._keys import Fill, Key

__all__ = [
    "KEYS",
    "AutoValues",
    "Batch",
    "ElasticBatch",
    "Entry",
    "Fill",
    "Key",
    "Mistake",
    "Recipe",
    "Rule",
    "StoreChoice",
    "batch_of",
    "from_ds_config",
    "is_config",
    "kind_of",
    "momentum_for",
    "parse_auto_values",
    "rule_for",
    "schedule_for",
    "solve_batch",
]
