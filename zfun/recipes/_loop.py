"""The functions of a training loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from zfun import ops, stores, transforms, tree
from zfun.checkpoint import check_saves
from zfun.collectives import global_ranks, model_groups
from zfun.errors import OptionError, SpecMismatch, ZfunError
from zfun.flat import Flat
from zfun.parallel import LocalTree, Pipeline, knowing, model_axes
from zfun.placement import R
from zfun.recipes._checks import (
    check_is_flat,
    check_is_state,
    check_order,
    check_same_options,
    refuse_captures,
    refuse_transforms,
)
from zfun.recipes._compose import gradient_of
from zfun.recipes._known import KnownStates
from zfun.recipes._late import counts_of, with_counts
from zfun.recipes._options import ZeroOptions
from zfun.recipes._precision import whole_tree
from zfun.recipes._start import first_values, local_tree, role_of
from zfun.recipes._state import StepInfo, Zero, ZeroState
from zfun.recipes._update import is_one, scale_of, takes_terms, updated
from zfun.transforms import GradientFunction, MicroBatches, Pullback, Tape, WeightedMean, vjp
from zfun.transforms.buffers import place_buffers, running
from zfun.transforms.grads._pullback import number_recipe
from zfun.transforms.optimizer._placing import deliver
from zfun.transforms.optimizer.in_backward import UpdateHook, begin
from zfun.typing import Gradient

_Out = TypeVar("_Out")
_Args = ParamSpec("_Args")

# Gradient functions are kept for so many losses.
_MAX_COMPOSED = 8


class Loop:
    """A recipe, and the values that it keeps between steps.

    Attributes:
        recipe: the options.
        known: the kinds of states that were compared with the options.
        hook: the update in backward of the step that runs now.
        local: how the logical tree is spread, if the loss goes over model axes.
        counts: the counts of the last state, where the device decides whether to take a step.
        number: among the recipes of the group that have made a state; 0 before.
    """

    def __init__(self, recipe: ZeroOptions) -> None:
        recipe = _with_micro_batches(recipe)
        self.recipe = recipe
        self.known = KnownStates(recipe)
        self.hook = UpdateHook()
        self.local: LocalTree | None = None
        self.counts = stores.LateValues()
        self.number = 0
        # By the id of the loss: the loss, the frozen leaves, how far backward sums, the gradient.
        self._composed: dict[int, tuple[Callable[..., Any], Flat | None, int, Gradient]] = {}

    def functions(self) -> Zero[Any, Any]:
        """Return the functions for a user."""
        return Zero(
            self._guarded(self.init),
            self._guarded(self.step),
            ops.uncompiled(self.params),
            self._guarded(self.vjp),
            self._guarded(self.update),
            self._guarded(self.record),
            self.recipe,
        )

    def init(self, params: tree.Tree, *, init: str = "check") -> ZeroState:
        """Return the first state."""
        if init not in ("check", "broadcast"):
            raise OptionError(
                f"init must be 'check' or 'broadcast'; got {init!r}; 'broadcast' takes rank 0's "
                "values"
            )
        recipe = self.recipe
        check_order(recipe.order, params)
        params = whole_tree(params)
        logical, role, rule = params, role_of(recipe), recipe.buffers
        if axes := model_axes(recipe.loss_fn):
            self.local = local = local_tree(recipe, params, axes, init)
            params = local.parts(params)
            # Of the logical leaves, because ranks may hold other parts, or ties under other paths.
            role = lambda path, leaf: local.roles[path]
            rule = None if rule is None else local.asks(rule)
        check_same_options(recipe, logical)
        if recipe.buffers is None:
            written = None
        else:
            is_buffer = lambda path, leaf: role(path, leaf) == "buffer"
            written, params = tree.partition(params, is_buffer)
        trained, frozen, opt_state = first_values(recipe, params, role, init, self.local)
        self.known.made(trained, frozen)
        self.number = number_recipe(recipe.group)
        return ZeroState(
            trained,
            frozen,
            opt_state,
            step=0,
            num_skipped=0,
            loss_scale=None if recipe.scaler is None else recipe.scaler.init(),
            buffers=place_buffers(
                written,
                recipe.group,
                rule,
                init,
                None if self.local is None else self.local.placed,
            ),
        )

    def step(self, state: ZeroState, batch: Any) -> tuple[ZeroState, StepInfo]:
        """Take a step."""
        recipe, hook = self.recipe, self.hook
        self._check(state)
        check_saves(recipe.group)
        if isinstance(recipe.loss_fn, Pipeline):
            return self._step_of_pipeline(recipe.loss_fn, state, batch)
        is_whole = recipe.num_micro_batches == 1
        scale, terms = scale_of(state), takes_terms(recipe, state)
        is_scaled = not is_one(scale)
        hook.left.clear()
        vg = self._gradient(recipe.loss_fn, state)
        vg = transforms.scale_loss(vg, scale) if is_scaled else vg
        vg = vg if is_whole else transforms.accumulate(vg, recipe.num_micro_batches)
        hook.update = begin(
            recipe.rule,
            state.opt_state,
            state.params,
            donate=recipe.donate,
            in_backward=recipe.stage >= 2 and not terms and is_whole and state.loss_scale is None,
            stores_grads=recipe.offload.grads is not None,
            missed=state.missed.of(state.params.layout.leaves) if recipe.leaves_out else {},
        )
        begun = hook.update
        if is_whole and isinstance(batch, MicroBatches):
            batch = transforms.split_batch(batch, 1)[0]
        try:
            with running(state.buffers) as left:
                value, grads = vg(state.params, batch)
        finally:
            hook.update = None
        loss, aux = value if type(value) is tuple else (value, None)
        loss = loss.mean if isinstance(loss, WeightedMean) else loss
        return self._updated(state, grads, loss, left(), aux, begun, spends=True)

    def _step_of_pipeline(
        self, pipeline: Pipeline, state: ZeroState, batch: Any
    ) -> tuple[ZeroState, StepInfo]:
        """Take a step of a loss that runs its own micro-batches."""
        left = state.buffers

        def start(fn: Callable[..., Any], given: Any) -> tuple[Any, Pullback]:
            nonlocal left
            out, pullback, left = self.vjp(fn, state, given, left)
            return out, pullback

        recipe, local, layout = self.recipe, self.local, state.params.layout
        group, rule = recipe.group, recipe.rule

        def delivered(grads: Flat) -> Flat:
            return deliver(grads, rule.placement or R, group, donate=True)

        loss, grads, aux = pipeline.gradients(
            start,
            batch,
            group,
            layout.leaves,
            None if local is None else local.spreads,
            # A layout without leaves knows no device.
            layout.device if layout.leaves or local is None else local.device,
            scale_of(state),
            delivered,
        )
        loss = loss.mean if isinstance(loss, WeightedMean) else loss
        return self._updated(state, grads, loss, left, aux, spends=True)

    def params(
        self, state: ZeroState, select: Callable[[str, Tensor], bool] | None = None
    ) -> tree.Tree:
        """Return the whole parameters, or some of them."""
        refuse_captures()
        check_is_state(state)
        parts = (state.params, state.frozen, state.buffers)
        local = self.local
        if local is None and model_groups(state.params.group):
            raise SpecMismatch(
                "params() of a run over model axes knows the logical tree from init(); got a "
                "zero() that has made no state; call init() of this zero() first"
            )
        chosen = select if select is None or local is None else local.selects(select)
        found = tree.combine(
            *(transforms.unshard(part, chosen) for part in parts if part is not None)
        )
        if local is None:
            return found
        return local.logical(found) if select is None else local.logical(found, select)

    def vjp(
        self, fn: Callable[..., Any], state: ZeroState, batch: Any, buffers: Flat | None = None
    ) -> tuple[Any, Pullback, Flat | None]:
        """Run the first half of a step."""
        self._check(state)
        check_is_flat("buffers", buffers, "the buffers that vjp() returned", optional=True)
        vg = self._gradient(fn, state)
        with running(state.buffers if buffers is None else buffers) as left:
            out, pullback = vjp(vg, state.params, batch)
        return out, pullback, left()

    def update(
        self, state: ZeroState, grads: Flat, loss: Tensor, buffers: Flat | None = None
    ) -> tuple[ZeroState, StepInfo]:
        """Run the second half of a step."""
        check_is_state(state)
        check_is_flat("grads", grads, "the gradients that a pullback returned")
        check_is_flat("buffers", buffers, "the buffers that vjp() returned", optional=True)
        self._check(state)
        check_saves(self.recipe.group)
        return self._updated(state, grads, loss, buffers, None)

    def _updated(
        self, state: ZeroState, *values: Any, **options: Any
    ) -> tuple[ZeroState, StepInfo]:
        """Run the second half of a step, with the counts that the last step has sent."""
        if not self.recipe.decides_on_device:
            return updated(self.recipe, state, *values, **options)
        settled = state._replace(opt_state=with_counts(state.opt_state, self.counts))
        new, info = updated(self.recipe, settled, *values, **options)
        self.counts.send(counts_of(new.opt_state))
        return new, info

    def record(self, fn: Callable[..., Any], state: ZeroState, batch: Any) -> tuple[Any, Tape]:
        """Run the first half of a step, and let the caller run backward."""
        self._check(state)
        vg = self._gradient(fn, state)
        assert isinstance(vg, GradientFunction)
        return vg.record(state.params, batch, self.number)

    def _check(self, state: ZeroState) -> None:
        check_is_state(state)
        self.known.check(state)

    def _gradient(self, fn: Callable[..., Any], state: ZeroState) -> Gradient:
        """Return the gradient of a loss: the last one, which remembers the order of use."""
        summed = 1 if takes_terms(self.recipe, state) else self.recipe.stage
        before = self._composed.pop(id(fn), None)
        if before is None or before[1] is not state.frozen or before[2] != summed:
            vg = gradient_of(self.recipe, fn, state.frozen, summed, self.hook)
            before = (fn, state.frozen, summed, vg)
        self._composed[id(fn)] = before
        if len(self._composed) > _MAX_COMPOSED:
            del self._composed[next(iter(self._composed))]
        return before[3]

    def _guarded(self, method: Callable[_Args, _Out]) -> Callable[_Args, _Out]:
        """Run a method outside of transforms, and give rank and step to its errors."""
        group = self.recipe.group

        @functools.wraps(method)
        def run(*args: _Args.args, **kwargs: _Args.kwargs) -> _Out:
            try:
                rank = global_ranks(group)[group.rank]
                with stores.locating(rank=rank), knowing(model_groups(group)):
                    refuse_transforms()
                    return method(*args, **kwargs)
            except ZfunError as error:
                given = (*args, *kwargs.values())
                state = next((x for x in given if isinstance(x, ZeroState)), None)
                if error.step is None and state is not None:
                    error.step = state.step
                    error.add_note(f"in step {state.step}")
                raise

        return ops.uncompiled(run)


def _with_micro_batches(recipe: ZeroOptions) -> ZeroOptions:
    """Let a pipeline say how many micro-batches a step has."""
    if not isinstance(recipe.loss_fn, Pipeline):
        return recipe
    if recipe.num_micro_batches > 1:
        raise OptionError(
            "a pipeline cuts the batch in its own micro-batches; got num_micro_batches="
            f"{recipe.num_micro_batches} of zero() beside {recipe.loss_fn.num_micro_batches} of "
            "the pipeline; leave it out"
        )
    return dataclasses.replace(recipe, num_micro_batches=recipe.loss_fn.num_micro_batches)
