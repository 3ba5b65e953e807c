"""``remat``: a function that is computed again in backward. See [Note: what is kept of a block]."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from zfun import policies, tree
from zfun.collectives import Group
from zfun.errors import OptionError, PlacementError, checked_options
from zfun.flat import flats
from zfun.policies import Policy
from zfun.stores import Store
from zfun.transforms._remat._block import Block
from zfun.transforms._remat._elsewhere import Elsewhere
from zfun.transforms._remat._inputs import moving_inputs
from zfun.transforms._remat._results import keeping_results

__all__ = ["Remat", "remat", "warn_of_whole_loss"]


@dataclass(frozen=True, slots=True)
class Remat:
    """What :func:`remat` returns: a function that other transforms can look into.

    Attributes:
        fn: what is called.
        policy: which results are kept.
        store: where what is kept lives; ``None`` for where it is.
        shard_over: the ranks that each keep a part; ``None`` for the whole on every rank.
        generators: random generators whose state is restored, beside those among the arguments and the default ones.
    """

    fn: Callable[..., Any]
    policy: Policy = policies.nothing
    store: Store | None = None
    shard_over: Group | None = None
    generators: tuple[torch.Generator, ...] = ()
    _agreed: set[tuple[torch.dtype, torch.Size]] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``fn`` returns."""
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(args, kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            if self.policy is not policies.everything:
                warnings.warn(
                    "remat() saves no memory under torch.func transforms, which have no hooks for what autograd keeps; nothing is computed "
                    "again",
                    stacklevel=2,
                )
            return self.fn(*args, **kwargs)
        _check_flats((args, kwargs))
        leaves, spec = tree.flatten((args, kwargs))
        moves = self.store is not None or self.shard_over is not None
        elsewhere = Elsewhere(self.store, self.shard_over, self._agreed) if moves else None
        if self.policy is policies.everything:
            with moving_inputs(elsewhere, leaves, results_too=True):
                return self.fn(*args, **kwargs)
        inputs = moving_inputs(elsewhere, leaves, results_too=False)
        block = Block(self.fn, leaves, spec, self.generators)
        tensors = [leaves[place] for place in block.places]
        del args, kwargs, leaves
        modes = noop_context_fn if self.policy is policies.nothing else functools.partial(keeping_results, self.policy, elsewhere)
        with inputs:
            return checkpoint(block, *tensors, use_reentrant=False, context_fn=modes)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Be what the compiler knows, while it traces."""
        if self.policy is policies.everything and self.store is None and self.shard_over is None:
            return self.fn(*args, **kwargs)
        if self.policy is not policies.nothing or self.store is not None or self.shard_over is not None:
            raise TypeError("remat() inside of compiled code takes no policy, store or group: put remat() around the compiled function")
        return checkpoint(self.fn, *args, use_reentrant=False, **kwargs)


@checked_options
def remat(
    fn: Callable[..., Any],
    *,
    policy: Policy = policies.nothing,
    store: Store | None = None,
    shard_over: Group | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Remat:
    """Compute a function again in backward instead of keeping its intermediate results; no bit changes.

    It goes around the blocks of a model, not around the whole loss: there all of it would be computed again, and kept, at once. Inside
    of :func:`zfun.shard_params` the parameters of a block are gathered again when it is computed again.

    Args:
        fn: any function of trees, tensors and other values, which must do the same when it is called again. A module, a method of one or
            a function of one is computed again with the parameters that the module has during the call, also inside of
            ``torch.func.functional_call``.
        policy: which results are kept all the same; see :mod:`zfun.policies`. By default none but the inputs.
        store: where what is kept lives until backward: ``zf.stores.host()`` moves activations to host memory. By default they stay where
            they are. Parameters are never moved.
        shard_over: ranks that hold the same activations, as those of a model-parallel axis do: each keeps its part of them (``R -> S``),
            and they are gathered before the block is computed again. The first tensor of each shape is compared across these ranks, with
            ``process_group(debug=True)`` every one. Goes with ``store`` as well.
        generators: random generators that ``fn`` uses without taking them as arguments. The default ones of the CPU and of the
            inputs' devices, and those among the arguments, are restored in any case.

    Returns:
        A function of the same arguments.

    Raises:
        PlacementError: from the returned function, around a loss that is inside of ``shard_params`` already.
        SpecMismatch: from the returned function, where ranks of ``shard_over`` hold different activations.

    Example:
        >>> import zfun as zf
        >>> block = zf.remat(lambda layer, x: torch.tanh(x @ layer["w"]))
        >>> loss = lambda params, x: block(params["second"], block(params["first"], x)).sum()
        >>> params = {"first": {"w": torch.eye(2)}, "second": {"w": torch.eye(2)}}
        >>> zf.value_and_grad(loss)(params, torch.zeros(1, 2))[0]
        tensor(0.)

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    if not callable(fn):
        raise OptionError(f"remat() takes a function; got {type(fn).__name__}; pass the function that is to be computed again")
    if not callable(policy):
        raise OptionError(f"remat() takes a policy, which is a function of (op, result); got {policy!r}; zf.policies has some")
    return Remat(fn, policy, store, shard_over, tuple(generators))


def warn_of_whole_loss(loss: Any) -> None:
    """Say so where what is computed again is everything: then all of it lives at once, as if nothing were."""
    if isinstance(loss, Remat) and loss.policy is not policies.everything:
        warnings.warn(
            "remat() around a whole loss saves no memory: backward begins by computing all of it again; put it around the blocks",
            stacklevel=3,
        )


def _check_flats(value: tree.Tree) -> None:
    for flat in flats(value):
        if flat.tape is not None or flat.compute_dtype is not None:
            raise PlacementError(
                "remat() stands inside of shard_params(), where it can see the blocks; got sharded parameters; write "
                "shard_params(remat(...)), or better remat() around each block"
            )
