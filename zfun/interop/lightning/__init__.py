"""A strategy of Lightning that shards the training state with zfun.

Importing this module registers the names ``zfun``, ``zfun_stage_1``, ``zfun_stage_2`` and
``zfun_stage_3``, each stage also with ``_offload`` behind it, for ``Trainer(strategy=...)``.

================  ==========================================================================
``_strategy``     the hooks of Lightning
``_options``      the arguments of ``DeepSpeedStrategy`` as options of ``zf.zero``
``_checks``       options of Lightning that cannot hold
``_optimizers``   optimizers of torch as pure ones; param groups as hyperparameters
``_precision``    the dtypes
``_module``       a LightningModule as a function of its parameters
``_runs``         forward, backward and steps
``_build``        the engines of a run
``_checkpoint``   directories of ``zf.save``, and one file of them
================  ==========================================================================
"""

from lightning.pytorch.strategies import StrategyRegistry

from zfun.interop.lightning._checkpoint import collate
from zfun.interop.lightning._precision import ZfunPrecision
from zfun.interop.lightning._strategy import ZfunStrategy

__all__ = ["ZfunPrecision", "ZfunStrategy", "collate"]

ZfunStrategy.register_strategies(StrategyRegistry)
