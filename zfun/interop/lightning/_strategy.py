"""The strategy: the hooks of Lightning around engines."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from zfun import checkpoint as zcheckpoint
from zfun.collectives import Group, process_group
from zfun.errors import OptionError
from zfun.interop.ds_config import Recipe
from zfun.interop.lightning import _checkpoint as saved
from zfun.interop.lightning._build import build
from zfun.interop.lightning._checks import check_trainer
from zfun.interop.lightning._module import hollow, restore
from zfun.interop.lightning._optimizers import ConfiguredGroups, Groups, groups_of
from zfun.interop.lightning._options import checked, config_of, given_config, recipe_of
from zfun.interop.lightning._precision import ZfunPrecision
from zfun.interop.lightning._runs import Run

__all__ = ["ZfunStrategy"]


class ZfunStrategy(DDPStrategy):
    """Train a LightningModule whose state zfun shards.

    ``Trainer(strategy="zfun_stage_3")`` makes this strategy, as do ``zfun_stage_1``,
    ``zfun_stage_2`` and each name with ``_offload`` behind it. During ``fit`` the parameters live
    in the state, and the parameters of the module have no values (NaN): read them in
    ``bound()``. After ``fit`` the module has its values again.

    Args:
        accelerator: Lightning's.
        config: a configuration of DeepSpeed, as a dict or the path of a file, in place of
            ``options``. By default the file that the environment variable ``ZFUN_CONFIG_PATH`` or
            ``PL_DEEPSPEED_CONFIG_PATH`` names.
        gather_at_end: whether the module gets whole values on every rank after ``fit``. ``False``
            for a module that is larger than the memory of a host.
        parallel_devices: Lightning's.
        cluster_environment: Lightning's.
        precision_plugin: Lightning's.
        process_group_backend: of ``torch.distributed``, such as ``"gloo"``.
        timeout: of collectives.
        options: the other arguments of Lightning's ``DeepSpeedStrategy``: ``stage`` (2 by
            default), ``offload_optimizer``, ``offload_parameters``, ``nvme_path``,
            ``reduce_bucket_size``, ``loss_scale`` and so on, with the same defaults.

    Attributes:
        recipe: what became of each option, after setup; ``print(strategy.recipe)``.
        last_step: the ``StepInfo`` of the last step: loss, norm of the gradient, learning rate.

    Raises:
        OptionError: an argument that the strategy does not have.
    """

    strategy_name = "zfun"

    def __init__(
        self,
        accelerator: Any = None,
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        gather_at_end: bool = True,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        self._options = checked(options)
        self._config = given_config(config)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._gathers_at_end = gather_at_end
        self._groups: list[Groups] = []
        self._run: Run | None = None
        self._is_hollow = False
        self._last_module: nn.Module | None = None
        self._ranks: Group | None = None
        self.recipe: Recipe | None = None
        self.last_step: Any = None

    # Lightning's plugins.

    @property
    def precision_plugin(self) -> ZfunPrecision:
        """The dtypes."""
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, ZfunPrecision) else ZfunPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        is_own = precision_plugin is None or isinstance(precision_plugin, ZfunPrecision)
        self._precision_plugin = (
            precision_plugin if is_own else ZfunPrecision(precision_plugin.precision)
        )

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's removal of checkpoints."""
        return DDPStrategy.checkpoint_io.fget(self)

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise OptionError(
            "zf.save() writes the checkpoints of ZfunStrategy; got the plugin "
            f"{type(io).__name__}; remove the plugin"
        )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Checkpoints are loaded into the state."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The optimizer's state is a part of the state."""
        return False

    # Before and after a run.

    def setup(self, trainer: Trainer) -> None:
        """Make the state of the module's parameters."""
        module = self._own_module()
        if self._is_hollow and self._last_module is module:
            # An earlier run has left the values in its state.
            self._restore()
        self._is_hollow, self._last_module = False, module
        check_trainer(trainer, module)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        if not _is_on_meta(module):
            self.model_to_device()
            self._take_values_of_rank_0(module)
        self.recipe = recipe_of(
            self._config if self._config is not None else config_of(self._options),
            self._options,
            precision=self.precision_plugin.precision,
            world_size=self.world_size,
            accumulate=trainer.accumulate_grad_batches,
            clip_norm=trainer.gradient_clip_val,
        )
        self._groups = self._make_groups(trainer, module) if is_fit else []
        self.setup_precision_plugin()
        seed = self.broadcast(torch.initial_seed())
        self._run = build(module, self._groups, self.recipe, self._group(), self.root_device, seed)
        self._is_hollow = True
        self.barrier()

    def _make_groups(self, trainer: Trainer, module: LightningModule) -> list[Groups]:
        assert self.recipe is not None
        if self.recipe.optimizer is None:
            if self.recipe.learning_rate is not None:
                raise OptionError(
                    "a schedule of a configuration is for the optimizer of the configuration; got "
                    "a scheduler without an optimizer; write the optimizer too, or return the "
                    "scheduler from configure_optimizers()"
                )
            self.setup_optimizers(trainer)
            return groups_of(self.optimizers, module)
        # As in DeepSpeed, the optimizer of a configuration goes before the module's.
        groups = ConfiguredGroups(self.recipe, module)
        self.optimizers, self.lr_scheduler_configs = [groups.optimizer], list[Any]()
        return [groups]

    def _group(self) -> Group:
        if self._ranks is None:
            self._ranks = process_group()
        return self._ranks

    def _own_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _take_values_of_rank_0(self, module: nn.Module) -> None:
        if self.world_size > 1:
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.detach(), 0)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let ``configure_model`` make modules without values, for ``remote_device="meta"``."""
        is_meta = self._options["remote_device"] == "meta"
        with torch.device("meta") if is_meta else contextlib.nullcontext():
            yield

    def on_train_end(self) -> None:
        """Give the module its values back."""
        self._gather()

    def on_validation_end(self) -> None:
        """Give the module its values back, unless ``fit`` goes on."""
        if self._own_module().trainer.state.fn != TrainerFn.FITTING:
            self._gather()

    def on_test_end(self) -> None:
        """Give the module its values back."""
        self._gather()

    def on_predict_end(self) -> None:
        """Give the module its values back."""
        self._gather()

    def _gather(self) -> None:
        if self._is_hollow and self._gathers_at_end:
            self._restore()

    def _restore(self) -> None:
        for engine in self._running().engines:
            restore(self._own_module(), engine.state_dict())
        self._is_hollow = False

    def teardown(self) -> None:
        """End the run; the state stays for ``Trainer.save_checkpoint``."""
        module = self._own_module()
        if module.trainer.state.status != TrainerStatus.INTERRUPTED:
            # A fit that had no step left has not come to the end of training.
            self._gather()
        if not (self._is_hollow or _is_on_meta(module)):
            super().teardown()
            return
        # Moving the module to the host would give parameters memory that have no values.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Steps.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``training_step`` of the module."""
        return self._running().train("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step`` of the module."""
        return self._running().evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step`` of the module."""
        return self._running().evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step`` of the module."""
        return self._running().evaluate("predict_step", args, kwargs)

    def _running(self) -> Run:
        assert self._run is not None
        return self._run

    def pull(self, loss: Tensor) -> None:
        """Run backward from a loss."""
        self._running().backward(loss)

    def step(self, optimizer: TorchOptimizer) -> None:
        """Step an optimizer with the numbers that its param groups have now."""
        index = self._index(optimizer)
        groups = self._groups[index]
        configured = None if self.recipe is None else self.recipe.max_grad_norm or None
        max_norm = self.precision_plugin.bounds.pop(id(groups.optimizer), configured)
        hyperparams = groups.hyperparams(max_norm)
        self.last_step = self._running().step(index, hyperparams)
        # Schedulers of torch ask whether the optimizer has stepped.
        groups.optimizer._opt_called = True  # pyrefly: ignore[missing-attribute]
        if self.last_step is not None:
            groups.stepped(self.last_step.learning_rate)

    def _index(self, optimizer: TorchOptimizer) -> int:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return next(i for i, x in enumerate(self._groups) if x.optimizer is optimizer)

    @contextlib.contextmanager
    def bound(self) -> Iterator[LightningModule]:
        """Give the module its whole values in a context. All ranks call.

        Returns:
            A context whose value is the module.
        """
        module = self._own_module()
        if not self._is_hollow:
            yield module
            return
        for engine in self._running().engines:
            restore(module, engine.state_dict())
        try:
            yield module
        finally:
            engines = self._running().engines
            owned = {name for engine in engines for name, _ in engine.module.named_parameters()}
            hollow(param for name, param in module.named_parameters() if name in owned)

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing, because :meth:`save_checkpoint` saves the state."""
        return {}

    def optimizer_state(self, optimizer: TorchOptimizer) -> dict[str, Any]:
        """Return the numbers of the param groups; the moments are in the state."""
        return {"state": {}, "param_groups": self._groups[self._index(optimizer)].numbers()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the state and Lightning's part as a directory. All ranks call."""
        if storage_options is not None:
            raise OptionError(
                "zf.save() writes the checkpoints of ZfunStrategy to a path; got storage_options="
                f"{storage_options!r}; leave storage_options out"
            )
        states = [engine.state for engine in self._running().engines]
        zcheckpoint.save(
            str(self.broadcast(filepath)),
            states[0] if len(states) == 1 else {str(i): state for i, state in enumerate(states)},
            step=checkpoint["global_step"],
            keep=1,
            data=saved.packed(
                checkpoint,
                self._own_module(),
                self._running().engines,
                exclude_frozen=self._options["exclude_frozen_parameters"],
            ),
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a directory into the state; a file of plain Lightning is read as it is."""
        path = str(self.broadcast(checkpoint_path))
        if not saved.is_directory(path):
            # Lightning 2.5 does not have the argument.
            given = dict[str, Any]() if weights_only is None else {"weights_only": weights_only}
            return self.checkpoint_io.load_checkpoint(path, **given)
        return saved.load(
            path, self._own_module(), self._running(), self._groups, weights_only=weights_only
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the parameters of a file of plain Lightning into the state."""
        if saved.MARK in checkpoint:
            return
        if self._groups and checkpoint.get("optimizer_states"):
            warnings.warn(
                "a single file has no sharded state of the optimizer, so the optimizer starts "
                "anew; pass the directory that ZfunStrategy has saved to go on",
                stacklevel=2,
            )
        with self.bound() as module:
            for param in module.parameters():
                param.data = param.data.clone()
            module.load_state_dict(dict(checkpoint["state_dict"]), strict=strict)
            values = {
                name: tensor.detach()
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            }
            for engine in self._running().engines:
                saved.restart(engine, values)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing, because the state has been loaded."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the names of the strategy."""
        register = functools.partial(strategy_registry.register, override=True)
        register("zfun", cls, description="zfun, stage 2 or as configured")
        for stage in (1, 2, 3):
            name = f"zfun_stage_{stage}"
            register(name, cls, description=f"zfun, ZeRO stage {stage}", stage=stage)
            offload: dict[str, Any] = {"offload_optimizer": True}
            if stage == 3:
                offload["offload_parameters"] = True
            words = f"zfun, ZeRO stage {stage}, with state in host memory"
            register(f"{name}_offload", cls, description=words, stage=stage, **offload)


def _is_on_meta(module: nn.Module) -> bool:
    return any(param.is_meta for param in module.parameters())
