"""Strategies of Lightning that shard the training state with zfun.

Importing this module registers the names ``zfun``, ``zfun_stage_1``, ``zfun_stage_2`` and
``zfun_stage_3``, each stage also with ``_offload`` behind it, for ``Trainer(strategy=...)`` and
``Fabric(strategy=...)``, and lets ``LightningModule.load_from_checkpoint`` read the directories
that the strategy of the Trainer saves.

===============  ==========================================================================
``_strategy``    the hooks of the Trainer
``_fabric``      the strategy for Fabric
``_options``     the arguments of ``DeepSpeedStrategy`` as options of ``zf.zero``
``_plugins``     the dtypes, and an average of the parameters
``_runs``        forward, backward and steps, on engines
``_checkpoint``  directories of ``zf.save``, and one file of them
===============  ==========================================================================
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zfun.interop.lightning._checkpoint import collate, read_directories
from zfun.interop.lightning._fabric import ZfunFabricStrategy
from zfun.interop.lightning._plugins import EmaAveraging, ZfunPrecision
from zfun.interop.lightning._runs import register_elsewhere
from zfun.interop.lightning._strategy import ZfunStrategy

__all__ = ["EmaAveraging", "ZfunFabricStrategy", "ZfunPrecision", "ZfunStrategy", "collate"]

ZfunStrategy.register_strategies(StrategyRegistry)
ZfunFabricStrategy.register_strategies(STRATEGY_REGISTRY)
register_elsewhere(ZfunStrategy, "pytorch_lightning", "StrategyRegistry")
register_elsewhere(ZfunFabricStrategy, "lightning_fabric", "STRATEGY_REGISTRY")
read_directories()
