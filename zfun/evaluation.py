"""Functions of the parameters of a state, without gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from zfun import stores, tree
from zfun.collectives import Group, gather_values
from zfun.errors import OptionError
from zfun.flat import Flat, flats, unravel
from zfun.modules import Functional
from zfun.optim import MasterState, averages_of, masters_of
from zfun.options import instance, takes
from zfun.placement import S
from zfun.recipes import ZeroState, check_is_state
from zfun.transforms import ScheduleOptions, ShardedLoss, redistribute, shard_params

_Out = TypeVar("_Out")
_SCHEDULE = instance(ScheduleOptions, "a zf.ScheduleOptions", "zf.ScheduleOptions(prefetch=2)")


@takes(schedule=_SCHEDULE | None)
def evaluate(
    fn: Callable[[Any, Any], _Out], group: Group, *, schedule: ScheduleOptions | None = None
) -> Evaluation[_Out]:
    """Let a function of parameters run on a state of any stage, without gradients.

    At stage 3 each bucket is gathered where ``fn`` uses a leaf of the bucket, and freed after the
    last use, so no rank ever holds all parameters; shards in a store are read ahead. Every rank
    must call equally often, or inside of :meth:`Evaluation.uneven`. Below stage 3 nothing is sent.

    Args:
        fn: ``(params, batch) -> any tree``, written for whole parameters: a loss, a forward pass,
            a step of generation. ``zf.cast(fn, torch.bfloat16)`` computes in another dtype.
        group: the group of :func:`zfun.zero`.
        schedule: when stage 3 gathers and releases buckets; see :func:`zfun.shard_params`.

    Returns:
        ``(state, batch) -> fn(params, batch)``, where ``params`` is the whole tree: trained leaves,
        frozen leaves, and copies of the buffers. The state does not change.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        ...     zero = zf.zero(3, loss, zf.optim.sgd(0.25), group)
        ...     forward = evaluate(lambda params, x: params["w"] * x, group)
        ...     return forward(zero.init({"w": torch.tensor([1.0, 2.0])}), torch.tensor(10.0))
        >>> zf.simulate(2, main)[0]
        tensor([10., 20.])
    """
    return Evaluation(fn, group, schedule)


class Evaluation(Generic[_Out]):
    """A function of a state and a batch, which :func:`evaluate` returns.

    Args:
        fn: ``(params, batch) -> any tree``.
        group: the ranks.
        schedule: when stage 3 gathers and releases buckets.
    """

    def __init__(
        self, fn: Callable[[Any, Any], _Out], group: Group, schedule: ScheduleOptions | None
    ) -> None:
        self._fn, self._group, self._schedule = fn, group, schedule
        self._buffers: tree.Tree = None
        self._is_idle = False
        # The sharded function remembers the order of use, and belongs to one set of frozen leaves.
        self._sharded: tuple[Flat | None, ShardedLoss] | None = None

    def __call__(self, state: ZeroState, batch: Any) -> _Out:
        """Return ``fn(params, batch)``; at stage 3 every rank calls equally often."""
        check_is_state(state)
        with torch.no_grad():
            self._buffers = _whole(state.buffers, copy=True)
            if state.params.placement is S:
                return self._on_shards(state.frozen)(state.params, batch)
            parts = (state.params, state.frozen)
            whole = [_whole(part, copy=False) for part in parts if part is not None]
            return self._call(tree.combine(*whole), batch)

    @contextlib.contextmanager
    def uneven(self, state: ZeroState) -> Iterator[Callable[[Any], _Out]]:
        """Let the ranks call different numbers of times, as a context.

        At the end of the context a rank gathers with the other ranks, and computes nothing, until
        every rank has come to the end. At stage 3 each call costs one byte more from each rank.

        Args:
            state: as for a call.

        Returns:
            A context whose value is ``batch -> fn(params, batch)``.

        Example:
            >>> import zfun as zf
            >>> def main(group):
            ...     loss = lambda params, batch: ((params["w"] - batch) ** 2).sum()
            ...     zero = zf.zero(3, loss, zf.optim.sgd(0.25), group)
            ...     state = zero.init({"w": torch.tensor([1.0, 2.0])})
            ...     with evaluate(loss, group).uneven(state) as run:
            ...         return [run(torch.tensor(1.0)).item() for _ in range(1 + group.rank)]
            >>> zf.simulate(2, main)
            [[1.0], [1.0, 1.0]]
        """
        check_is_state(state)
        if state.params.placement is not S:
            yield functools.partial(self, state)
            return

        def run(batch: Any) -> _Out:
            self._meet(state, is_over=False)
            return self(state, batch)

        yield run
        self._is_idle = True
        try:
            while self._meet(state, is_over=True):
                self(state, None)
        finally:
            self._is_idle = False

    def _meet(self, state: ZeroState, *, is_over: bool) -> bool:
        """Tell the ranks whether this rank is at the end; return whether any rank goes on."""
        flags = gather_values(torch.tensor([is_over], dtype=torch.uint8), self._group, "flag")
        # The order of use must not be learnt from a rank that uses nothing.
        self._on_shards(state.frozen).learns = not bool(flags.any())
        return not bool(flags.all())

    def _call(self, params: tree.Tree, batch: Any) -> Any:
        if self._is_idle:
            return None
        whole = params if self._buffers is None else tree.combine(params, self._buffers)
        return self._fn(whole, batch)

    def _on_shards(self, frozen: Flat | None) -> ShardedLoss:
        if self._sharded is None or self._sharded[0] is not frozen:
            loss = shard_params(self._call, self._group, frozen=frozen, schedule=self._schedule)
            assert isinstance(loss, ShardedLoss)
            self._sharded = (frozen, loss)
        return self._sharded[1]


@takes(
    apply=instance(Functional, "a function made by zf.functional()", "zf.functional(model)"),
    state=instance(ZeroState, "a state of zf.zero()", "zero.init(params)"),
    schedule=_SCHEDULE | None,
)
@contextlib.contextmanager
def bound(
    apply: Functional,
    state: ZeroState,
    group: Group,
    *,
    schedule: ScheduleOptions | None = None,
) -> Iterator[Any]:
    """Make a copy of a module whose calls gather the parameters of a state, as a context.

    The copy has all methods of the class, such as ``generate`` of Hugging Face. Each call of the
    copy gathers each bucket where a layer uses the bucket, reads shards in a store ahead, and
    frees the bucket after the use. Ranks may call the copy different numbers of times; at the end
    of the context they wait for each other, as in :meth:`Evaluation.uneven`.

    Args:
        apply: made by :func:`zfun.functional`; the state has the parameters by name.
        state: of any stage.
        group: the group of :func:`zfun.zero`.
        schedule: as in :func:`evaluate`.

    Returns:
        A context whose value is the copy. The parameters of the copy have shapes, dtypes and the
        device, and no values.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     apply = zf.functional(torch.nn.Linear(3, 1))
        ...     loss = lambda params, x: apply(params, x).sum()
        ...     zero = zf.zero(3, loss, zf.optim.sgd(0.1), group)
        ...     state = zero.init({"weight": torch.ones(1, 3), "bias": torch.ones(1)})
        ...     with bound(apply, state, group) as model:
        ...         return model(torch.ones(3))
        >>> zf.simulate(2, main)[0]
        tensor([4.])
    """
    device = state.params.layout.device
    hollow = {
        name: torch.empty((), dtype=leaf.dtype, device=device).expand(leaf.shape)
        for name, leaf in apply.params.items()
    }
    model = apply.bind(hollow)
    run = evaluate(
        lambda params, call: apply(params, *call[0], **call[1]), group, schedule=schedule
    )
    with run.uneven(state) as call:

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return call((args, kwargs))

        model.forward = forward
        yield model


def averaged(state: ZeroState) -> ZeroState:
    """Put the average of :func:`zfun.optim.ema` in the place of the parameters.

    The values have the dtypes of the parameters. While the average is used, this rank's part of it
    is on the device, also where the state is in a store. At stages 1 and 2 each rank has a part of
    the average, so every rank must call; at stages 0 and 3 nothing is sent, and the result may
    share its memory with ``state``, so use it before the next step.

    Args:
        state: of a run whose optimizer is ``ema(decay, ...)``.

    Returns:
        The same state with averaged parameters and master weights, for :func:`evaluate`,
        ``zero.params()`` and :func:`zfun.save`. Training goes on from ``state`` itself.

    Raises:
        OptionError: the optimizer keeps no average, or one of some leaves only.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     loss = lambda params, batch: (params["w"] * batch).sum()
        ...     zero = zf.zero(3, loss, zf.optim.ema(0.5, zf.optim.sgd(1.0)), group)
        ...     state, _ = zero.step(zero.init({"w": torch.zeros(2)}), torch.tensor(-8.0))
        ...     return zero.params(averaged(state))
        >>> zf.simulate(2, main)[0]
        {'w': tensor([4., 4.])}
    """
    check_is_state(state)
    params = state.params
    found = [flat for node in averages_of(state.opt_state) for flat in flats(node.average)]
    if len(found) != 1 or len(found[0].buffers) != len(params.buffers):
        raise OptionError(
            "averaged() takes the state of one optimizer that averages all parameters; got "
            f"{len(found) or 'no'} averages; make the optimizer of zf.zero with "
            "zf.optim.ema(decay, optimizer), outside of by_label() and chain()"
        )
    average = stores.resident(found[0])
    rounded = average.with_buffers(
        buffer.to(bucket.dtype)
        for buffer, bucket in zip(average.buffers, average.layout.buckets, strict=True)
    )
    if rounded.placement is not params.placement:
        rounded = redistribute(rounded, params.placement, params.group, name="average")

    def with_masters(node: Any) -> Any:
        # The exact value of a parameter is its master weight, which checkpoints export.
        if not (isinstance(node, MasterState) and isinstance(node.master, Flat)):
            return node
        dtype = node.master.buffers[0].dtype
        return node._replace(master=masters_of(average, average, dtype))

    is_part = lambda x: isinstance(x, MasterState | Flat)
    opt_state = tree.map(with_masters, state.opt_state, is_leaf=is_part)
    return state._replace(params=rounded, opt_state=opt_state)


def _whole(flat: Flat | None, *, copy: bool) -> tree.Tree:
    if flat is None:
        return None
    whole = unravel(stores.resident(flat))
    return tree.map(torch.clone, whole) if copy else whole
