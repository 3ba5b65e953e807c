"""A module with a training state, for imperative loops.

[Note: the engine]
The engine holds a state of :func:`zfun.zero` for its user, and adds nothing to the functional core.
A call is the first half of a step (``recipe.record``), backward passes are the user's or those of
:meth:`Engine.backward`, and ``step`` is the second half (``recipe.update``). The module is the
user's own; see [Note: live modules].

The outputs of a call keep their graph, so a loss may go through several engines, as in a GAN, and
through tensors that hooks have caught. ``engine.backward`` gives gradients to its own engine, and
the other engines pass cotangents on; ``loss.backward()`` gives gradients to all, as in torch.

Gradients are summed over the ranks in each backward pass, at stages 1 and 0 too, so that all stages
add in one order and have the same bits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import zfun.recipes as recipes
from zfun import checkpoint, optim, stores, tree
from zfun.collectives import Group, broadcast, mesh_of, process_group
from zfun.errors import OptionError, ZfunError
from zfun.flat import Flat, leaf_spans, unravel
from zfun.interop._named import state_dict_of, with_values
from zfun.interop.engine._calls import Calls
from zfun.interop.engine._compile import adopt_compiled
from zfun.interop.engine._grad_sum import GradSum, Told
from zfun.interop.engine._groups import UNBOUNDED, ParamGroups
from zfun.interop.engine._live import Live, check_free
from zfun.interop.engine._parameter import leave_meta
from zfun.interop.engine._torch_states import torch_state, with_torch_state
from zfun.interop.engine._values import (
    Buffers,
    carried,
    leaves_of,
    named_leaves,
    whole_by_bucket,
    whole_values,
)
from zfun.placement import S
from zfun.recipes import StepInfo, Zero, ZeroState
from zfun.reductions import global_norm
from zfun.sources import Deferred
from zfun.transforms import Tape, WeightedMean, scale_grads, unshard

__all__ = ["Engine"]

# The engine whose backward() runs, for the hooks of autograd, also on other threads.
_RUNNING = "zfun.interop.engine"


class Engine:
    """A module whose parameters are a state of :func:`zfun.zero`, for imperative loops.

    The module is yours, and live: a call of the module is a call of the engine. Below stage 3 its
    parameters are the values of the state. At stage 3 a parameter is gathered where the module
    reads it, and an operation on a parameter outside of a call gathers too, on all ranks.

    Args:
        module: any module; its parameters are the initial values.
        optimizer: as for :func:`zfun.zero`; or an optimizer of torch, whose parameter groups you
            and your schedulers may change between steps; ``None`` beside what :func:`zfun.zero`
            returned.
        zero: the stage; or the options of :func:`zfun.zero` as a dict with ``"stage"``; or what
            :func:`zfun.zero` returned, whose loss the engine does not call.
        group: the ranks; by default those of the process.
        accumulate: how many calls of ``backward`` make a step. Gradients are averaged.
        clip_norm: clip gradients to this norm over all ranks and leaves.
        precision: as for :func:`zfun.zero`.
        trainable: which parameters are trained, by name and tensor; by default those that require
            a gradient, and are in a group of the optimizer if there are groups.
        buffers: how the module's buffers are merged over the ranks at each step: ``"rank 0"``,
            ``"mean"`` or ``"by rank"``; see :func:`zfun.zero`.
        init: ``"check"`` that all ranks have the same values, or ``"broadcast"`` those of rank 0.
        values: first values by name in place of the module's own, such as
            :class:`zfun.sources.Deferred`.
        extra: parameters by name that the module does not have, such as those of a loss. They are
            whole, and their gradients stay in ``.grad`` until you drop them, as in torch.

    Attributes:
        module: the module.
        recipe: what :func:`zfun.zero` returned.
        accumulate: as above.
        clip_norm: as above; with an optimizer of torch it may change between steps.
        grad_norm: of the last step, before clipping; ``None`` before the first.
        keeps_grads: whether gradients that backward has left in ``.grad`` stay there after a step,
            as in torch, until ``zero_grad``.
        plain_scale: the weight of the gradients of a ``loss.backward()``, as ``scale`` of
            :meth:`backward`.

    Raises:
        OptionError: as for :func:`zfun.zero`; or an option that stands twice, or beside what
            :func:`zfun.zero` returned; or a module that another engine holds.

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
        values: Mapping[str, Any] | None = None,
        extra: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        check_free(module)
        adopt_compiled(module)
        self.module, self.accumulate, self.clip_norm = module, accumulate, clip_norm
        self.grad_norm: float | None = None
        self._clips = clip_norm is not None
        self._extra = dict(extra or {})
        self._params = {**named_leaves(module), **self._extra}
        self._dtypes = {name: param.dtype for name, param in self._params.items()}
        self.keeps_grads = False
        self.plain_scale = 1.0
        chosen = {"group": group, "precision": precision, "trainable": trainable}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        self._groups: ParamGroups | None = None
        if isinstance(zero, Zero):
            own = [(optimizer, None, "optimizer"), (clip_norm, None, "clip_norm")]
            own += [(buffers, "rank 0", "buffers")]
            if beside := [*chosen, *(name for value, default, name in own if value != default)]:
                raise OptionError(
                    "a recipe has the options of zf.zero(); got "
                    f"{', '.join(beside)} beside a recipe that is made already; pass them to "
                    "zf.zero()"
                )
            self._options: dict[str, Any] | None = None
            self.recipe: Zero = zero
        else:
            options = dict(zero) if isinstance(zero, Mapping) else {"stage": zero}
            if twice := [name for name in (*chosen, "num_micro_batches") if name in options]:
                raise OptionError(
                    f"an option of an engine stands once; got {', '.join(twice)} in zero= too; "
                    "remove it there, and pass accumulate= for num_micro_batches"
                )
            self._options = {"group": None, **options, **chosen}
            if self._options["group"] is None:
                self._options["group"] = process_group()
            if isinstance(optimizer, ParamGroups):
                self._groups = optimizer
            elif isinstance(optimizer, torch.optim.Optimizer):
                self._groups = ParamGroups(optimizer, self._params)
            self._optimizer = optimizer
            self.recipe = self._composed()
        given = values or {}
        first = {name: given.get(name, x.detach()) for name, x in self._params.items()}
        self._state: ZeroState = self.recipe.init(first, init=init)
        for param in self._params.values():
            if param.is_meta:
                leave_meta(param, self._state.params.layout.device)
        self._group = self._state.params.group
        self._buffers = Buffers(module, buffers, self._group, init, given)
        self._is_sharded = self._state.params.placement is S
        self._live = Live(module, self.leaves, self, self._extra)
        self._calls = Calls(self._live, self._group, is_sharded=self._is_sharded)
        self._defers = False
        self._tapes: list[weakref.ref[Tape]] = []
        self._is_bound = False
        if self._is_sharded:
            self._hide()
        self._live.enter(self.run, self.zero_grad)
        self._show()
        self._begin()

    def _composed(self) -> Zero:
        """Compose the recipe for the leaves that are trained now."""
        assert self._options is not None
        if self._groups is None:
            rule = optim.as_optimizer(self._optimizer)
            if self.clip_norm is not None:
                rule = optim.chain(optim.clip_by_global_norm(self.clip_norm), rule)
            trained = {name for name, x in self._params.items() if x.requires_grad}
        else:
            rule = self._groups.pure(UNBOUNDED if self._clips else None)
            trained = set(self._groups.labels)
            if strange := trained - self._params.keys():
                raise OptionError(
                    "an engine trains parameters of its module; got a group with leaf "
                    f"{min(strange)!r} of another one; with several optimizers, give each one all "
                    "of its parameters at the start, and freeze those that train later"
                )
        options: dict[str, Any] = {"trainable": lambda name, _: name in trained, **self._options}
        # Stage 1 sums in backward too; see [Note: the engine].
        options["stage"] = 2 if options["stage"] == 1 else options["stage"]
        return recipes.zero(loss_fn=_no_loss, optimizer=rule, **options)

    @property
    def state(self) -> ZeroState:
        """The state; assign to go on from another one."""
        return self._state._replace(buffers=self._buffers.flat)

    @state.setter
    def state(self, state: ZeroState) -> None:
        self._buffers.take(state.buffers)
        self._state = state._replace(buffers=None)
        self._show()

    def _show(self) -> None:
        """Let the module's parameters be the values of the state, below stage 3 and in bound()."""
        if self._is_sharded:
            if names := frozenset(self._params if self._is_bound else self._extra):
                self._live.show(whole_values(self._state, names))
            return
        for flat in (self._state.params, self._state.frozen):
            if flat is not None:
                values = unravel(stores.resident(flat))
                self._live.show(dict(zip(tree.paths(values), tree.leaves(values), strict=True)))

    def _hide(self) -> None:
        """Let the module's parameters have no values, at stage 3."""
        dtypes = leaves_of(self._state)
        self._live.hide({name: x for name, x in dtypes.items() if name not in self._extra})

    # Calls.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; every rank must call equally often.

        Where gradients are enabled, the outputs take part in autograd.
        """
        return self.module(*args, **kwargs)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function that uses the module, as one call: a step of a loop, a loss.

        Parameters are gathered where the module reads them, and outputs take part in autograd where
        gradients are enabled. Inside of a call the function just runs.

        Args:
            fn: any function; every rank must run it equally often.
            args: of the function.
            kwargs: of the function.

        Returns:
            The result of the function.
        """
        if self._calls.is_inside:
            return fn(*args, **kwargs)
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return self._calls.evaluate(self._state, fn, args, kwargs)
        self.prepare()
        out, tape = self._calls.record(self.recipe, self._state, fn, args, kwargs)
        take, check = weakref.WeakMethod(self._take), weakref.WeakMethod(self._check_pass)
        tape.deliver = lambda grads: None if (found := take()) is None else found(grads)
        tape.check = lambda: None if (found := check()) is None else found()
        self._tapes = [ref for ref in self._tapes if ref() is not None] + [weakref.ref(tape)]
        return out

    @contextlib.contextmanager
    def uneven(self) -> Iterator[nn.Module]:
        """Let the ranks call the module different numbers of times, without gradients.

        At the end of the context the ranks wait for each other; see
        :meth:`zfun.evaluation.Evaluation.uneven`.

        Returns:
            A context whose value is the module.
        """
        with self._calls.uneven(self._state):
            yield self.module

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``module.generate`` without gradients; ranks may generate different lengths."""
        with self.uneven() as module, torch.no_grad():
            found: Any = module
            return found.generate(*args, **kwargs)

    # Backward.

    def backward(
        self,
        loss: Tensor | WeightedMean,
        *,
        scale: float | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of a loss to those of the next step.

        Gradients go to the trained parameters of this engine, and to leaf tensors that are no
        parameters of an engine, as in torch. Gradients of weighted means are the mean over the
        weights of all calls of a step, whatever their number.

        Args:
            loss: a scalar of outputs of this engine, or :func:`zfun.transforms.weighted_mean`.
            scale: the weight of this loss in the sum over the calls of a step; by default
                ``1 / accumulate``.
            retain_graph: keep the graph for another backward pass.

        Raises:
            ZfunError: the loss does not depend on outputs of this engine.
            OptionError: weights of different kinds in the calls of a step.
        """
        total, weight = loss if isinstance(loss, WeightedMean) else (loss, None)
        self._sum.check(scale, weight)
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ZfunError(
                f"backward() takes a scalar loss; got {type(total).__name__}; reduce it with mean()"
            )
        self._settle()
        tapes = self._open_tapes()
        if not total.requires_grad:
            raise ZfunError(
                "backward() takes a loss of outputs that this engine has returned since the last "
                "step; got a loss of none; call the engine first, outside of torch.no_grad()"
            )
        total = total.reshape(())
        total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        seed = self.loss_scale * (1.0 if scale is None else scale)
        for tape in tapes:
            tape.weight = weight
        self._sum.begin(weighted=weight is not None)
        torch._C._stash_obj_in_tls(_RUNNING, self)
        try:
            torch.autograd.backward(total, torch.full_like(total, seed), retain_graph=retain_graph)
            self._settle()
        except BaseException:
            for tape in tapes:
                tape.close()
            raise
        finally:
            torch._C._stash_obj_in_tls(_RUNNING, None)
            for tape in tapes:
                tape.weight = None
        if not self._sum.has_run and not self._strays():
            raise ZfunError(
                "backward() takes a loss of outputs of this engine since its last step; got a loss "
                "that depends on none of them; call backward() of the engine that made the outputs"
            )
        self._sum.count(total.detach(), weight, 1.0 if scale is None else scale)
        self._is_boundary = not self._defers and self._sum.num_passes >= self.accumulate

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward; 1 without a loss scale."""
        scale = self._state.loss_scale
        return 1.0 if scale is None else float(scale.scale)

    def _open_tapes(self) -> list[Tape]:
        return [tape for ref in self._tapes if (tape := ref()) is not None]

    def _check_pass(self) -> None:
        """Check a backward pass that has come to outputs of this engine."""
        if _running() is None and self.loss_scale != 1.0:
            raise ZfunError(
                "with a loss scale, backward begins with the scaled loss; got loss.backward(); "
                "call engine.backward(loss), and run the forward pass again"
            )
        if _running() is None and self._last_pass != torch._C._current_graph_task_id():
            self._last_pass = torch._C._current_graph_task_id()
            self._sum.check(1.0, None)
            self._sum.begin(weighted=False)
            device = self._state.params.layout.device
            self._sum.count(torch.full((), torch.nan, device=device), None, 1.0)
            self._is_boundary = not self._defers and self._sum.num_passes >= self.accumulate

    def _take(self, grads: Flat) -> None:
        """Add the gradients of a backward pass."""
        running = _running()
        if running is not None and running is not self:
            return
        if running is None and self.plain_scale != 1.0:
            grads = scale_grads(grads, self.plain_scale)
        self._sum.add(grads)

    def _settle(self) -> None:
        """End backward passes that autograd has ended."""
        for tape in self._open_tapes():
            tape.finish()

    @property
    def grads(self) -> Flat | None:
        """The sum of the gradients of calls since the last step; ``None`` before backward.

        A loss scale is still in the sum. A write to the buffers counts at the next step.
        """
        self._settle()
        return self._sum.grads

    @property
    def has_grads(self) -> bool:
        """Whether this rank has gradients for the next step."""
        return self._ready is not None or self._sum.grads is not None or bool(self._strays())

    @property
    def is_boundary(self) -> bool:
        """Whether the next call of :meth:`step` changes the parameters."""
        return self._is_boundary

    # Steps.

    def prepare(self) -> None:
        """End backward passes, and look for other trained leaves, as each call does."""
        self._settle()
        self._live.check_dropped()
        self._live.check_unwritten()
        self._regroup()

    def _regroup(self) -> None:
        """Look for other trained leaves, or groups."""
        if self._groups is None or not self._groups.refresh():
            return
        if self._sum.num_passes:
            raise OptionError(
                "trained parameters change between steps; got a change between the micro-batches "
                "of a step; unfreeze parameters, or add a group, after engine.step()"
            )
        self._retrain()

    def _retrain(self) -> None:
        """Go on with another set of trained leaves, or of groups."""
        old, specs = self._state, leaves_of(self._state)
        device = old.params.layout.device
        values = {
            name: Deferred(
                name,
                torch.empty(param.shape, dtype=specs[name], device="meta"),
                lambda name=name: whole_values(old, {name}, masters=True)[name],
                device,
            )
            for name, param in self._params.items()
        }
        self.recipe = self._composed()
        self._state = carried(old, self.recipe.init(values))
        self._calls.reset()
        self._show()

    def step(self, *, boundary: bool | None = None) -> StepInfo | None:
        """Update the parameters, if ``accumulate`` calls of backward have been made.

        Args:
            boundary: whether to update now, in place of :attr:`is_boundary`. The gradients of fewer
                calls are divided by ``accumulate`` too.

        Returns:
            The results of the step, equal on all ranks; ``None`` if there was no update. The loss
            is NaN where a backward pass was ``loss.backward()``, which tells no loss.

        Raises:
            ZfunError: no gradients since the last step.
        """
        self._settle()
        if not self._sum.num_passes:
            # A loop without calls.
            self._regroup()
        if not self.has_grads:
            raise ZfunError(
                "step() takes the gradients of backward(); got none since the last step; call "
                "engine.backward(loss) first"
            )
        if not (self._is_boundary if boundary is None else boundary):
            return None
        grads, loss, told = self._collected()
        # Other ranks may wait for the windows that calls without a backward pass hold.
        self._end_calls()
        if self._groups is not None:
            opt_state = self._groups.set_in(self._state.opt_state, self.clip_norm)
            self._state = self._state._replace(opt_state=opt_state)
        self._state, info = self.recipe.update(self._state, grads, loss)
        self._buffers.merge(told.flags[1:])
        if self._groups is not None:
            self._groups.stepped()
        self.grad_norm = float(info.grad_norm)
        self._show()
        self._begin()
        return info

    def _collected(self) -> tuple[Flat, Tensor, Told]:
        """Return the gradients and the loss of the step, and what else ranks have told."""
        if self._ready is None:
            strays = self._strays()
            # One message tells the losses, and whether any rank has stray gradients or new buffers.
            told = self._sum.told([bool(strays), *self._buffers.changed()])
            if told.flags[0]:
                self._sum.add_strays(strays, self._state.params)
            grads, loss = self._sum.result(told, self.accumulate)
            self._ready = grads, loss, told
        return self._ready

    def norm(self) -> Tensor:
        """Return the norm of the gradient that the next step takes, before clipping.

        No backward pass may follow before the step. Every rank must call.
        """
        self._settle()
        grads, _, _ = self._collected()
        if self._groups is not None and self._groups.extra:
            extra = self._groups.extra
            layout = grads.layout
            own = [
                i
                for i, x in enumerate(layout.buckets)
                if layout.leaves[x.leaves[0]].path not in extra
            ]
            grads = grads.select(own)
        return global_norm(grads) / self.loss_scale

    def _strays(self) -> dict[str, Tensor]:
        """Return gradients that backward has left in parameters, by name."""
        with torch._C.DisableTorchFunctionSubclass():
            found = {name: x.grad for name, x in self._params.items() if x.grad is not None}
        for name, x in self._live.strays.items():
            if x.grad is not None:
                found[name] = x.grad + found[name] if name in found else x.grad
        return found

    def _end_calls(self) -> None:
        for tape in self._open_tapes():
            tape.close()
        self._tapes = []
        self._live.end()

    def _begin(self) -> None:
        """Begin the calls of a step."""
        self._end_calls()
        if not self.keeps_grads:
            self._drop_strays()
        self._reset()

    def show_grads(self, name: str) -> None:
        """Move the gradients since the last step to ``.grad``, whole; every rank must call.

        A read or write of ``.grad`` outside of backward calls this. The next step takes what is in
        ``.grad`` then, so code may scale, clip or drop it; the step itself divides by
        ``accumulate``. Gradients of weighted means stay where they are.

        Args:
            name: of the parameter whose gradient is read.
        """
        self._settle()
        if self._sum.is_weighted or (self._sum.grads is None and self._is_shown(name)):
            return
        self._collected()
        self._drop_strays()
        assert self._sum.grads is not None, "a stray gradient is a part of the sum"
        whole = unshard(self._sum.grads)
        self._sum.grads, self._ready = None, None
        with torch._C.DisableTorchFunctionSubclass():
            for path, grad in zip(tree.paths(whole), tree.leaves(whole), strict=True):
                param = self._params[path]
                param.grad = grad.detach().to(param.dtype)
                self._shown[path] = weakref.ref(param.grad), param.grad._version

    def _is_shown(self, name: str) -> bool:
        """Whether ``.grad`` has no gradient of this rank alone."""
        stray = self._live.strays.get(name)
        with torch._C.DisableTorchFunctionSubclass():
            grad = self._params[name].grad
            found, version = self._shown.get(name, (lambda: None, -1))
            is_shown = grad is None or (found() is grad and grad._version == version)
        return is_shown and (stray is None or stray.grad is None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, but those of the parameters of ``extra=``."""
        del set_to_none
        self._drop_strays()
        self._reset()

    def _drop_strays(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for name, x in (*self._params.items(), *self._live.strays.items()):
                if x.grad is not None and name not in self._extra:
                    x.grad = None

    def _reset(self) -> None:
        self._sum = GradSum(self._group)
        self._ready: tuple[Flat, Tensor, Told] | None = None
        self._shown: dict[str, tuple[weakref.ref[Tensor], int]] = {}
        self._is_boundary = False
        self._last_pass = -1

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
        """Set the module to eval mode."""
        return self.train(False)

    def optimizer_state(self, *, whole: bool = False) -> dict[str, Any]:
        """Return ``state_dict()`` of the torch optimizer with its moments; every rank must call.

        Args:
            whole: of every leaf, also those without a step, and with master weights.
        """
        return torch_state(self._state, self._torch_groups(), whole=whole)

    def load_optimizer_state(self, given: Mapping[str, Any], *, whole: bool = False) -> None:
        """Take what ``state_dict()`` of a torch optimizer returns; every rank must call.

        Args:
            given: the same on every rank.
            whole: whether the moments and the master weight of every leaf must be there.

        Raises:
            SpecMismatch: as for another optimizer.
            CheckpointError: a moment is missing.
        """
        groups, entries = self._torch_groups(), given.get("state", {})
        groups.retain(name for name, index in groups.positions().items() if index in entries)
        self._settle()
        self._regroup()
        self._state = with_torch_state(self._state, groups, given, whole=whole)

    def _torch_groups(self) -> ParamGroups:
        if self._groups is None:
            raise OptionError(
                "the state of a torch optimizer belongs to one; got an engine with a rule of "
                "zf.optim; read engine.state.opt_state"
            )
        return self._groups

    # Values.

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """The parameters of the module that are in the state, by name."""
        return {name: x for name, x in self._params.items() if name not in self._extra}

    def gathered(self, name: str, *, master: bool = False) -> Tensor:
        """Return the whole value of a leaf; every rank must call.

        Args:
            name: of the leaf.
            master: whether to return the master weight, if there is one.
        """
        return whole_values(self._state, {name}, masters=master)[name]

    def gathered_all(self, names: Sequence[str]) -> list[Tensor]:
        """Return the whole values of leaves; every rank must call."""
        found = whole_values(self._state, frozenset(names))
        return [found[name] for name in names]

    def mark(self, name: str, **marks: Any) -> None:
        """Let the tensors that calls read in place of a parameter have attributes."""
        self._live.marks[name] = marks

    def expose(self, values: Mapping[str, Tensor]) -> None:
        """Let parameters be plain ones with these values, which a rank may write alone."""
        self._live.expose(values)

    def cover(self, names: Sequence[str]) -> None:
        """Let exposed parameters be those of the state again."""
        self._live.cover(names)
        if self._is_sharded:
            dtypes = leaves_of(self._state)
            self._live.hide({name: dtypes[name] for name in names})
        else:
            self._show()

    def write(self, name: str, value: Tensor) -> None:
        """Take a whole value of a leaf from rank 0; every rank must call."""
        value = broadcast(value.detach().contiguous(), mesh_of(self._group), 0, name="written")
        self.replace({name: value})

    @contextlib.contextmanager
    def bound(self) -> Iterator[nn.Module]:
        """Let the module have whole plain parameters, as a context; every rank must enter.

        Inside, a loss without a call leaves its gradients in ``.grad``, and :meth:`step` sums them.

        Returns:
            A context whose value is the module. At stage 3 other changes of the values are lost.
        """
        before, self._is_bound = self._is_bound, True
        self._show()
        try:
            yield self.module
        finally:
            self._is_bound = before
            if self._is_sharded and not before:
                self._hide()

    def close(self) -> None:
        """Let the module be a plain one with whole values; every rank must call.

        Values have the dtypes that the module had, from master weights where there are some.
        """
        if self._is_sharded or self._dtypes != leaves_of(self._state):
            values = whole_values(self._state, frozenset(self._params), masters=True)
            self._live.show({name: x.to(self._dtypes[name]) for name, x in values.items()})
        self._begin()
        self._live.release()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and detached values of the trained parameters: views of the state.

        Below stage 3 whole parameters; at stage 3 this rank's elements, as vectors, which may be
        empty. A view is valid until the next step.
        """
        held = stores.resident(self._state.params)
        if held.placement is not S:
            yield from zip(held.layout.paths, tree.leaves(unravel(held)), strict=True)
            return
        for span in leaf_spans(held):
            yield span.path, held.buffers[span.bucket][span.start : span.stop]

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tensors of :meth:`named_parameters`."""
        return (value for _, value in self.named_parameters())

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """Return whole values by the module's own names; every rank must call.

        As in ``module.state_dict()``, a value may be extra state that is no tensor.

        Args:
            keep: whether this rank wants the values; another rank helps to gather, one bucket at a
                time, and gets none.
        """
        values = dict(whole_by_bucket(self._state, keep=keep))
        if not keep:
            return {}
        return state_dict_of(self.module, {**values, **self._buffers.named()})

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take whole values by the module's own names; every rank must call.

        Moments and counts stay. Gradients since the last step are dropped.

        Args:
            values: as :meth:`state_dict` returns, the same on every rank.

        Raises:
            SpecMismatch: names are missing or unknown, or a shape differs.
        """
        self.replace(values, strict=True)
        self._begin()

    def replace(self, values: Mapping[str, Any], *, strict: bool = False) -> None:
        """Take whole values by any names of the module; every rank must call.

        Args:
            values: the same on every rank.
            strict: whether each name must be there, and no other.

        Raises:
            SpecMismatch: names or shapes differ.
        """
        self.state = with_values(self.module, self.state, values, strict=strict)

    def save(self, path: str | Path, extra: Any = None, **options: Any) -> checkpoint.Saved:
        """Save the state and plain values of the caller.

        Args:
            path: as for :func:`zfun.save`.
            extra: plain values.
            options: of :func:`zfun.save`.
        """
        return checkpoint.save(path, self.state, data=extra, **options)

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
        return optim.hyperparams(self._state)

    def set_hyperparams(self, **values: float) -> None:
        """Set numbers of the optimizer, as :func:`zfun.optim.set_hyperparams` does."""
        self._state = optim.set_hyperparams(self._state, **values)


def _running() -> Any:
    """Return the engine whose backward() runs, in this thread or the one that began the pass."""
    return torch._C._get_obj_in_tls(_RUNNING) if torch._C._is_key_in_tls(_RUNNING) else None


def _no_loss(params: Any, batch: Any) -> Any:
    """Stand for the loss, which the loop computes."""
    raise AssertionError
