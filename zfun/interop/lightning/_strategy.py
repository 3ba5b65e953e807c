"""The strategy: the hooks of Lightning around engines."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer

from zfun import checkpoint as zcheckpoint
from zfun.collectives import Group, process_group
from zfun.errors import OptionError
from zfun.interop._configured import ConfiguredOptimizer
from zfun.interop.deepspeed.runtime.lr_schedules import scheduler_of
from zfun.interop.ds_config import Recipe
from zfun.interop.engine import UNBOUNDED, Engine, ParamGroups, torch_numbers, with_group_numbers
from zfun.interop.lightning import _checkpoint as saved
from zfun.interop.lightning import _left, _promised, _runs
from zfun.interop.lightning._options import divided, given_config, recipe_of
from zfun.interop.lightning._plugins import EmaAveraging, ZfunPrecision, precision_of
from zfun.optim import LossScale


class ZfunStrategy(DDPStrategy):
    """Train a LightningModule whose state zfun shards.

    ``Trainer(strategy="zfun_stage_3")`` makes this strategy, as do ``zfun_stage_1``,
    ``zfun_stage_2`` and each name with ``_offload`` behind it. The module is live during ``fit``:
    its parameters are those of the state, and at stage 3 a read outside of a step gathers, on all
    ranks. After ``fit`` the module is a plain one.

    Args:
        accelerator: Lightning's.
        config: a configuration of DeepSpeed, as a dict or the path of a file, in place of
            ``options``. By default the file that the environment variable ``ZFUN_CONFIG_PATH`` or
            ``PL_DEEPSPEED_CONFIG_PATH`` names.
        gather_at_end: whether the module gets whole values on every rank after ``fit``. ``False``
            for a module that is larger than the memory of a host.
        options: the other arguments of Lightning's ``DeepSpeedStrategy``: ``stage`` (2 by
            default), ``offload_optimizer``, ``offload_parameters``, ``nvme_path``,
            ``reduce_bucket_size``, ``loss_scale`` and so on, with the same defaults; also
            Lightning's ``parallel_devices``, ``cluster_environment``, ``precision_plugin``,
            ``process_group_backend`` such as ``"gloo"``, and ``timeout`` of collectives.

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
        **options: Any,
    ) -> None:
        own, self._options = divided(options, "precision_plugin")
        self._config = given_config(config)
        super().__init__(accelerator=accelerator, **own)
        self._gathers_at_end = gather_at_end
        self._groups: list[ParamGroups] = []
        self._run: _runs.AutomaticRun | _runs.ManualRun | None = None
        self._is_live = False
        # Optimizers, and the step() that each had.
        self._own_steps: list[tuple[Any, Any]] = []
        self._given: dict[str, Any] = {}
        # Of a checkpoint: for the state, and those that state_dict() has left out, by name.
        self._values: dict[str, Any] = {}
        self._unnamed: dict[str, Any] = {}
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
            precision_plugin if is_own else ZfunPrecision(precision_of(precision_plugin))
        )

    @DDPStrategy.checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        """Refuse another plugin: Lightning's own removes checkpoints."""
        raise OptionError(
            "zf.save() writes the checkpoints of ZfunStrategy; got the plugin "
            f"{type(io).__name__}; remove the plugin"
        )

    # Before and after a run.

    def setup(self, trainer: Trainer) -> None:
        """Make the module live."""
        # An earlier run may have left the values in its state.
        self._release()
        module = self._own_module()
        _runs.check_trainer(trainer)
        _promised.fulfil(module)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        if not _promised.is_on_meta(module):
            self.model_to_device()
            _runs.take_values_of_rank_0(module, self.world_size)
        by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        self.recipe = recipe_of(
            self._config,
            self._options,
            precision=self.precision_plugin.precision,
            world_size=self.world_size,
            accumulate=trainer.accumulate_grad_batches,
            clip_norm=None if by_value else trainer.gradient_clip_val,
        )
        self._groups = self._make_groups(trainer, module) if is_fit else []
        decays = [x.decay for x in getattr(trainer, "callbacks", []) if isinstance(x, EmaAveraging)]
        for group in self._groups if decays else ():
            group.ema_decay = decays[0]
        self.setup_precision_plugin()
        self.precision_plugin.clip = self.clip
        self.precision_plugin.device = device = self.root_device
        seed = self.broadcast(torch.initial_seed())
        values = _promised.values_of(module, device, seed) | self._values
        self._ranks = self._ranks or process_group()
        self._run = _runs.build(module, self._groups, self.recipe, self._ranks, values)
        for one in self._groups:
            self._own_steps.append((one.optimizer, vars(one.optimizer).get("step")))
            one.optimizer.step = _runs.step_of(self, one)
        self._values = {}
        self._is_live = True
        self.barrier()

    def _make_groups(self, trainer: Trainer, module: LightningModule) -> list[ParamGroups]:
        recipe = self.recipe
        assert recipe is not None
        if recipe.rule is not None:
            # As in DeepSpeed, the optimizer of a configuration goes before the module's.
            trained = [param for param in module.parameters() if param.requires_grad]
            optimizer = ConfiguredOptimizer(trained, recipe.rule)
            self.optimizers, self.lr_scheduler_configs = [optimizer], list[Any]()
            if recipe.scheduler is not None:
                schedule = scheduler_of(recipe.scheduler, optimizer)
                self.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval="step")]
        elif recipe.scheduler is not None:
            raise OptionError(
                "a schedule of a configuration is for the optimizer of the configuration; got a "
                "scheduler without an optimizer; write the optimizer too, or return the scheduler "
                "from configure_optimizers()"
            )
        else:
            self.setup_optimizers(trainer)
        return _runs.groups_of(self.optimizers, module)

    def _own_module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let ``configure_model`` make modules without values, for ``remote_device="meta"``."""
        is_meta = self._options["remote_device"] == "meta"
        with _promised.promising() if is_meta else contextlib.nullcontext():
            yield

    def _release(self) -> None:
        """Let the module be a plain one. All ranks call."""
        was_live, self._is_live = self._is_live, False
        if was_live:
            self._running().close()
        for optimizer, own in self._own_steps:
            del optimizer.step
            if own is not None:
                optimizer.step = own
        self._own_steps.clear()

    def teardown(self) -> None:
        """End the run; the state stays for ``Trainer.save_checkpoint``."""
        module = self._own_module()
        is_whole = module.trainer.state.status != TrainerStatus.INTERRUPTED
        if is_whole and self._gathers_at_end:
            self._release()
        if not (self._is_live or _promised.is_on_meta(module)):
            super().teardown()
            return
        # Moving the module to the host would gather.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Steps.

    def _hook(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.forward_context():
            return self._running().hook(name, *args, **kwargs)

    training_step = functools.partialmethod(_hook, "training_step")
    validation_step = functools.partialmethod(_hook, "validation_step")
    test_step = functools.partialmethod(_hook, "test_step")
    predict_step = functools.partialmethod(_hook, "predict_step")

    def _running(self) -> _runs.AutomaticRun | _runs.ManualRun:
        assert self._run is not None
        return self._run

    def pull(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss."""
        self._running().backward(loss, *args, **kwargs)

    def step(self, optimizer: TorchOptimizer) -> None:
        """Step an optimizer with the numbers that its param groups have now."""
        index, run = self._index(optimizer), self._running()
        # That of a configuration; clip_gradients() of Lightning has clipped before.
        is_own = self._config is None or self._own_module().trainer.gradient_clip_val is not None
        configured = None if is_own or self.recipe is None else self.recipe.max_grad_norm
        run.engines[index].clip_norm = configured or UNBOUNDED
        self.last_step = run.step(index)

    def clip(self, optimizer: TorchOptimizer, bound: float, *, by_value: bool) -> None:
        """Clip the gradients of an optimizer, by their norm or each element."""
        engine: Any = self._running().engines[self._index(optimizer)]
        if by_value:
            engine.clip_value(bound)
        else:
            engine.clip(bound)

    def unscale(self, optimizer: TorchOptimizer) -> None:
        """Take the loss scale out of the gradients of an optimizer, before hooks read them."""
        engine: Any = self._running().engines[self._index(optimizer)]
        if engine.loss_scale != 1.0:
            engine.unscale()

    def _index(self, optimizer: TorchOptimizer) -> int:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return next(i for i, x in enumerate(self._groups) if x.optimizer is optimizer)

    @contextlib.contextmanager
    def bound(self) -> Iterator[LightningModule]:
        """Give the module whole plain parameters in a context. All ranks call.

        Returns:
            A context whose value is the module.
        """
        with contextlib.ExitStack() as stack:
            for engine in self._running().engines if self._is_live else ():
                stack.enter_context(engine.bound())
            yield self._own_module()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[LightningModule]:
        """Give the module the average of its parameters in a context. All ranks call.

        Returns:
            A context whose value is the module.
        """
        with contextlib.ExitStack() as stack:
            for engine in self._running().engines if self._is_live else ():
                stack.enter_context(engine.averaged())
            yield self._own_module()

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the live parameters by name, for hooks that choose what is saved."""
        self._given = saved.given_of(
            self._own_module(), exclude_frozen=self._options["exclude_frozen_parameters"]
        )
        return dict(self._given)

    def optimizer_state(self, optimizer: TorchOptimizer) -> dict[str, Any]:
        """Return the numbers of the optimizer; the moments are in the state."""
        index = self._index(optimizer)
        groups, state = self._groups[index], self._running().engines[index].state
        return {
            "state": {},
            "param_groups": with_group_numbers(groups.named(), state),
            "numbers": torch_numbers(state),
            "trained": sorted(groups.labels),
        }

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the state and Lightning's part as a directory. All ranks call.

        Where hooks have changed ``checkpoint["state_dict"]``, what they left is written as one file
        of plain Lightning.
        """
        if storage_options is not None:
            raise OptionError(
                "zf.save() writes the checkpoints of ZfunStrategy to a path; got storage_options="
                f"{storage_options!r}; leave storage_options out"
            )
        engines, kept = self._running().engines, checkpoint["state_dict"]
        if "optimizer_states" in checkpoint and self._scale_changes():
            saved.note_scale(checkpoint, engines[0])
        path = str(self.broadcast(filepath))
        if kept.keys() != self._given.keys() or any(
            kept[key] is not value for key, value in self._given.items()
        ):
            whole = saved.plain(checkpoint, engines)
            if self.is_global_zero:
                with saved.set_aside(path, is_old=saved.is_checkpoint(path)):
                    self.checkpoint_io.save_checkpoint(whole, path)
            self.barrier()
            return
        data = saved.packed(checkpoint, self._own_module(), engines)
        with saved.set_aside(path, is_old=self.is_global_zero and Path(path).is_file()):
            self.barrier()
            zcheckpoint.save(
                path,
                saved.joined([engine.state for engine in engines]),
                step=checkpoint["global_step"],
                keep=1,
                data=data,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Load a directory into the state; a file of plain Lightning is read as it is."""
        path = str(self.broadcast(checkpoint_path))
        if not Path(path).is_dir():
            # Lightning 2.5 does not have the argument.
            given = dict[str, Any]() if weights_only is None else {"weights_only": weights_only}
            return self.checkpoint_io.load_checkpoint(path, **given)
        directory = saved.opened(path, weights_only=weights_only)
        named = {*directory.names.values()}
        self._unnamed = {name: x for name, x in directory.leaves.items() if name not in named}
        return {**directory.shown(), saved.MARK: path}

    def _live_engines(self) -> Sequence[Engine]:
        """Return the engines, if the module is live."""
        is_live = self._is_live and self._running().module is self._own_module()
        return self._running().engines if is_live else ()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the values that hooks have left, of a directory or of a file of plain Lightning."""
        module, engines, values = self._own_module(), self._live_engines(), checkpoint["state_dict"]
        more, device = self._unnamed, self.root_device
        is_sharded = saved.MARK in checkpoint and not (engines or _left.has_load_hooks(module))
        if is_sharded or _promised.is_on_meta(module):
            self._values = _left.take(module, values, more, device, strict=strict)
        else:
            if more and not engines:
                _left.take(module, {}, more, device, strict=False)
            _runs.load_values(module, engines, values, more, strict=strict)
        self._unnamed = {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states that hooks have left, of a directory or of a file of plain Lightning."""
        engines, given = self._running().engines, checkpoint["optimizer_states"]
        if saved.MARK in checkpoint:
            assert self._ranks is not None
            is_own, is_changed = _left.plan(given, self._groups, self._ranks)
            if is_own:
                saved.load_states_of(checkpoint, engines, self._groups)
            given = _left.in_torch(given) if is_changed else ()
        for engine, one in zip(engines, given, strict=False):
            engine.load_optimizer_state(one)
        if self._scale_changes():
            saved.load_scale(checkpoint, engines[0])

    def _scale_changes(self) -> bool:
        assert self.recipe is not None
        return isinstance(self.recipe.precision.loss_scale, LossScale)

    register_strategies = classmethod(_runs.register_names)
