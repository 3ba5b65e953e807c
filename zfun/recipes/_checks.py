"""The checks of options, of states and of gradients."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from zfun import stores, tree
from zfun.collectives import (
    Group,
    LeafRecord,
    check_same,
    gather_values,
    global_ranks,
)
from zfun.compression import Compression
from zfun.errors import LeafError, OptionError, SpecMismatch, ZfunError
from zfun.flat import Flat, own_piece
from zfun.optim import LossScale
from zfun.placement import P, S
from zfun.recipes._precision import Precision
from zfun.recipes._state import ZeroState
from zfun.reductions import Spent
from zfun.sources.deferred import spec_of
from zfun.stores import Offload
from zfun.transforms import ScheduleOptions

_Out = TypeVar("_Out")
_Args = ParamSpec("_Args")


def check_options(
    stage: int, offload: Offload, compression: Compression, schedule: ScheduleOptions
) -> None:
    if stage == 3:
        return
    if offload.params is not None:
        raise OptionError(
            f"Offload.params keeps shards, which only stage 3 has; got stage {stage}; use "
            "stage=3, or leave params out of Offload()"
        )
    if compression.params is not None:
        raise OptionError(
            f"Compression.params is for stage 3, whose shards stay exact; got stage {stage}; use "
            "stage=3, or leave params out of Compression()"
        )
    if schedule != ScheduleOptions(schedule.prefetch):
        raise OptionError(
            "the options of ScheduleOptions except prefetch are for gathered parameters, which "
            f"only stage 3 has; got {schedule} at stage {stage}; use stage=3, or leave schedule out"
        )


def check_order(order: Sequence[str] | None, params: tree.Tree) -> None:
    known = dict.fromkeys(tree.paths(params))
    for path in order or ():
        if path not in known:
            near = difflib.get_close_matches(path, known, n=1)
            raise OptionError(
                f"order of zero() must name leaves of the parameters; got {path!r}; "
                + (f"did you mean {near[0]!r}?" if near else "zf.planner.order_of_use() makes one"),
                leaf=path,
            )


def check_same_options(
    options: dict[str, object],
    of_leaves: dict[str, Callable[[str, Any], object] | None],
    params: tree.Tree,
    group: Group,
) -> None:
    """Compare across ranks the options by name, and the results of functions of leaves."""
    if group.size == 1:
        return
    words = dict(options)
    for name, of_leaf in of_leaves.items():
        if of_leaf is not None:
            leaves = zip(tree.paths(params), tree.leaves(params), strict=True)
            words |= {f"{name}[{path}]": of_leaf(path, spec_of(leaf)) for path, leaf in leaves}
    records = [LeafRecord.of_option(name, value) for name, value in words.items()]
    check_same(records, group, "options", kind="option")


def in_words(
    policy: Precision, codecs: Compression, schedule: ScheduleOptions
) -> dict[str, object]:
    """Describe options that all ranks must share, by name."""
    words: dict[str, object] = {}
    for name in ("param", "compute", "reduce", "master"):
        words[f"precision.{name}"] = getattr(policy, name)
    if isinstance(policy.loss_scale, LossScale):
        state = policy.loss_scale.init()
        words |= {f"loss_scale.{name}": x.tolist() for name, x in state._asdict().items()}
    words |= {"compression.params": codecs.params, "compression.grads": codecs.grads}
    words |= {f"schedule.{field.name}": getattr(schedule, field.name) for field in fields(schedule)}
    return words


def check_is_state(state: Any) -> None:
    """Raise :class:`SpecMismatch` if a value is no state of :func:`zfun.zero`."""
    if isinstance(state, ZeroState):
        return
    inner = getattr(state, "state", None)
    remedy = (
        "pass its .state, as in zf.load(path, like=state).state"
        if isinstance(inner, ZeroState)
        else "pass the state that init() or the last step() returned; step() returns a state and "
        "a StepInfo"
    )
    raise SpecMismatch(
        f"the state must be a ZeroState; got a value of type {type(state).__name__}; {remedy}"
    )


def check_is_flat(name: str, value: Any, remedy: str, *, optional: bool = False) -> None:
    """Raise :class:`SpecMismatch` if an argument of ``vjp`` or ``update`` is no flat value."""
    if not (isinstance(value, Flat) or (optional and value is None)):
        raise SpecMismatch(
            f"{name} must be a Flat; got a value of type {type(value).__name__}; pass {remedy}"
        )


def check_used(state: ZeroState, num_unused: Sequence[int], group: Group) -> None:
    """Refuse a step without a gradient on any rank; each rank has a number of unused leaves."""
    num_leaves = len(state.params.layout.leaves)
    if not num_leaves or min(num_unused) < num_leaves:
        return
    raise LeafError(
        f"a loss must use its parameters; in step {state.step} no trained leaf got a gradient on "
        "any rank; compute with the parameters that the loss receives, as in "
        "torch.func.functional_call(model, params, (x,)) instead of model(x), and do not detach "
        "them; the state is as it was",
        rank=global_ranks(group)[group.rank],
        step=state.step,
    )


def naming_the_step(
    step: Callable[Concatenate[ZeroState, _Args], _Out],
) -> Callable[Concatenate[ZeroState, _Args], _Out]:
    """Give the number of the step to the errors of a step."""

    @functools.wraps(step)
    def named(state: ZeroState, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Out:
        try:
            return step(state, *args, **kwargs)
        except ZfunError as error:
            if error.step is None and isinstance(state, ZeroState):
                error.step = state.step
                error.add_note(f"in step {state.step}")
            raise

    return named


def outside_transforms(fn: Callable[_Args, _Out]) -> Callable[_Args, _Out]:
    """Refuse to be traced or transformed, because a step reads numbers and starts collectives."""

    @functools.wraps(fn)
    def checked(*args: _Args.args, **kwargs: _Args.kwargs) -> _Out:
        level = torch._C._functorch.peek_interpreter_stack()
        if level is not None:
            around = f"torch.func.{level.key().name.lower()}"
        elif torch._C._get_tracing_state() is not None:
            around = "torch.jit.trace"
        elif (
            torch.compiler.is_exporting()
            or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        ):
            around = "torch.export, make_fx or another tracer"
        else:
            return fn(*args, **kwargs)
        raise ZfunError(
            "a step reads numbers and starts collectives, so a step runs outside of transforms and "
            f"traces; got a call inside of {around}; transform or trace the loss alone, and "
            "differentiate with zf.vjp()"
        )

    return checked


def naming_the_rank(fn: Callable[_Args, _Out], group: Group) -> Callable[_Args, _Out]:
    """Give the rank to the errors of stores."""

    @functools.wraps(fn)
    def named(*args: _Args.args, **kwargs: _Args.kwargs) -> _Out:
        with stores.locating(rank=global_ranks(group)[group.rank]):
            return fn(*args, **kwargs)

    return named


def first_bad_leaf(grads: Flat) -> str | None:
    """Return the path of the first leaf with a gradient that is not finite, over all ranks."""
    group, layout = grads.group, grads.layout
    first = len(layout.leaves)
    whole = grads.placement is P
    # The gradients of a bucket that a step has spent were finite.
    left = [i for i, buffer in enumerate(grads.buffers) if not isinstance(buffer, Spent)]
    for index, buffer in zip(left, stores.reading(grads.select(left)), strict=True):
        is_piece = whole or grads.placement is S
        piece = buffer if is_piece else own_piece(buffer, layout.buckets[index], group)
        bad = torch.nonzero(~torch.isfinite(piece)).view(-1) + (
            0 if whole else layout.buckets[index].span(group.rank, group.size)[0]
        )
        leaves = layout.buckets[index].leaves
        ends = torch.tensor(
            [layout.leaves[leaf].offset for leaf in leaves[1:]],
            dtype=torch.int64,
            device=bad.device,
        )
        # min(), because leaves need not lie in the order of the tree.
        first = min(
            [
                first,
                *(
                    leaves[place]
                    for place in torch.bucketize(bad, ends, right=True).unique().tolist()
                ),
            ]
        )
    first = int(
        gather_values(torch.tensor([first], device=layout.device), group, "first bad leaf").min()
    )
    return layout.leaves[first].path if first < len(layout.leaves) else None
