"""The state of a run, the results of a step, and the functions of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from torch import Tensor

from zfun.errors import OptionError
from zfun.flat import Flat
from zfun.optim import LossScaleState, MissedSteps
from zfun.recipes._options import ZeroOptions
from zfun.transforms import Pullback, Tape
from zfun.typing import Aux, Params

_Given_contra = TypeVar("_Given_contra", contravariant=True)


class ZeroState(NamedTuple):
    """The state of a training run between steps.

    Attributes:
        params: the trained parameters: placement ``R`` at stages 0 to 2, ``S`` at stage 3.
        frozen: the leaves that are not trained, in the same placement; ``None`` if all leaves are
            trained.
        opt_state: the optimizer's state.
        step: steps taken, skipped ones included.
        num_skipped: how many of the last steps in a row were skipped. Where the device decides
            (``max_skipped=None``), this and ``num_applied`` are 0-dim tensors of the device, and so
            are the counts in ``opt_state`` and the loss scale; to read one waits for the device.
        loss_scale: the state of the loss scale; ``None`` without a loss scale.
        buffers: the leaves that the loss writes, whole on every rank; ``None`` where there are
            none. The values of those that are kept by rank differ from rank to rank.
        num_applied: steps taken, skipped ones not included.
        missed: the steps that leaves have missed, because no rank used them.
    """

    params: Flat
    frozen: Flat | None
    opt_state: Any
    step: int
    num_skipped: int | Tensor
    loss_scale: LossScaleState | None = None
    buffers: Flat | None = None
    num_applied: int | Tensor = 0
    missed: MissedSteps = MissedSteps()


class StepInfo(NamedTuple, Generic[Aux]):
    """The results of one step; equal on all ranks.

    Where the device decides whether to take a step (``max_skipped=None``), the numbers are 0-dim
    tensors of the device, except the learning rate; to read one, as ``if info.skipped`` does, waits
    for the device.

    Attributes:
        loss: the loss over all ranks, a scalar.
        grad_norm: the norm of the gradient over all ranks, before any clipping, in float64. If the
            optimizer sums the terms itself (:func:`zfun.optim.onebit_adam`), the sum of the norms
            of the ranks' terms, which is an upper bound.
        skipped: whether gradients were not finite, and the step was not taken.
        bad_leaf: the first leaf with a gradient that is not finite, if the step was skipped;
            ``None`` where the device decides.
        aux: the second result of the loss, from this rank's batch; with ``num_micro_batches`` above
            1 a list of one for each.
        loss_scale: the factor of the loss in backward; 1 without a loss scale.
        learning_rate: of this step, from :meth:`zfun.optim.Optimizer.learning_rate`.
        num_applied: steps taken so far, this one included and skipped ones not included.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: bool | Tensor
    bad_leaf: str | None
    aux: Aux
    loss_scale: float | Tensor = 1.0
    learning_rate: float | None = None
    num_applied: int | Tensor = 0


class _InitFn(Protocol[_Given_contra]):
    def __call__(self, params: _Given_contra, *, init: str = "check") -> ZeroState: ...


def _no_halves(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a loop that was made without vjp and update."""
    del args, kwargs
    raise OptionError(
        "vjp and update are the halves of a step of zf.zero(); got a Zero that was made of init, "
        "step and params alone; make it with zf.zero()"
    )


class Zero(NamedTuple, Generic[Params, Aux]):
    """A training loop's three functions.

    Attributes:
        init: ``init(params, init="check") -> state``: ``"check"`` compares the parameters across
            ranks and raises :class:`zfun.errors.SpecMismatch` on a difference; ``"broadcast"``
            takes rank 0's values. Both compare the options, the optimizer among them.
        step: ``step(state, batch) -> (state, info)``.
        params: ``params(state, select=None) -> the whole tree``; every rank must call. With
            ``select(path, leaf)`` only the chosen leaves are gathered, as by
            :func:`zfun.unshard`, and the tree has holes (``None``) for the others.
        vjp: ``vjp(fn, state, batch, buffers=None) -> (out, pullback, buffers)``: the first half of
            a step, for a loss that is computed outside of ``fn``. ``fn(params, batch)`` gets the
            whole tree in place of the loss, and the result is that of :func:`zfun.vjp`. The
            cotangents are those of the loss times ``state.loss_scale.scale``. The returned buffers
            are those that ``fn`` has left on this rank, for the next call before the update.
        record: ``record(fn, state, batch) -> (out, tape)``: as ``vjp``, but the outputs keep their
            graph, and the backward passes are the caller's: the tape delivers the gradients.
        update: ``update(state, grads, loss, buffers=None) -> (state, info)``: the second half of a
            step, from the gradients of pullbacks (of micro-batches their mean) and the loss over
            all ranks.
        options: with one attribute for each; ``None`` of a loop that was made by hand.
    """

    init: _InitFn[Params]
    step: Callable[[ZeroState, Any], tuple[ZeroState, StepInfo[Aux]]]
    params: Callable[..., Params]
    vjp: Callable[..., tuple[Any, Pullback, Flat | None]] = _no_halves
    update: Callable[..., tuple[ZeroState, StepInfo]] = _no_halves
    record: Callable[..., tuple[Any, Tape]] = _no_halves
    options: ZeroOptions | None = None

    def __repr__(self) -> str:
        return f"Zero({'made by hand' if self.options is None else self.options})"
