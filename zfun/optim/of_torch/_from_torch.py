"""Make a pure optimizer of a class of torch's."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zfun.errors import NotElementwiseError, OptionError, ZfunError
from zfun.optim._base import Optimizer, optimizer, remembered
from zfun.optim._schedules import rate_at
from zfun.optim.of_torch._muon import torch_muon
from zfun.optim.of_torch._probe import (
    CUTS,
    Kept,
    check_shapes,
    differing,
    examine,
    raised_on,
    samples,
)
from zfun.optim.of_torch._rule import TorchRule
from zfun.options import Kind, shown, takes

# The learning rate of the probe, whatever the caller's is: with 0, nothing would change.
_RATE = 0.01

_REFUSED = {
    "LBFGS": "searches along a line, over all parameters at once, and calls the loss again",
    "Adafactor": "keeps sums over rows and columns of a matrix",
    "SparseAdam": "takes sparse gradients",
}


def _is_torch_class(x: Any) -> bool:
    return isinstance(x, type) and issubclass(x, torch.optim.Optimizer)


@takes(make=Kind(_is_torch_class, ("a class of torch.optim",), "torch.optim.NAdam"))
@remembered
def from_torch(make: type[torch.optim.Optimizer], **options: Any) -> Optimizer:
    """Make a pure optimizer of an element-wise class of, or like, ``torch.optim``.

    Each step copies parameters, gradients and state in pieces to a new optimizer of the class and
    back, so the state may be sharded, offloaded and saved. Numbers that a step writes into its
    group (``group["k"] += 1``) are carried from step to step too; an option that a step rewrites is
    carried until the caller gives another value. Whatever else a step changes is refused by name.
    :func:`sgd`, :func:`adam`, :func:`adamw` and :func:`adagrad` are faster, because they copy
    nothing.

    Args:
        make: the class, such as ``torch.optim.RMSprop``.
        options: the options of the class. ``lr`` may also be a function of the number of steps
            taken so far.

    Returns:
        An optimizer with :class:`TorchState`.

    Raises:
        OptionError: ``make`` is no such class, or does not take the options; or a step changes an
            attribute of the optimizer, or needs a closure; or ``train()`` and ``eval()`` exchange
            the parameters, as those of schedule-free optimizers do.
        NotElementwiseError: the class needs whole tensors, as LBFGS and Adafactor do; or the change
            of an element depends on where leaves are cut, or on all gradients, as that of Prodigy.
            ``torch.optim.Muon`` alone runs whole: as for :func:`muon`, one rank gets each matrix.
        LeafError: from a step, for a leaf that is used again after steps that left the leaf out,
            where a class keeps other numbers for each tensor than a count, as NAdam and ASGD do.

    Example:
        >>> optimizer = from_torch(torch.optim.RMSprop, lr=0.5, alpha=0.75)
        >>> params, grads = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, -0.01])}
        >>> params, state = optimizer.apply(grads, optimizer.init(params), params)
        >>> params, list(state.trees)
        ({'w': tensor([-1.0000,  1.0000])}, ['square_avg'])
    """
    if make.__name__ in _REFUSED:
        raise NotElementwiseError(
            "from_torch() takes optimizers that work element by element; "
            f"torch.optim.{make.__name__} {_REFUSED[make.__name__]}; use another one, such as "
            "torch.optim.AdamW"
        )
    known = [name for name in inspect.signature(make).parameters if name != "params"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise OptionError(f"torch.optim.{make.__name__} has no option {name!r}; {remedy}")
    _check_takes(make, options)
    if make is torch.optim.Muon:
        return torch_muon(**options)
    # The rate changes what a class does in no other way, and may change in every step.
    probed = {**options, "lr": _RATE} if _is_rate(options.get("lr")) else options
    items = tuple(sorted(probed.items()))
    try:
        hash(items)
    except TypeError:
        return _pure(TorchRule(make, options, _kept(make, items)))
    return _pure(TorchRule(make, options, _kept_cached(make, items)))


def _is_rate(value: Any) -> bool:
    return callable(value) or isinstance(value, (int, float, Tensor))


def _check_takes(make: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Refuse options that torch refuses, by torch's own words."""
    rate, given = options.get("lr"), dict(options)
    if callable(rate):
        given["lr"] = rate_at(rate, 0)
    with unset_fake_temporarily():
        try:
            make([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **given)
        except Exception as error:  # the code of any class runs here and may raise anything
            raise OptionError(
                f"from_torch() gives its options to the class; got {shown(options)} for "
                f"torch.optim.{make.__name__}, which raised {type(error).__name__}: {error}; pass "
                "the options of the class"
            ) from error


def _kept(make: type[torch.optim.Optimizer], options: tuple[tuple[str, Any], ...]) -> Kept:
    """Find out what a class carries from step to step, and refuse one that cannot run in pieces."""
    with unset_fake_temporarily():
        kept = examine(make, dict(options))
        _check_elementwise(_pure(TorchRule(make, dict(options), kept)), kept.end, make.__name__)
        check_shapes(make, dict(options))
    return kept


_kept_cached = functools.lru_cache(maxsize=64)(_kept)


def _check_elementwise(pure: Optimizer, end: Tensor, name: str) -> None:
    """Refuse an optimizer that mixes elements, because from_torch always cuts leaves."""
    values, *steps = samples()

    def changes(sizes: list[int]) -> Tensor:
        params = list(values.split(sizes))
        state = pure.init(params)
        for grads in steps:
            params, state = pure.apply(list(grads.split(sizes)), state, params)
        return torch.cat(params) - values

    try:
        one, other = map(changes, CUTS)
    except ZfunError:
        raise
    except Exception as error:  # the code of any class runs here and may raise anything
        raise raised_on(name, error) from error
    if found := differing(end - values, one, values):
        raise OptionError(
            f"from_torch() makes a new optimizer for each step; got {name}, which changes an "
            f"element by {found[0]:.6g} in {len(steps)} steps, and by {found[1]:.6g} if made anew, "
            "so a step writes to a place that is neither self.state[p] nor a number of the group; "
            "keep the value in one of the two"
        )
    if found := differing(one, other, values):
        raise NotElementwiseError(
            "an optimizer for from_torch() works element by element; in two cuts of one vector, "
            f"one element was changed by {found[0]:.6g} and by {found[1]:.6g} by {name}; use one "
            "of zf.optim"
        )


def _pure(rule: TorchRule) -> Optimizer:
    return optimizer(rule.init, rule.update)
