"""Backward passes of a live module, the gradients of the next step, and what drops them."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zfun.errors import ZfunError
from zfun.flat import Flat
from zfun.interop.engine._grad_sum import GradSum, Shown, Told, alike_in
from zfun.interop.engine._groups import ParamGroups
from zfun.interop.engine._held import HeldModule, Taken
from zfun.interop.engine._running import run_backward, run_by, running_engine
from zfun.interop.engine._values import deferred_values, leaves_of, whole_values
from zfun.recipes import StepInfo, Zero, ZeroState
from zfun.sources import Deferred
from zfun.transforms import Tape, WeightedMean, scale_grads


class Passes(HeldModule):
    """A module with a state, and the sum of the gradients since the last step."""

    recipe: Zero
    accumulate: int
    clip_norm: float | None
    grad_norm: float | None = None
    keeps_grads = False
    plain_scale = 1.0
    _groups: ParamGroups | None = None
    # Whether each step may clip to another norm.
    _clips: bool
    # The calls since the last step.
    _tapes: Sequence[weakref.ref[Tape]] = ()
    # Whether no call of backward() ends the micro-batches of a step.
    _defers = False

    def backward(
        self,
        loss: Tensor | WeightedMean,
        *,
        scale: float | None = None,
        retain_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Add the gradients of a loss to those of the next step.

        Gradients go to the trained parameters of this engine, and to leaf tensors that are no
        parameters of an engine, as in torch. Gradients of weighted means are the mean over the
        weights of all calls of a step, whatever their number.

        Args:
            loss: a scalar of outputs of this engine, or :func:`zfun.transforms.weighted_mean`.
            scale: the weight of this loss in the sum of a step; by default ``1 / accumulate``.
            retain_graph: keep the graph for another backward pass.
            inputs: parameters and other leaf tensors, which get gradients alone.

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
        total = total.reshape(()).to(torch.promote_types(total.dtype, torch.float32))
        seed = self.loss_scale * (1.0 if scale is None else scale)
        if self._shown:
            # Else backward would add gradients to .grad that are not divided yet.
            self._gathered()
        for tape in tapes:
            tape.weight = weight
        self._sum.begin(weighted=weight is not None)
        run_by(self)
        try:
            run_backward(total, torch.full_like(total, seed), retain_graph, inputs=inputs)
            self._settle()
        except BaseException:
            for tape in tapes:
                tape.close()
            raise
        finally:
            run_by(None)
            for tape in tapes:
                tape.weight = None
        if self._sum.has_run or self._strays():
            self._count(total.detach(), weight, 1.0 if scale is None else scale)
        elif inputs is None and not self.passes_empty_steps:
            self._check_same()
            raise ZfunError(
                "backward() takes a loss of outputs of this engine since its last step; got a loss "
                "that depends on none of them; call backward() of the engine that made the outputs"
            )

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Take whole values of leaves from rank 0; every rank must call."""
        super().write(values)
        for tape in self._open_tapes():
            tape.outdate(values.keys())

    def _count(self, total: Tensor, weight: Any, scale: float) -> None:
        self._sum.count(total, weight, scale)
        self._is_boundary = not self._defers and self._sum.num_passes >= self.accumulate

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward; 1 without a loss scale."""
        scale = self._state.loss_scale
        return 1.0 if scale is None else float(scale.scale)

    def _open_tapes(self) -> list[Tape]:
        return [tape for ref in self._tapes if (tape := ref()) is not None]

    def _check_pass(self, tape: Tape) -> None:
        """Check a backward pass that has come to outputs of this engine."""
        self._live.resume(tape)
        self._sum.had_graph |= torch.is_grad_enabled()
        if running_engine() is None and self.loss_scale != 1.0:
            raise ZfunError(
                "with a loss scale, backward begins with the scaled loss; got loss.backward(); "
                "call engine.backward(loss), in a hook of Lightning loss.backward() of its argument"
            )
        if running_engine() is None and self._last_pass != torch._C._current_graph_task_id():
            self._last_pass = torch._C._current_graph_task_id()
            self._sum.check(1.0, None)
            self._sum.begin(weighted=False)
            device = self._state.params.layout.device
            self._count(torch.full((), torch.nan, device=device), None, 1.0)

    def _take(self, grads: Flat) -> None:
        """Add the gradients of a backward pass."""
        running = running_engine()
        if running is None or running is self:
            self._sum.add(scale_grads(grads, self.plain_scale) if running is None else grads)

    def _settle(self) -> None:
        """End backward passes that autograd has ended."""
        for tape in self._open_tapes():
            tape.finish()

    @property
    def grads(self) -> Flat | None:
        """The sum of the gradients of calls since the last step; ``None`` before backward.

        A loss scale is still in the sum. A write to the buffers counts at the next step. After
        :meth:`norm` or :meth:`clip` the sum is divided as for the step, and has gradients from
        outside of calls too. The bound of :meth:`clip` may be applied as late as in the step. After
        a read of ``.grad`` the sum is ``None``.
        """
        self._settle()
        return self._sum.grads

    @property
    def has_grads(self) -> bool:
        """Whether this rank has gradients for the next step."""
        return self._sum.grads is not None or bool(self._strays())

    @property
    def is_boundary(self) -> bool:
        """Whether the next call of :meth:`step` changes the parameters."""
        # Gradients that code has assigned to .grad come from no backward pass.
        return self._is_boundary or (not (self._sum.num_passes or self._defers) and self.has_grads)

    def _collected(self, *, steps: bool = False) -> tuple[Flat, Tensor, Told]:
        """Return gradients and loss, and what ranks tell, who ``steps`` with the same numbers."""
        strays = self._strays()
        # One message tells the losses, and whether any rank has stray gradients or new buffers.
        told = self._sum.told([bool(strays), *self._buffers.changed()], alike_in(self, steps=steps))
        if told.flags[0]:
            divided = bool(self._shown)
            self._sum.add_strays(strays, self._state.params, divided=divided)
        if not self.keeps_grads:
            # The sum has them now, and a read shows them again.
            self._drop_strays()
            self._shown = Shown()
        return *self._sum.result(told, self.accumulate), told

    def _gathered(self) -> None:
        """Collect the gradients so far, before others follow."""
        self._collected()
        stay = self._params if self.keeps_grads else self._extra
        self._taken = {
            name: (x, x._version, x.clone()) for name, x in self._left().items() if name in stay
        }

    def norm(self) -> Tensor:
        """Return the norm of the gradient that the next step takes.

        Before the last backward pass of a step this is the norm of the passes so far. After
        :meth:`clip` it is that of the clipped gradient. Every rank must call.
        """
        self._settle()
        self._gathered()
        norm, bound = self._sum.norm(), self._sum.bound
        return norm if bound is None else norm.clamp(max=bound)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients since the last step to a norm; every rank must call.

        As after ``clip_grad_norm_`` of torch, later passes add to the clipped gradients.

        Args:
            max_norm: the bound; infinity clips nothing.

        Returns:
            The norm before, as :meth:`norm` returns.
        """
        norm = self.norm()
        if max_norm < math.inf:
            self._sum.clip(norm, max_norm)
            if not (self._clips and self._groups is not None and max_norm > 0):
                self._sum.cut()
        return norm

    def clip_value(self, bound: float) -> None:
        """Clip each element of the gradients since the last step; every rank must call.

        With a loss scale, numbers that are not finite stay so, and the step is skipped.

        Args:
            bound: the largest absolute value.
        """
        self._settle()
        self._gathered()
        self._sum.clamp(bound, keeps_overflow=self._state.loss_scale is not None)

    def _left(self) -> dict[str, Tensor]:
        """Return gradients that backward has left in parameters, by name."""
        with torch._C.DisableTorchFunctionSubclass():
            found = {name: x.grad for name, x in self._params.items() if x.grad is not None}
        for name, x in self._live.strays.items():
            if x.grad is not None:
                found[name] = x.grad + found[name] if name in found else x.grad
        return found

    def _strays(self) -> dict[str, Tensor]:
        """Return the gradients left in parameters that the sum does not have, by name."""
        found = self._left()
        for name, (grad, version, value) in self._taken.items():
            now = found.pop(name, None)
            if now is not grad or now._version != version:
                found[name] = -value if now is None else now - value
        return found

    def _hooked(self, step: Callable[[], Any]) -> Any:
        """Check and take a step, with the hooks of the optimizer around both."""

        def checked() -> Any:
            self._check_same()
            self._live.check_unwritten()
            self._check_here("a step", "parameters", "the optimizer's state")
            self._check_writable("a step")
            self._settle_masters()
            return step()

        return checked() if self._groups is None else self._groups.hooked(checked)()

    def _stepped(
        self, step: Callable[[ZeroState], Any], new_buffers: Callable[[], Sequence[bool]]
    ) -> StepInfo:
        """Step with the numbers that the groups have now, and begin the calls of the next step.

        ``new_buffers`` tells after the step which buffers any rank has changed.
        """
        if self._groups is not None:
            bounds = [x for x in (self.clip_norm, self._sum.bound) if x is not None]
            opt_state = self._groups.set_in(self._state.opt_state, min(bounds, default=None))
            self._state = self._state._replace(opt_state=opt_state)
        self._state, info = step(self._state)
        self._buffers.merge(new_buffers())
        self.grad_norm = float(info.grad_norm)
        self._show()
        self._begin()
        return info

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

    def show_grads(self, name: str, *, is_read: bool) -> Tensor | None:
        """Move the gradients since the last step to ``.grad``, whole; every rank must call.

        A read or write of ``.grad`` outside of backward calls this. The next step takes what is
        there then, so code may scale, clip or drop it. Gradients are divided by ``accumulate``, and
        those of later calls will be; what a plain ``backward()`` adds counts as it stands.
        Gradients of weighted means stay where they are.

        Args:
            name: of the parameter whose gradient is read or written.
            is_read: whether it is read; an engine may return what the read gives instead.
        """
        self._settle()
        if is_read:
            self._sum.check_read(name, self)
        if not (self._sum.is_weighted or (self._sum.grads is None and self._is_shown(name))):
            self._move_grads()
        return None

    def _move_grads(self) -> None:
        held = self._shown.held(self._params)
        self._collected()
        self._drop_strays()
        self._shown |= self._sum.move(self._params, held)
        self._taken.clear()

    def _is_shown(self, name: str) -> bool:
        """Whether ``.grad`` has no gradient of this rank alone."""
        stray = self._live.strays.get(name)
        has_own = stray is not None and stray.grad is not None
        return not has_own and self._shown.is_all(name, self._params[name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, but those of the parameters of ``extra=``."""
        self._drop_strays()
        self._reset()

    def _drop_strays(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for name, x in (*self._params.items(), *self._live.strays.items()):
                if x.grad is not None and name not in self._extra:
                    x.grad = None

    def _reset(self) -> None:
        apart = () if self._groups is None else self._groups.extra
        self._sum = GradSum(self._group, apart, self.loss_scale)
        # Gradients that stay in .grad, of which the sum has the value: tensor, version and value.
        self._taken: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._shown = Shown()
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

    # Values that end the calls of a step.

    def close(self, *, average: bool = False) -> None:
        """Let the module be a plain one with whole values; every rank must call.

        Values have the dtypes that the module had, from master weights where there are some. The
        gradients since the last step are in ``.grad``, but for those of weighted means.

        Args:
            average: whether they are those of the average, if the state has one.

        Raises:
            OptionError: inside of :meth:`averaged`.
        """
        self.free(average=average)
        if self._groups is not None:
            self._groups.leave()

    def free(self, *, average: bool = False) -> None:
        """Close all but the optimizer, which keeps the moments; every rank must call."""
        self._check_writable("close()")
        self._live.check_unwritten()
        self._settle_masters()
        before = self._state
        try:
            if average:
                self._take_average()
            if self._is_sharded or self._dtypes != leaves_of(self._state):
                values = whole_values(self._state, frozenset(self._params), masters=True)
                self._live.show({name: x.to(self._dtypes[name]) for name, x in values.items()})
        except BaseException:
            self._state = before
            self._show()
            raise
        self._state = before
        self._leave_grads()
        self._end_calls()
        self._reset()
        self._live.release()
        self._buffers.release()

    def _leave_grads(self) -> None:
        """Move the gradients since the last step to plain parameters; every rank must call."""
        self._settle()
        if self._sum.grads is not None and not self._sum.is_weighted:
            self._move_grads()
        with torch._C.DisableTorchFunctionSubclass():
            for name, grad in self._left().items():
                self._params[name].grad = grad.to(self._params[name].dtype)

    def hand_over(self) -> dict[str, Deferred]:
        """Let another engine take the module, not the moments; this one ends. Every rank must call.

        Returns:
            At stage 3 the values by name, which the module does not have until the other engine
            takes them; else nothing.

        Raises:
            OptionError: inside of :meth:`averaged`.
        """
        self._check_writable("hand_over()")
        self._live.check_unwritten()
        self._begin()
        self._live.release()
        self._buffers.release()
        if self._groups is not None:
            self._groups.leave()
        rest: Any = self._state._replace(opt_state=None, buffers=None)
        self._state, self.has_module = Taken(), False  # pyrefly: ignore[bad-assignment]
        own = {id(param) for param in self.module.parameters()}
        params = {name: x for name, x in self.leaves.items() if id(x) in own}
        return deferred_values(rest, params) if self._is_sharded else {}

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
