"""``PipelineEngine``: the engine of a ``PipelineModule``, whose steps are those of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from zfun import ops, tree
from zfun.collectives import all_reduce, broadcast, gather_json
from zfun.errors import OptionError
from zfun.interop.deepspeed._engine import DeepSpeedEngine
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed.pipe import PipelineError, PipelineModule
from zfun.interop.engine._reads import live_of
from zfun.parallel import pipeline


class PipelineEngine(DeepSpeedEngine):
    """The engine that ``initialize`` returns for a ``PipelineModule``.

    ``train_batch`` and ``eval_batch`` take the place of calls, ``backward`` and ``step``. A step
    runs its micro-batches by 1F1B, over :func:`zfun.pipeline`, at every stage of ZeRO.

    Attributes:
        grid: the groups of this rank along the axes of the pipeline; ``mpu`` is the same.
        stage_id: the stage of this rank.
        num_stages: of the pipeline.
        micro_batches: of a step.
        agg_train_loss: what the last :meth:`train_batch` returned.
    """

    module: PipelineModule  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, module: PipelineModule, settings: Settings, **options: Any) -> None:
        self.grid = self.mpu = module.mpu()
        count = settings.recipe.num_micro_batches
        interval = settings.values["pipeline.activation_checkpoint_interval"]
        module.activation_checkpoint_interval = interval or module.activation_checkpoint_interval
        if settings.recipe.rows is not None:
            raise OptionError(
                "a pipeline shards over its data ranks; got zero_hpz_partition_size or "
                "mics_shard_size beside a PipelineModule; leave the key out"
            )
        if not settings.values["managed_gradient_accumulation"]:
            raise OptionError(
                "train_batch() runs the micro-batches of a step; got managed_gradient_accumulation "
                "false beside a PipelineModule; leave the key out"
            )
        loss = pipeline(
            [self._stage] * module.num_stages,
            self.grid.get_pipe_parallel_group(),
            num_micro_batches=count,
            leaves=module.stage_leaves(),
        )
        options |= {"values": module.logical(), "loss": loss}
        super().__init__(module, settings, self.grid.get_data_parallel_group(), **options)
        self._loss, self._ranks = loss, module.ranks
        self.global_rank, self.world_size = self._ranks.rank, self._ranks.size
        self.stage_id, self.num_stages = module.stage_id, module.num_stages
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.micro_batches = count
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: Tensor | None = None
        self._shapes = 0
        # train or eval, of which the labels were compared.
        self._compared: set[str] = set()
        # The micro-batches of the call that runs, which the first and the last stage have.
        self._pulled: Iterator[Any] = iter(())

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last layers, and the loss."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """Return the stage of this rank."""
        return self.stage_id

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take micro-batches from a loader, on the first and the last stage."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader: Any = loader
            self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take micro-batches from an iterator, on the first and the last stage."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader = None
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Let a function change each micro-batch."""
        self.batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Let the ranks send the shapes of activations again; every rank must call."""
        self._shapes += 1

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take a step; every rank must call.

        Args:
            data_iter: gives micro-batches ``(input, label)``, of which the first stage uses the
                inputs and the last one the labels; on other stages it is not read. By default that
                of ``training_data``, or of the last call.

        Returns:
            The mean of the losses over micro-batches and data ranks, on every rank.
        """
        if not torch.is_grad_enabled():
            raise OptionError(
                "train_batch() computes gradients; got a call under torch.no_grad(); use "
                "eval_batch()"
            )
        self._check_trained("train_batch")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        info = self._core.whole_step(self._pull(self.micro_batches, "train"))
        # As in DeepSpeed, micro_steps counts calls of step(), which a pipeline does not have.
        self._count(info)
        self.agg_train_loss = info.loss.detach()
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate the module in its eval mode, without gradients; every rank must call.

        Args:
            data_iter: as for :meth:`train_batch`; training goes on with its own.
            return_logits: whether to return the output for the last micro-batch too, which is
                ``None`` before the last stage.
            compute_loss: whether the results are losses; else they are outputs.
            reduce_output: ``"avg"`` for the mean over micro-batches and data ranks; ``None`` for
                the list of the results of this rank's micro-batches.
            bcast_loss: whether every rank gets the mean of the losses, and not the last stage only.
            num_micro_batches: by default those of a step.

        Returns:
            The result; ``None`` on ranks without it.
        """
        if reduce_output not in ("avg", None):
            raise OptionError(
                f"reduce_output is 'avg' or None; got {reduce_output!r}; pass None, and reduce "
                "the list"
            )
        before, self.data_iterator = self.data_iterator, data_iter
        self.module.eval()
        logits: Any = None

        def run(stage: int, x: Any, batch: Any) -> Any:
            nonlocal logits
            result, logits = self._results(x, compute_loss)
            return result

        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        try:
            batches = self._pull(count, "eval")
            with torch.no_grad():
                found: Any = self._loss.forward(run, batches, self.device)
        finally:
            self.data_iterator = before
        is_last = self.is_last_stage()
        if reduce_output == "avg" and is_last:
            total = tree.map(lambda *x: sum(x) / count, *found)
            size = self._group.size
            found = tree.map(lambda x: all_reduce(x, self._group) / size, total)
        if compute_loss and bcast_loss and reduce_output == "avg":
            nothing = torch.zeros((), dtype=torch.float32, device=self.device)
            value = found.float() if is_last else nothing
            pipe = self.grid.get_pipe_parallel_group()
            found = broadcast(value, pipe, self.num_stages - 1, name="loss")
        elif not is_last:
            found = None
        return (found, logits if is_last else None) if return_logits else found

    def _stage(self, params: Any, x: Any, batch: Any) -> Any:
        """Run the layers of this rank with the parameters of a call."""
        live = live_of(self.module)
        assert live is not None
        with live.lending(params, keeps=torch.is_grad_enabled()):
            return self._results(x, True)[0]

    def _results(self, x: Any, compute_loss: bool) -> tuple[Any, Any]:
        """Return the loss, if this rank has it, and the outputs of the layers in any case."""
        to_device = lambda y: y.to(self.device) if isinstance(y, Tensor) else y
        # A loader makes lists of tuples.
        moved = lambda y: tree.map(to_device, tuple(y) if isinstance(y, list) else y)
        label: Any = None
        if self.is_first_stage() or self.is_last_stage():
            batch = next(self._pulled)
            if self.is_first_stage():
                x = moved(batch[0])
            label = moved(batch[1]) if self.is_last_stage() else None
        out, loss_fn = super().forward(x), self.module.loss_fn
        has_loss = compute_loss and self.is_last_stage() and loss_fn is not None
        return (loss_fn(out, label) if has_loss else out), out

    def _pull(self, count: int, phase: str) -> list[Any]:
        """Read micro-batches, and return what the pipeline gets in place of them."""
        pulled: list[Any] = []
        if self.is_first_stage() or self.is_last_stage():
            if self.data_iterator is None:
                raise OptionError(
                    "the first and the last stage of a pipeline read micro-batches; got no "
                    f"iterator on stage {self.stage_id}; pass data_iter=, or training_data= to "
                    "initialize()"
                )
            pulled = [next(self.data_iterator) for _ in range(count)]
            pulled = pulled if self.batch_fn is None else [self.batch_fn(x) for x in pulled]
        if phase not in self._compared:
            self._compare(pulled)
            self._compared.add(phase)
        self._pulled = iter(pulled)
        # Another form of activations has another name.
        name = f"{phase} {self._shapes}"
        return [{"number": torch.tensor(k), "form": name} for k in range(count)]

    def _compare(self, pulled: list[Any]) -> None:
        """Refuse a first and a last stage that read other labels, as of two random orders."""
        leaves = [tree.leaves(batch[1]) if len(batch) > 1 else [] for batch in pulled]
        tensors = [[x for x in labels if isinstance(x, Tensor)] for labels in leaves]
        own = [[str(ops.fingerprint(x)) for x in labels] for labels in tensors]
        sides = gather_json(own, self.grid.get_pipe_parallel_group(), "labels")
        if all(sides[0]) and all(sides[-1]) and sides[0] != sides[-1]:
            raise OptionError(
                "the first and the last stage of a pipeline read the same micro-batches; got other "
                f"labels on stage 0 than on stage {self.num_stages - 1}; give the sampler "
                "engine.grid.get_data_parallel_rank(), and one seed"
            )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the whole weights of all stages; every rank must call."""
        own = super().module_state_dict(exclude_frozen_parameters)
        own = {name: x for name, x in own.items() if isinstance(x, Tensor)}
        pipe = self.grid.get_pipe_parallel_group()
        forms = {name: [list(x.shape), str(x.dtype)[6:]] for name, x in own.items()}
        found: dict[str, Any] = {}
        for stage, side in enumerate(gather_json(forms, pipe, "weights")):
            for name, (shape, dtype) in side.items():
                if name not in found:
                    x = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                    x = own[name].contiguous() if stage == self.stage_id else x
                    found[name] = broadcast(x, pipe, stage, name="weights", part=name)
        return found

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Take the weights of this rank's layers from those of all stages; every rank must call."""
        weights = state_dict.get("module", state_dict)
        own = {name: x for name, x in weights.items() if not self.module.is_elsewhere(name)}
        super().load_module_state_dict(own, strict, custom_load_fn)

    def _refuse(self, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(
            f"a pipeline takes whole steps; got {method}(); call train_batch() or eval_batch()"
        )

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuse another number of micro-batches, for which the schedule is not made."""
        if train_batch_size != self.train_batch_size():
            raise PipelineError(
                "the schedule of a pipeline is for one number of micro-batches; got "
                f"set_train_batch_size({train_batch_size}) for {self.train_batch_size()}; save a "
                "checkpoint, and load it in a run with another gradient_accumulation_steps"
            )


_CALLS = ("forward", "backward", "step", "scale", "generate", "no_sync", "coalesce_grad_reduction")
for _name in _CALLS:
    setattr(PipelineEngine, _name, functools.partialmethod(PipelineEngine._refuse, _name))
