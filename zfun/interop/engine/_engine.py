"""A module with a training state, for imperative loops.

[Note: the engine]
The engine holds a state of :func:`zfun.zero` for its user, and adds nothing to the functional core.
A call of the engine is the first half of a step (``recipe.vjp``), ``backward`` runs pullbacks, and
``step`` is the second half (``recipe.update``).

Each call puts one node into autograd's graph. The node's inputs are an anchor and those arguments
of the call that require a gradient; backward of the node runs the pullback. So a loss may go
through several engines, as in a GAN: the gradients go to the engine whose ``backward`` is called,
and the other engines pass cotangents on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import zfun.recipes as recipes
from zfun import checkpoint, optim, stores, tree
from zfun.collectives import Group, all_reduce, mesh_of, process_group
from zfun.errors import OptionError, ZfunError
from zfun.evaluation import bound, evaluate
from zfun.flat import Flat, leaf_spans, unravel
from zfun.interop._named import state_dict_of, with_values
from zfun.interop.engine._calls import Call, CallNode
from zfun.modules import functional
from zfun.placement import S
from zfun.recipes import StepInfo, Zero, ZeroState
from zfun.transforms import WeightedMean, add_grads, map_batch, scale_grads

__all__ = ["Engine"]


class Engine:
    """A module whose parameters are a state of :func:`zfun.zero`, for imperative loops.

    Args:
        module: any module; its parameters are the initial values. The module itself does not
            change.
        optimizer: as for :func:`zfun.zero`; ``None`` beside what :func:`zfun.zero` returned.
        zero: the stage; or the options of :func:`zfun.zero` as a dict with ``"stage"``; or what
            :func:`zfun.zero` returned, whose loss the engine does not call.
        group: the ranks; by default those of the process.
        accumulate: how many calls of ``backward`` make a step. Gradients are averaged.
        clip_norm: clip gradients to this norm over all ranks and leaves.
        precision: as for :func:`zfun.zero`.
        trainable: which parameters are trained, by name and tensor; by default those that require
            a gradient.
        buffers: how the module's buffers are merged over the ranks at each step: ``"rank 0"``,
            ``"mean"`` or ``"by rank"``; see :func:`zfun.zero`.
        init: ``"check"`` that all ranks have the same values, or ``"broadcast"`` those of rank 0.

    Attributes:
        module: the module.
        recipe: what :func:`zfun.zero` returned.
        state: the state.
        accumulate: as above.
        grad_norm: of the last step, before clipping; ``None`` before the first.

    Raises:
        OptionError: as for :func:`zfun.zero`; or an option that stands twice, or beside what
            :func:`zfun.zero` returned.

    Example:
        >>> import zfun as zf
        >>> from torch.nn.functional import mse_loss
        >>> engine = Engine(nn.Linear(3, 1), zf.optim.sgd(0.1), zero=3, group=zf.process_group())
        >>> for x in torch.eye(3).split(1):
        ...     engine.backward(mse_loss(engine(x), torch.ones(1, 1)))
        ...     info = engine.step()
        >>> engine.state.step, info.skipped
        (3, False)
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Any,
        *,
        zero: int | Mapping[str, Any] | Zero = 2,
        group: Group | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: Any = None,
        trainable: Any = None,
        buffers: str = "rank 0",
        init: str = "check",
    ) -> None:
        apply = functional(module)
        written = apply.buffers
        self.module, self.accumulate = module, accumulate
        self.grad_norm: float | None = None
        self._apply = apply
        self._fn = lambda params, call: apply(params, *call[0], **call[1])
        chosen = {"group": group, "precision": precision, "trainable": trainable}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        if isinstance(zero, Zero):
            own = [(optimizer, None, "optimizer"), (clip_norm, None, "clip_norm")]
            own += [(buffers, "rank 0", "buffers")]
            if beside := [*chosen, *(name for value, default, name in own if value != default)]:
                raise OptionError(
                    "a recipe has the options of zf.zero(); got "
                    f"{', '.join(beside)} beside a recipe that is made already; pass them to "
                    "zf.zero()"
                )
            self.recipe: Zero = zero
        else:
            options = dict(zero) if isinstance(zero, Mapping) else {"stage": zero}
            if twice := [name for name in (*chosen, "num_micro_batches") if name in options]:
                raise OptionError(
                    f"an option of an engine stands once; got {', '.join(twice)} in zero= too; "
                    "remove it there, and pass accumulate= for num_micro_batches"
                )
            rule = optim.as_optimizer(optimizer)
            if clip_norm is not None:
                rule = optim.chain(optim.clip_by_global_norm(clip_norm), rule)
            trained = {name for name, x in module.named_parameters() if x.requires_grad}
            given: dict[str, Any] = {
                "trainable": lambda name, _: name in trained,
                "buffers": (lambda name, _: buffers if name in written else None)
                if written
                else None,
                "num_micro_batches": accumulate,
                **chosen,
                **options,
            }
            if "group" not in given:
                given["group"] = process_group()
            self.recipe = recipes.zero(loss_fn=self._fn, optimizer=rule, **given)
        self.state: ZeroState = self.recipe.init({**apply.params, **written}, init=init)
        self._group = self.state.params.group
        self._evaluation = evaluate(self._fn, self._group)
        self._defers = False
        self._begin()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the state's parameters; every rank must call equally often.

        In train mode, and where gradients are enabled, the outputs take part in autograd, and
        buffers of the module change in the state. In eval mode nothing is kept for backward.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self._evaluation(self.state, (args, kwargs))
        own: list[Tensor] = []
        inputs: list[Tensor] = []

        def cut(leaf: Any) -> Any:
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                return leaf
            own.append(leaf)
            inputs.append(leaf.detach().requires_grad_())
            return inputs[-1]

        batch = map_batch(cut, (args, kwargs))
        out, pullback, self._left = self.recipe.vjp(self._fn, self.state, batch, self._left)
        call = Call(pullback, inputs, self.state.params.layout.device)
        paths, values = iter(pullback.paths), list[Tensor]()
        map_batch(lambda leaf: values.append(leaf) if next(paths) is not None else None, out)
        if not values:
            return out
        self._calls = [ref for ref in self._calls if ref() is not None] + [weakref.ref(call)]
        nodes, paths = iter(CallNode.apply(call, values, call.anchor, *own)), iter(pullback.paths)
        return map_batch(lambda leaf: leaf if next(paths) is None else next(nodes), out)

    def backward(self, loss: Tensor | WeightedMean, *, scale: float | None = None) -> None:
        """Add the gradients of a loss to those of the next step.

        Gradients go to the trained parameters of this engine alone: no tensor gets a ``.grad``, so
        a parameter of the loss belongs into the module. Gradients of weighted means are the mean
        over the weights of all calls of a step, whatever their number.

        Args:
            loss: a scalar of outputs of this engine, or :func:`zfun.transforms.weighted_mean`.
            scale: the weight of this loss in the sum over the calls of a step; by default
                ``1 / accumulate``.

        Raises:
            ZfunError: the loss does not depend on outputs of this engine in train mode.
            OptionError: weights of different kinds in the calls of a step.
        """
        total, weight = loss if isinstance(loss, WeightedMean) else (loss, None)
        kind = (scale is None, weight is None)
        if scale is not None and weight is not None:
            raise OptionError("a weighted mean has a weight; got scale= too; leave scale out")
        if self._kinds - {kind}:
            raise OptionError(
                "the losses of a step have weights of one kind; got a weighted mean, scale= or "
                "neither after another kind; pass the same to each call of backward()"
            )
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ZfunError(
                f"backward() takes a scalar loss; got {type(total).__name__}; reduce it with mean()"
            )
        calls = [call for ref in self._calls if (call := ref()) is not None]
        if not calls or not total.requires_grad:
            raise ZfunError(
                "backward() takes a loss of outputs that this engine has returned in train mode "
                "since the last step; got a loss of none; call the engine first, outside of "
                "torch.no_grad()"
            )
        total = total.reshape(())
        total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        by = self.state.loss_scale
        seed = (1.0 if by is None else float(by.scale)) * (1.0 if scale is None else scale)
        for call in calls:
            call.is_wanted, call.weight = True, weight
        try:
            torch.autograd.grad(
                total,
                [call.anchor for call in calls],
                torch.full_like(total, seed),
                allow_unused=True,
            )
        finally:
            for call in calls:
                call.is_wanted = False
        ran = [call for call in calls if call.grads is not None]
        if not ran:
            raise ZfunError(
                "backward() takes a loss of outputs of this engine; got a loss that depends on "
                "none of them; call backward() of the engine that made the outputs"
            )
        self._take(ran, total.detach(), weight, 1.0 if scale is None else scale)
        self._kinds.add(kind)

    def _take(self, ran: list[Call], total: Tensor, weight: Tensor | None, scale: float) -> None:
        """Add the gradients of calls to those of the step."""
        self._calls = [ref for ref in self._calls if ref() is not None and ref() not in ran]
        grads: Any = None
        for call in ran:
            grads, call.grads = add_grads(grads, call.grads), None
        pair = torch.stack([total * scale, total.new_ones(()) if weight is None else weight])
        if weight is not None and self._losses:
            # The gradients of one call are a mean, and those of several calls a sum.
            if len(self._losses) == 1:
                self._grads = self._weighted(self._grads, self._losses[0])
            grads = self._weighted(grads, pair)
        self._grads = add_grads(self._grads, grads)
        self._losses.append(pair)
        self._is_boundary = not self._defers and len(self._losses) >= self.accumulate

    def _weighted(self, grads: Any, pair: Tensor) -> Any:
        return scale_grads(grads, float(all_reduce(pair, mesh_of(self._group))[1]))

    @property
    def is_boundary(self) -> bool:
        """Whether the next call of :meth:`step` changes the parameters."""
        return self._is_boundary

    def step(self, *, boundary: bool | None = None) -> StepInfo | None:
        """Update the parameters, if ``accumulate`` calls of backward have been made.

        Args:
            boundary: whether to update now, in place of :attr:`is_boundary`. The gradients of fewer
                calls are divided by ``accumulate`` too.

        Returns:
            The results of the step, equal on all ranks; ``None`` if there was no update.

        Raises:
            ZfunError: no gradients since the last step.
        """
        if self._grads is None:
            raise ZfunError(
                "step() takes the gradients of backward(); got none since the last step; call "
                "engine.backward(loss) first, and not loss.backward()"
            )
        if not (self._is_boundary if boundary is None else boundary):
            return None
        mesh = mesh_of(self._group)
        summed = all_reduce(torch.stack(self._losses).view(-1), mesh).view(-1, 2)
        is_mean, is_plain = next(iter(self._kinds))
        count = self.accumulate if is_mean and is_plain else 1
        loss, factor = (summed[:, 0] * (1.0 / mesh.size)).sum() / count, 1.0 / count
        if not is_plain:
            weight = float(summed[:, 1].sum()) or 1.0
            loss = summed[:, 0].sum() / weight
            factor = 1.0 / weight if len(self._losses) > 1 else 1.0
        grads = scale_grads(self._grads, factor)
        self.state, info = self.recipe.update(self.state, grads, loss, self._left)
        self.grad_norm = float(info.grad_norm)
        self._begin()
        return info

    def _begin(self) -> None:
        """Begin the calls of a step."""
        self._calls: list[weakref.ref[Call]] = []
        self._left: Flat | None = None
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step."""
        del set_to_none
        self._grads: Any = None
        self._losses: list[Tensor] = []
        self._kinds: set[tuple[bool, bool]] = set()
        self._is_boundary = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let calls of backward in this context add gradients without reaching a boundary."""
        before, self._defers = self._defers, True
        try:
            yield
        finally:
            self._defers = before

    @property
    def training(self) -> bool:
        """Whether the module is in train mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Set the module to train mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module to eval mode, in which calls keep nothing for backward."""
        return self.train(False)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``module.generate`` on the state's parameters, without gradients.

        Parameters are gathered where a layer uses them; ranks may call different numbers of layers.
        """
        with bound(self._apply, self.state, self._group) as module:
            return module.generate(*args, **kwargs)

    @contextlib.contextmanager
    def bound(self) -> Iterator[nn.Module]:
        """Make a copy of the module with the whole values of the state; every rank must enter.

        Returns:
            A context whose value is the copy, for code that needs a plain module. Changes to the
            values do not reach the state.
        """
        trained = self._apply.params
        values = self.recipe.params(self.state)
        yield self._apply.bind(
            {
                name: nn.Parameter(x, requires_grad=False) if name in trained else x
                for name, x in values.items()
            }
        )

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and detached values of the trained parameters: views of the state.

        Below stage 3 whole parameters; at stage 3 this rank's elements, as vectors, which may be
        empty. A view is valid until the next step.
        """
        held = stores.resident(self.state.params)
        if held.placement is not S:
            yield from zip(held.layout.paths, tree.leaves(unravel(held)), strict=True)
            return
        for span in leaf_spans(held):
            yield span.path, held.buffers[span.bucket][span.start : span.stop]

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tensors of :meth:`named_parameters`."""
        return (value for _, value in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return whole values by the module's own names, on every rank; every rank must call.

        As in ``module.state_dict()``, a value may be extra state that is no tensor.
        """
        return state_dict_of(self.module, self.recipe.params(self.state))

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take whole values by the module's own names; every rank must call.

        Moments and counts stay. Gradients since the last step are dropped.

        Args:
            values: as :meth:`state_dict` returns, the same on every rank.

        Raises:
            SpecMismatch: names are missing or unknown, or a shape differs.
        """
        self.state = with_values(self.module, self.state, values)
        self._begin()

    def save(self, path: str | Path, extra: Any = None) -> checkpoint.Saved:
        """Save the state and plain values of the caller; see :func:`zfun.save`."""
        return checkpoint.save(path, self.state, data=extra)

    def load(self, path: str | Path, **options: Any) -> Any:
        """Load a state of any stage and any number of ranks; see :func:`zfun.load`.

        Args:
            path: of :meth:`save` or :func:`zfun.save`.
            options: of :func:`zfun.load`.

        Returns:
            The plain values of the caller.
        """
        loaded = checkpoint.load(path, self.state, **options)
        self.state = loaded.state
        self._begin()
        return loaded.data

    @property
    def hyperparams(self) -> dict[str, float]:
        """The numbers of :func:`zfun.optim.inject_hyperparams` in the state, by name."""
        return optim.hyperparams(self.state)

    def set_hyperparams(self, **values: float) -> None:
        """Set numbers of the optimizer, as :func:`zfun.optim.set_hyperparams` does."""
        self.state = optim.set_hyperparams(self.state, **values)
