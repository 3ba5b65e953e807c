"""``remat``: recompute a function in backward. See [Note: tensors kept of a block]."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, noop_context_fn

from zfun import policies, tree
from zfun.collectives import Group
from zfun.errors import PlacementError
from zfun.flat import flats
from zfun.options import each, function, instance, takes
from zfun.policies import Policy
from zfun.stores import Store
from zfun.transforms.call._call import BoundParams
from zfun.transforms.call._saved import noting_recomputation
from zfun.transforms.remat._block import Block
from zfun.transforms.remat._elsewhere import Agreed, Elsewhere
from zfun.transforms.remat._inputs import moving_inputs
from zfun.transforms.remat._results import keeping_results


@dataclass(frozen=True, slots=True, eq=False)
class Remat:
    """The function that :func:`remat` returns, with attributes for other transforms.

    Attributes:
        fn: the function to recompute.
        policy: the policy that chooses the results to keep.
        store: the store for kept tensors; ``None`` for the current device.
        shard_over: the ranks that keep one part each; ``None`` for the whole on every rank.
        generators: random generators to restore, in addition to those among the arguments and the
            default ones.
    """

    fn: Callable[..., Any]
    policy: Policy = policies.nothing
    store: Store | None = None
    shard_over: Group | None = None
    generators: tuple[torch.Generator, ...] = ()
    _agreed: Agreed = field(default_factory=set, compare=False, repr=False)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # Its signature and its model axes are those of the function inside.
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``fn``."""
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(args, kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            if self.policy is not policies.everything:
                warnings.warn(
                    "remat() saves no memory under torch.func transforms, because these call no "
                    "saved-tensor hooks; nothing is recomputed",
                    stacklevel=2,
                )
            return self.fn(*args, **kwargs)
        _check_flats((args, kwargs))
        leaves, spec = tree.flatten((args, kwargs))
        moves = self.store is not None or self.shard_over is not None
        runs_again = self.policy is not policies.everything
        elsewhere = (
            Elsewhere(
                self.store,
                self.shard_over,
                self._agreed,
                runs_again=runs_again,
                name=getattr(self.fn, "__name__", type(self.fn).__name__),
            )
            if moves
            else None
        )
        if not runs_again:
            with moving_inputs(elsewhere, leaves, results_too=True):
                return self.fn(*args, **kwargs)
        inputs = moving_inputs(elsewhere, leaves, results_too=False)
        block = Block(self.fn, leaves, spec, self.generators)
        tensors = [leaves[place] for place in block.places]
        del args, kwargs, leaves
        modes = (
            noop_context_fn
            if self.policy is policies.nothing
            else functools.partial(keeping_results, self.policy, elsewhere)
        )
        with inputs:
            return checkpoint(
                block,
                *tensors,
                use_reentrant=False,
                context_fn=functools.partial(_contexts, modes),
            )

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return torch's own checkpointing, the only form that the compiler can trace."""
        if self.policy is policies.everything and self.store is None and self.shard_over is None:
            return self.fn(*args, **kwargs)
        if (
            self.policy is not policies.nothing
            or self.store is not None
            or self.shard_over is not None
        ):
            raise TypeError(
                "remat() inside compiled code takes no options; got a policy, store or group; "
                "put remat() around the compiled function"
            )
        return checkpoint(self.fn, *args, use_reentrant=False, **kwargs)


@takes(
    policy=function("a function of (op, result)", "zf.policies.matmuls"),
    generators=each(
        instance(torch.Generator, "a generator", "torch.Generator()"),
        "a sequence of generators",
        "[torch.Generator()]",
    ),
)
def remat(
    fn: Callable[..., Any],
    *,
    policy: Policy = policies.nothing,
    store: Store | None = None,
    shard_over: Group | None = None,
    generators: Sequence[torch.Generator] = (),
) -> Remat:
    """Recompute a function in backward instead of keeping intermediate results; no bit changes.

    Put ``remat`` around the blocks of a model. Around the whole loss ``remat`` saves nothing,
    because backward would recompute the whole loss at once. Inside :func:`zfun.shard_params`,
    recomputation gathers the parameters of the block again.

    Args:
        fn: any function of trees, tensors and other values, which must do the same when called
            again. A module, a method or a function of a module is recomputed with the parameters
            that the module has during the call, also inside ``torch.func.functional_call``.
        policy: the results to keep besides the inputs; see :mod:`zfun.policies`. By default none.
        store: the place for kept tensors until backward: ``zf.stores.host()``, ``zf.stores.nvme()``
            or your own. Backward reads a few tensors ahead. By default kept tensors stay in place.
            Parameters are never moved.
        shard_over: ranks that hold the same activations, such as a model-parallel axis. Each rank
            keeps one part (``R -> S``), and backward gathers the parts before recomputation. zfun
            compares the first tensor of each shape across these ranks, and every tensor with
            ``process_group(debug=True)``. May be combined with ``store``.
        generators: random generators of ``fn`` that are not arguments. The default
            generators of the CPU and of the inputs' devices, and generators among the arguments,
            are always restored.

    Returns:
        A function of the same arguments.

    Raises:
        PlacementError: from the returned function, if ``remat`` is around ``shard_params``.
        SpecMismatch: from the returned function, if ranks of ``shard_over`` hold different
            activations.
        OffloadError: from the returned function or in backward, if the store does not keep a
            tensor; ``leaf`` names the activation.

    Example:
        >>> import zfun as zf
        >>> block = zf.remat(lambda layer, x: torch.tanh(x @ layer["w"]))
        >>> loss = lambda params, x: block(params["second"], block(params["first"], x)).sum()
        >>> params = {"first": {"w": torch.eye(2)}, "second": {"w": torch.eye(2)}}
        >>> zf.value_and_grad(loss)(params, torch.zeros(1, 2))[0]
        tensor(0.)

    After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    return Remat(fn, policy, store, shard_over, tuple(generators))


@contextlib.contextmanager
def _noting(inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with noting_recomputation(), inner:
        yield


def _contexts(modes: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the contexts of a block in forward and in recomputation; see [Note: divergence]."""
    forward, again = modes()
    return _noting(forward), again


def warn_of_whole_loss(loss: Any) -> None:
    """Warn about ``remat`` around a whole loss, where all activations live at once in backward."""
    if isinstance(loss, Remat) and loss.policy is not policies.everything:
        warnings.warn(
            "remat() around a whole loss saves no memory, because backward recomputes all of it "
            "at once; put remat() around the blocks",
            stacklevel=3,
        )


def _check_flats(value: tree.Tree) -> None:
    for flat in flats(value):
        if isinstance(flat, BoundParams):
            raise PlacementError(
                "remat() must be inside shard_params(), around the blocks of the loss; got "
                "sharded parameters; write shard_params(remat(...)), or better remat() around "
                "each block"
            )
