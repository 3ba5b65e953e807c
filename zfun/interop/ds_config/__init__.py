"""Configurations of DeepSpeed: a table of all keys, and the options that they make.

=================  ===============================================================================
``table``          the table: the default of each key, and the option that a key becomes
``_read``          a dict, a file or base64; the values of a run, which fill ``"auto"``
``_values``        the pass: the value of every key, and the mistakes of single keys
``_rules``         the mistakes of keys that do not go together
``_optimizers``    the optimizer and the schedule, for all leaves or for a parameter group
``_batch``         batch sizes, elastic ones too
``_mistakes``      the error that lists all mistakes
``_parts``         the options of ``zf.zero``, part by part
``_recipe``        the record of all options
``_explain``       the account of what became of each key
=================  ===============================================================================
"""

from zfun.interop.ds_config._batch import Batch, ElasticBatch, batch_of, solve_batch
from zfun.interop.ds_config._explain import Entry
from zfun.interop.ds_config._mistakes import Mistake
from zfun.interop.ds_config._optimizers import Rule, momentum_for, rule_for, schedule_for
from zfun.interop.ds_config._parts import StoreChoice
from zfun.interop.ds_config._read import AutoValues, is_config, parse_auto_values
from zfun.interop.ds_config._recipe import Recipe, from_ds_config
from zfun.interop.ds_config.table import KEYS, kind_of
from zfun.interop.ds_config.table._keys import Fill, Key
