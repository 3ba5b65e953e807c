"""A module whose parameters are a state of ``zf.zero``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zfun import checkpoint, optim, stores, tree
from zfun.collectives import Group
from zfun.evaluation import bound
from zfun.flat import unravel
from zfun.interop._named import state_dict_of
from zfun.interop.transformers._optimizers import ParamGroups
from zfun.modules import functional
from zfun.optim import Optimizer
from zfun.recipes import StepInfo, Zero, ZeroState, zero
from zfun.transforms import MicroBatches, unshard

__all__ = ["Run"]


class Run:
    """The state of a module between the steps of an imperative loop.

    At stages 0 to 2 the module's own parameters are views of the state. At stage 3 the module's
    own parameters are on the ``meta`` device, so that no rank keeps them whole, and code that reads
    them raises an error.

    Args:
        module: the module. All ranks start with the values of rank 0.
        optimizer: of torch, with the numbers of each step in its parameter groups.
        loss: ``loss(module, batch) -> scalar``, where ``module`` is a copy with the parameters of
            the state; the sum over the micro-batches is minimised, and the mean over the ranks.
        group: the ranks.
        options: the options of :func:`zfun.zero`, ``stage`` among them.
        clip_norm: the bound of the gradient's norm; 0 for none.

    Attributes:
        state: the state of :func:`zfun.zero`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        loss: Callable[[Any, Any], Tensor],
        group: Group,
        options: Mapping[str, Any],
        clip_norm: float,
    ) -> None:
        self.module = module
        self._group = group
        self._apply = functional(module)
        self._loss = loss
        self._groups = ParamGroups(optimizer, dict(module.named_parameters()))
        self._running = _running_statistics(module)
        self._options = dict(options)
        self._rule = _clipped(self._groups.pure(), clip_norm)
        self._zeros: dict[int, Zero[Any, Any]] = {}
        values = {
            **self._apply.params,
            **{name: self._apply.buffers[name] for name in self._running},
        }
        self.state: ZeroState = self._zero(1).init(values, init="broadcast")
        if self._is_hollow():
            self._replace({n: x.to("meta") for n, x in self._apply.params.items()})
        self._show()

    def step(self, batches: Sequence[Any]) -> StepInfo[Any]:
        """Take one step on the micro-batches of this rank."""
        self.state = self.state._replace(opt_state=self._groups.set_in(self.state.opt_state))
        step = self._zero(len(batches)).step
        self.state, info = step(self.state, MicroBatches(batches))
        self._show()
        return info

    def bound(self) -> AbstractContextManager[Any]:
        """Return a context with a copy of the module that gathers parameters where used."""
        return bound(self._apply, self.state, self._group)

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """Let a copy of the module hold all parameters, as a context."""
        yield self._apply.bind(self._zero(1).params(self.state))

    def state_dict(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return the module's state_dict with the values of the state. All ranks call.

        Args:
            keep: whether this rank wants the values; another rank helps to gather, and gets none.
        """
        values = dict(self._values(keep))
        return state_dict_of(self.module, values) if keep else {}

    def gather(self) -> None:
        """Give the module's own parameters the values of the state, whole on every rank."""
        values = dict(self._values(True))
        self._replace({name: values[name] for name in self._apply.params})

    def save(self, path: Path, step: int) -> None:
        """Save the state. All ranks call."""
        checkpoint.save(path, self.state, step=step, group=self._group, keep=1)

    def load(self, path: Path) -> None:
        """Load a state that was saved at any stage by any number of ranks. All ranks call."""
        self.state = checkpoint.load(path, self.state, group=self._group, rng=False).state
        self._show()

    def _zero(self, count: int) -> Zero[Any, Any]:
        """Return the functions of a step of ``count`` micro-batches."""
        if count not in self._zeros:

            def loss(params: Mapping[str, Tensor], batch: Any) -> Tensor:
                # The mean over the micro-batches is the sum of the losses.
                return self._loss(self._apply.bind(params), batch) * count

            # Stage 2 sums each micro-batch over the ranks, as stage 3 does, and stage 1 their sum
            # once: another order of additions. The states of stages 1 and 2 are alike.
            stage = 2 if self._options["stage"] == 1 and count > 1 else self._options["stage"]
            options: dict[str, Any] = {**self._options, "stage": stage}
            labels, running = self._groups.labels, self._running
            frozen = set(self._apply.params) - set(labels)
            self._zeros[count] = zero(
                loss_fn=loss,
                optimizer=self._rule,
                group=self._group,
                num_micro_batches=count,
                trainable=(lambda path, leaf: path in labels) if frozen else None,
                buffers=(lambda path, leaf: "rank 0" if path in running else None)
                if running
                else None,
                **options,
            )
        return self._zeros[count]

    def _is_hollow(self) -> bool:
        return self._options["stage"] == 3

    def _show(self) -> None:
        """Let the module's own tensors be the values of the state."""
        parts = [self.state.buffers]
        if not self._is_hollow():
            parts += [self.state.params, self.state.frozen]
        whole = [unravel(stores.resident(x)) for x in parts if x is not None]
        values = tree.combine(*whole) if whole else {}
        for name, leaf in (*self.module.named_parameters(), *self.module.named_buffers()):
            if values.get(name) is not None:
                leaf.data = values[name]

    def _replace(self, values: Mapping[str, Tensor]) -> None:
        """Replace the module's parameters, in the groups of the optimizer too."""
        new = {
            id(p): nn.Parameter(values[name], requires_grad=p.requires_grad)
            for name, p in self.module.named_parameters()
        }
        for module in self.module.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    module._parameters[key] = new[id(p)]
        for group in self._groups.optimizer.param_groups:
            group["params"] = [new.get(id(p), p) for p in group["params"]]

    def _values(self, keep: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield whole leaves by name; one bucket at a time is gathered."""
        parts = (self.state.params, self.state.frozen, self.state.buffers)
        for flat in (part for part in parts if part is not None):
            for bucket in flat.layout.buckets:
                names = {flat.layout.leaves[leaf].path for leaf in bucket.leaves}
                whole = unshard(flat, lambda path, leaf: path in names)
                yield from ((name, whole[name]) for name in names if keep)


def _running_statistics(module: nn.Module) -> frozenset[str]:
    """Return the names of the buffers that BatchNorm and the like write in training."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
        for name, _ in part.named_buffers(recurse=False)
    )


def _clipped(rule: Optimizer, bound: float) -> Optimizer:
    return optim.chain(optim.clip_by_global_norm(bound), rule) if bound > 0 else rule
