"""The checks of options, of states and of gradients."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch

from zfun import collectives, ops, stores, tree
from zfun.collectives import Group, LeafRecord, gather_values, global_ranks, model_groups
from zfun.errors import LeafError, OptionError, SpecMismatch, ZfunError
from zfun.flat import Flat, own_piece
from zfun.layout import logical_path
from zfun.placement import P, S
from zfun.recipes._options import ZeroOptions
from zfun.recipes._state import ZeroState
from zfun.reductions import Spent
from zfun.sources.deferred import spec_of


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


def check_same_options(recipe: ZeroOptions, params: tree.Tree) -> None:
    """Compare across ranks the options by name, and the results of functions of leaves."""
    group = collectives.agreement_group(recipe.group)
    if group.size == 1:
        return
    words = recipe.in_words()
    for name in ("trainable", "buffers"):
        of_leaves = getattr(recipe, name)
        if of_leaves is not None:
            leaves = zip(tree.paths(params), tree.leaves(params), strict=True)
            words |= {f"{name}[{path}]": of_leaves(path, spec_of(leaf)) for path, leaf in leaves}
    records = [LeafRecord.of_option(name, value) for name, value in words.items()]
    collectives.check_same(records, group, "options", kind="option")


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
    is_used, has_leaves = num_leaves > 0 and min(num_unused) < num_leaves, num_leaves > 0
    for axis in model_groups(group):
        # Along a model axis ranks have other leaves, and one of them may use its own.
        sides = collectives.gather_json([is_used, has_leaves], axis, "used leaves")
        is_used, has_leaves = (any(flags) for flags in zip(*sides, strict=True))
    if is_used or not has_leaves:
        return
    raise LeafError(
        f"a loss must use its parameters; in step {state.step} no trained leaf got a gradient on "
        "any rank; compute with the parameters that the loss receives, as in "
        "torch.func.functional_call(model, params, (x,)) instead of model(x), and do not detach "
        "them; the state is as it was",
        rank=global_ranks(group)[group.rank],
        step=state.step,
    )


def refuse_transforms() -> None:
    """Refuse to be traced or transformed, because a step reads numbers and starts collectives."""
    level = torch._C._functorch.peek_interpreter_stack()
    around = _capture() if level is None else f"torch.func.{level.key().name.lower()}"
    if around is not None:
        raise ZfunError(
            "a step reads numbers and starts collectives, so a step runs outside of transforms, "
            f"traces and captures; got a call inside of {around}; transform, trace or capture the "
            "loss alone, and differentiate with zf.vjp()"
        )


def refuse_captures() -> None:
    """Refuse to be traced, because a trace would keep the parameters of now as constants."""
    if (around := _capture()) is not None:
        raise ZfunError(
            "params() starts collectives, so it runs outside of traces and captures, which would "
            f"keep the values of now as constants; got a call inside of {around}; call params() "
            "before, and pass the tree to the function that you trace or capture"
        )


def _capture() -> str | None:
    """Return the trace or capture that runs, in words."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    is_proxied = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    if torch.compiler.is_exporting() or is_proxied:
        return "torch.export, make_fx or another tracer"
    return "the capture of a CUDA graph" if ops.is_capturing() else None


def first_bad_leaf(grads: Flat) -> str | None:
    """Return the path of the first leaf with a gradient that is not finite, over all ranks."""
    group, layout = grads.group, grads.layout
    first = len(layout.leaves)
    whole = grads.placement is P
    # The gradients of a bucket that a step has spent were finite.
    left = [i for i, buffer in enumerate(grads.buffers) if not isinstance(buffer, Spent)]
    for index, buffer in zip(left, stores.reading(grads.select(left)), strict=True):
        bucket = layout.buckets[index]
        piece = buffer if whole or grads.placement is S else own_piece(buffer, bucket, group)
        bad = torch.nonzero(~torch.isfinite(piece)).view(-1)
        bad += 0 if whole else bucket.span(group.rank, group.size)[0]
        ends = [layout.leaves[leaf].offset for leaf in bucket.leaves[1:]]
        edges = torch.tensor(ends, dtype=torch.int64, device=bad.device)
        places = torch.bucketize(bad, edges, right=True).unique().tolist()
        # min(), because leaves need not lie in the order of the tree.
        first = min([first, *(bucket.leaves[place] for place in places)])
    rows = gather_values(torch.tensor([first], device=layout.device), group, "first bad leaf")
    first = int(rows.min())
    found = logical_path(layout.leaves[first]) if first < len(layout.leaves) else None
    for axis in model_groups(group):
        # Along a model axis ranks have other leaves, or other parts of a leaf.
        found = next((x for x in collectives.gather_json(found, axis, "first bad leaf") if x), None)
    return found
