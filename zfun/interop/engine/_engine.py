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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zfun.recipes as recipes
from zfun import checkpoint, optim
from zfun.checkpoint import agree, attempt
from zfun.collectives import Group, agreement_group, process_group
from zfun.errors import CollectiveMismatch, OptionError, PeerLost, ZfunError
from zfun.interop._named import at_hand
from zfun.interop.engine._calls import Calls
from zfun.interop.engine._groups import UNBOUNDED, ParamGroups, group_number
from zfun.interop.engine._live import LiveModule
from zfun.interop.engine._methods import adopt_compiled, compile_blocks
from zfun.interop.engine._parameter import leave_meta
from zfun.interop.engine._passes import Passes
from zfun.interop.engine._reads import check_free
from zfun.interop.engine._torch_states import by_position, with_torch_state
from zfun.interop.engine._values import (
    EngineBuffers,
    carried,
    deferred_values,
    named_leaves,
    no_loss,
    trained_in,
)
from zfun.parallel import model_axes
from zfun.placement import Held, S
from zfun.recipes import Precision, StepInfo, Zero


class Engine(Passes):
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
        values: first values by name in place of the module's own, also deferred ones; with
            ``"loss_fn"`` in ``zero``, the logical tree of that loss; the module has a part.
        extra: parameters by name that the module does not have, such as those of a loss. They are
            whole, and their gradients stay in ``.grad`` until you drop them, as in torch.

    Attributes:
        module: the module.
        recipe: what :func:`zfun.zero` returned.
        accumulate: as above.
        clip_norm: as above; with an optimizer of torch it may change between steps.
        grad_norm: of the gradients that the last step took, before it clips; ``None`` at first.
        keeps_grads: whether gradients that backward has left in ``.grad`` stay there after a step,
            as in torch, until ``zero_grad``.
        plain_scale: the weight of the gradients of a ``loss.backward()``, as ``scale`` of
            :meth:`backward`.
        has_module: whether no later engine has taken the module.

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
        self._clips, self._optimizer = clip_norm is not None, optimizer
        self._extra = dict(extra or {})
        self._params = {**named_leaves(module), **self._extra}
        self._dtypes = {name: param.dtype for name, param in self._params.items()}
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
            self._options, self.recipe = dict[str, Any](), zero
        else:
            options = dict(zero) if isinstance(zero, Mapping) else {"stage": zero}
            if twice := [name for name in (*chosen, "num_micro_batches") if name in options]:
                raise OptionError(
                    f"an option of an engine stands once; got {', '.join(twice)} in zero= too; "
                    "remove it there, and pass accumulate= for num_micro_batches"
                )
            self._options = {**options, **chosen}
            if self._options.get("group") is None:
                self._options["group"] = process_group()
            if isinstance(optimizer, ParamGroups):
                self._groups = optimizer
            elif isinstance(optimizer, torch.optim.Optimizer):
                self._groups = ParamGroups(optimizer, self._params)
            self.recipe = self._composed()
        given = values or {}
        first = {name: given.get(name, x.detach()) for name, x in self._params.items()}
        # The logical tree of a loss over model axes has one order on all ranks.
        first = first if isinstance(zero, Zero) or "loss_fn" not in self._options else given
        self._state = self.recipe.init(first, init=init)
        for param in self._params.values():
            if param.is_meta:
                leave_meta(param, self._state.params.layout.device)
        self._group = self._state.params.group
        own = self.recipe.options
        axes = () if own is None else model_axes(own.loss_fn)
        spread = tuple(Held((axis.group.rank,)) for axis in axes)  # a rank has its own buffers
        self._buffers = EngineBuffers(module, buffers, self._group, init, given, spread, own)
        self._is_sharded = self._state.params.placement is S
        self._live = LiveModule(module, self.leaves, self, self._extra, hides=self._is_sharded)
        call = self._live, self._buffers, self._group, Precision() if own is None else own.precision
        self._calls = Calls(*call, self._take, self._check_pass, is_sharded=self._is_sharded)
        if self._is_sharded:
            self._hide()
        self._live.enter(self.run, self.zero_grad)
        self._show()
        self._reset()  # gradients that are in .grad already count, as in torch
        if self._groups is not None:
            self._groups.join(self)

    def _composed(self) -> Zero:
        """Compose the recipe for the leaves that are trained now."""
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
        if "loss_fn" not in options:
            options["loss_fn"] = no_loss
            # Stage 1 sums in backward too; see [Note: the engine].
            options["stage"] = 2 if options["stage"] == 1 else options["stage"]
        return recipes.zero(optimizer=rule, **options)

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
        self._check_here("a call", "parameters")
        self._live.settle_views()
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            out = self._calls.evaluate(self._state, at_hand(self), fn, args, kwargs)
        else:
            self.prepare()
            out, tape = self._calls.record(self.recipe, self._state, fn, args, kwargs)
            self._tapes = [*map(weakref.ref, self._open_tapes()), weakref.ref(tape)]
        self._live.settle()
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
        with self.uneven(), torch.no_grad():
            return self.module.generate(*args, **kwargs)  # pyrefly: ignore[not-callable]

    def compile(self, **options: Any) -> None:
        """Compile the blocks of the module with ``torch.compile``.

        Repeated blocks are compiled one by one, so that stage 3 gathers one block at a time.

        Args:
            options: of ``torch.compile``.
        """
        self._live.leave("forward", "zero_grad")
        compile_blocks(self.module, **options)
        self._live.enter(self.run, self.zero_grad)

    # Steps.

    def prepare(self) -> None:
        """End backward passes, and look for other trained leaves, as each call does."""
        self._settle()
        self._live.check_unwritten()
        self._regroup()

    def _regroup(self) -> None:
        """Go on with other trained leaves or groups, if there are any."""
        if self._groups is None or self._is_averaged or not self._groups.refresh():
            return
        if self._sum.num_passes:
            raise OptionError(
                "trained parameters change between steps; got a change between the micro-batches "
                "of a step; unfreeze parameters, or add a group, after engine.step()"
            )
        if "loss_fn" in self._options:
            raise OptionError(
                "ranks of a model axis train the leaves that they had at first; got another "
                "requires_grad, or another group; make a new engine of the saved weights"
            )
        self.recipe = self._composed()
        self._settle_masters()
        values = deferred_values(self._state, self._params, masters=True)
        self._state = carried(self._state, self.recipe.init(values))
        self._calls.reset()
        self._show()

    def load(
        self,
        path: str | Path,
        *,
        keeps_groups: bool = False,
        **options: Any,
    ) -> Any:
        """Load a state of any stage and any number of ranks; see :func:`zfun.load`.

        With an optimizer of torch, leaves that the saved run or this one has unfrozen train on.
        Gradients that no step has taken stay, as in torch.

        Args:
            path: of :meth:`save` or :func:`zfun.save`.
            keeps_groups: whether the optimizer's groups keep their numbers, such as ``lr``.
            options: of :func:`zfun.load`.

        Returns:
            The plain values of the caller.
        """
        self._check_writable("load()")
        self._settle()
        if self.has_grads:
            self._gathered()
        try:
            loaded = self._loaded(path, options)
        except (PeerLost, CollectiveMismatch):
            raise
        except Exception:
            # Whatever the error of one rank, the others have a CheckpointError, and go on alike.
            if (found := self._load_others(path, **options)) is None:
                raise
            loaded = found
        data = loaded.data
        if self._groups is not None:
            data = self._groups.restored(data, self._state.opt_state, keeps=keeps_groups)
        self.state = loaded.state
        self._end_calls()
        # Leaves that the saved run had frozen, and this one has not, join it now.
        self._regroup()
        return data

    def _loaded(self, path: str | Path, options: Mapping[str, Any]) -> checkpoint.Loaded[Any]:
        """Load a state that trains the leaves of this one."""
        state = self.state
        if self._groups is not None:
            is_number, kept = group_number(state), options.get("reset")
            reset = lambda key: is_number(key) or (kept is not None and kept(key))
            options = {**options, "reset": reset}
        return checkpoint.load(path, state, **options)

    def _load_others(
        self, path: str | Path, *, step: int | None = None, **options: Any
    ) -> checkpoint.Loaded[Any] | None:
        """Load the state of a run that trains other leaves; ``None`` if there is none."""
        if (groups := self._groups) is None:
            return None
        # A writer may publish meanwhile, so ranks take the checkpoint that the first one sees.
        found, _ = attempt(lambda: trained_in(path, step))
        first = agree(agreement_group(self._group), None, found)[0]
        if first is None or not first[1]:  # a run without an optimizer
            return None
        chosen, names = first
        held, before, labels = groups.held(), (self.recipe, self._state), groups.labels
        groups.train(names)
        if groups.labels.keys() != set(names) or groups.labels == labels:
            groups.go_back(held)
            return None
        self._begin()
        buffers = {name: x.clone() for name, x in self._buffers.named().items()}  # filled in place
        try:
            self.recipe = self._composed()
            self._state = self.recipe.init(deferred_values(self._state, self._params, masters=True))
            loaded = self._loaded(chosen, options)
        except BaseException:
            groups.go_back(held)
            self.recipe, self._state = before
            self._buffers.write(buffers)
            raise
        self._calls.reset()
        return loaded

    def step(self, *, boundary: bool | None = None) -> StepInfo | None:
        """Update the parameters, if ``accumulate`` calls of backward have been made.

        Args:
            boundary: whether to update now; a sum of fewer calls is divided by ``accumulate`` too.

        Returns:
            The results of the step, equal on all ranks, or ``None`` without an update. The loss is
            NaN where a backward pass was ``loss.backward()``.

        Raises:
            ZfunError: no gradients since the last step.
        """
        self._settle()
        if not self._sum.num_passes:  # A loop without calls.
            self._regroup()
        if boundary is not False and not (self.has_grads or self.passes_empty_steps):
            self._check_same()
            raise ZfunError(
                "step() takes the gradients of backward(); got none since the last step; call "
                "engine.backward(loss) first"
            )
        is_boundary = self.is_boundary if boundary is None else boundary
        return self._hooked(self._update) if is_boundary else None

    def _update(self) -> StepInfo | None:
        found, loss, told = self._collected(steps=True)
        if found is None:
            return None
        self._end_calls()  # other ranks may wait for windows of calls without a backward pass
        grads = self._sum.rescaled(found)
        return self._stepped(lambda x: self.recipe.update(x, grads, loss), lambda: told.flags[1:])

    def whole_step(self, batch: Any) -> StepInfo:
        """Take a step of ``recipe``, by the loss of ``zero=`` instead of calls and backward passes.

        Args:
            batch: for that loss, such as one of :func:`zfun.pipeline`.
        """
        self.prepare()
        step = lambda state: self.recipe.step(state, batch)
        return self._hooked(lambda: self._stepped(step, self._buffers.changes))

    def load_optimizer_state(self, given: Mapping[str, Any], *, whole: bool = False) -> None:
        """Take what ``state_dict()`` of a torch optimizer returns; every rank must call.

        Args:
            given: the same on every rank.
            whole: whether the moments and the master weight of every leaf must be there.

        Raises:
            SpecMismatch: as for another optimizer.
            CheckpointError: a moment is missing.
        """
        self._check_writable("load_optimizer_state()")
        groups, given = self._torch_groups(), by_position(given)
        groups.retain(name for name, i in groups.positions().items() if i in given["state"])
        self._settle()
        self._regroup()
        self._state = with_torch_state(self._state, groups, given, whole=whole)
