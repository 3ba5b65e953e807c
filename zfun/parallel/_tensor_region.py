"""The part of a tensor-parallel loss in which ranks differ, and its borders.

[Note: values that ranks use alike]
A value that all ranks have, such as the result of a norm, a sum of parts or a leaf without a style,
has one gradient: that of the whole loss. A rank that uses such a value on its part alone, as in
``cut + whole``, gets a part of the gradient, which nothing adds up. Types of values would say so
before; here the ranks compare these gradients in the first backward pass, and refuse others.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zfun import collectives, ops
from zfun.collectives import Group, gather_values
from zfun.errors import PlacementError
from zfun.transforms.call._lazy import BucketSource

# Nodes of autograd whose results are their inputs, if the shapes are equal.
_ALIASES = frozenset(["AliasBackward0", "SliceBackward0", "ViewBackward0"])
# The name of messages of activations.
NAME = "activations"
# The same operations on all ranks give the same bits, and almost the same on some devices.
_ALIKE = 1e-6


class Region:
    """The part of one call of a loss in which ranks differ, and its borders.

    Args:
        axis: the ranks.
        sequence_dim: the dimension of the sequence, if activations outside are cut along it.
        compares: whether the ranks compare gradients that they must have alike.
    """

    def __init__(self, axis: Group, sequence_dim: int | None, *, compares: bool = False) -> None:
        self.axis = axis
        self.sequence_dim = sequence_dim
        self.compares = compares and axis.size > 1
        self.has_cut = False
        self.source = BucketSource(lambda leaf: cast("Any", leaf).value())
        self._last = threading.local()
        # Of sequences that norms have joined.
        self._lengths: set[int] = set()

    def dim_of(self, x: Tensor) -> int | None:
        """Return the dimension along which an activation is cut, outside of the part.

        Activations without one, such as rows on their way to experts, are whole.
        """
        dim = self.sequence_dim
        return None if dim is None or x.dim() < dim + 2 else dim

    def enter(self, x: Tensor) -> Tensor:
        """Return an activation for use with leaves that are cut; the same one for the same tensor.

        So q, k and v share one sum in backward.
        """
        dim = self.dim_of(x)
        gathered = None if dim is None else self._gathered_of(x)
        if gathered is not None:
            return gathered
        key, entered = getattr(self._last, "entered", (None, None))
        # Tensors of inference mode count no writes.
        version = torch.is_grad_enabled(), _version(x)
        if key is not None and key[0]() is x and key[1] == version:
            return cast("Tensor", entered)
        if dim is None or self._is_whole(x.shape[dim]):
            self._check_whole(x)
            entered = collectives.enter(x, self.axis, name=NAME)
        else:
            entered = collectives.all_gather(x, self.axis, dim, name=NAME)
            self._check_pieces(entered, dim)
        self._last.entered = ((weakref.ref(x), version), entered)
        return entered

    def _is_whole(self, length: int) -> bool:
        """Whether an activation of a length has all tokens, because a norm has joined so many."""
        if length not in self._lengths:
            return False
        if length * self.axis.size in self._lengths:
            raise PlacementError(
                "with sequence_dim the length of an activation says whether a rank has all of its "
                f"tokens; got one of {length} tokens, in a loss whose sequences have {length} and "
                f"{length * self.axis.size}, over {self.axis.size} ranks; pad one of the sequences"
            )
        return True

    def join(self, x: Tensor) -> Tensor:
        """Join the tokens of all ranks, after a norm.

        The result is alike on all ranks, so backward keeps a piece of its cotangent. Leaves that
        are cut get the same numbers with another way back, a reduce-scatter of what ranks add.
        """
        dim = self.sequence_dim
        assert dim is not None
        gathered = collectives.all_gather(x, self.axis, dim, name=NAME)
        self._check_pieces(gathered, dim, is_known=x.shape[dim] in self._lengths)
        self._lengths.add(gathered.shape[dim])
        known = self._last.__dict__.setdefault("gathered", WeakTensorKeyDictionary())
        if not gathered.requires_grad:
            known[gathered] = None, _version(gathered)
            return gathered
        whole: Tensor = _Joined.apply(x, gathered.detach(), self.axis, dim)
        known[whole] = gathered, _version(whole)
        return self.alike(whole, "the result of a norm")

    def _check_pieces(self, gathered: Tensor, dim: int, *, is_known: bool = False) -> None:
        """Refuse an activation that was not cut: all ranks have the same tokens.

        Known: another activation had as many tokens, over all ranks, as this one on each.
        """
        if not self._compares() or (self.has_cut and not is_known) or ops.is_abstract(gathered):
            return
        first, *others = gathered.detach().chunk(self.axis.size, dim)
        # One token again and again, as in a batch of zeros, says nothing.
        is_constant = torch.equal(first, first.narrow(dim, 0, 1).expand_as(first))
        if (is_known or not is_constant) and all(torch.equal(first, x) for x in others):
            raise PlacementError(
                "with sequence_dim each rank has tokens of its own; got the same "
                f"{first.shape[dim]} tokens on all {self.axis.size} ranks; cut the input of a loss "
                "without an embedding by zf.collectives.enter(x, axis, sequence_dim), and give "
                "leaves that are used on all tokens the style 'replicated'"
            )
        self.has_cut = True

    def _compares(self) -> bool:
        return self.compares and torch._C._functorch.peek_interpreter_stack() is None

    def _check_whole(self, x: Tensor) -> None:
        """Refuse a value that all ranks must have, and that differs between them."""
        if self._compares() and not are_alike(self._fingerprints(x), x):
            raise PlacementError(
                "leaves that cut the output of F.linear take an activation that all ranks of a "
                f"tensor axis have; got others, of shape {tuple(x.shape)}; seed dropout of whole "
                "activations by the data rank only, join tokens that are cut before they are "
                "flattened, and give leaves before it styles"
            )

    def alike(self, x: Tensor, of: str, path: str | None = None, *, sums: bool = False) -> Tensor:
        """Let backward compare the gradient of a value, which all ranks must use alike.

        With ``sums`` backward adds the gradients, so that they must not be equal.
        """
        if not (x.requires_grad and self._compares()):
            return x

        @torch.no_grad()
        def compare(grad: Tensor) -> None:
            found = self._fingerprints(grad)
            if ops.is_abstract(found):
                return
            if not sums and not are_alike(found, grad):
                raise PlacementError(
                    f"all ranks of a tensor axis use a whole value alike; the gradient of {of} "
                    f"differs between ranks, of sizes {found[:, 0].tolist()}, so that value met "
                    "activations that are cut; write zf.collectives.enter(x, axis) where a whole "
                    "value meets those, and give such a leaf the style "
                    "'replicated_with_grad_allreduce'",
                    leaf=path,
                )
            first = grad.flatten()[:1]
            is_constant = torch.equal(grad, first.expand(grad.numel()).view_as(grad))
            is_same = torch.equal(found, found[:1].expand_as(found)) and found.isfinite().all()
            if sums and is_same and not is_constant:
                raise PlacementError(
                    "a leaf of style 'replicated_with_grad_allreduce' is used on values that "
                    f"differ between ranks; {of} has the same gradient on all ranks, whose sum is "
                    f"{self.axis.size} times that of one process; give the leaf the style "
                    "'replicated'",
                    leaf=path,
                )

        x.register_hook(compare)
        return x

    @torch.no_grad()
    def _fingerprints(self, x: Tensor) -> Tensor:
        """Return two numbers of each rank, which depend on the places of large elements."""
        rows = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        rows = torch.atleast_2d(rows).flatten(0, -2)
        sizes = [torch.linalg.vector_norm(rows, 1, dim, dtype=torch.float64) for dim in (1, 0)]
        ramps = [torch.linspace(1, 2, len(x), dtype=x.dtype, device=x.device) for x in sizes]
        mine = torch.stack([x @ ramp for x, ramp in zip(sizes, ramps, strict=True)])
        return gather_values(mine, self.axis, "values of tensor_parallel()")

    def _gathered_of(self, x: Tensor) -> Tensor | None:
        """Return what leaves that are cut get in place of the result of a norm, if this is one."""
        node = x.grad_fn
        # A slice of all tokens, as models take before a head, is the same activation.
        while node is not None and node.name() in _ALIASES:
            node = node.next_functions[0][0]
        for whole, (gathered, version) in getattr(self._last, "gathered", {}).items():
            is_alias = node is not None and whole.grad_fn is node and whole.shape == x.shape
            if (whole is x or is_alias) and version == _version(whole):
                return x if gathered is None else cast("Tensor", gathered)
        return None

    def leave(self, x: Tensor) -> Tensor:
        """Add the parts of all ranks."""
        dim = self.dim_of(x)
        if dim is None:
            return self.alike(collectives.leave(x, self.axis, name=NAME), "a sum of parts")
        self.has_cut = True
        return collectives.reduce_scatter(x, self.axis, dim, name=NAME)

    def forget(self) -> None:
        """Let go of the activation that was used last."""
        self._last.__dict__.clear()


def are_alike(found: Tensor, x: Tensor) -> bool:
    """Whether numbers of all ranks are equal, up to the noise of sums of elements like those of x.

    Numbers that are not finite count as equal, because their step is skipped.
    """
    if ops.is_abstract(found):
        return True
    noise = max(_ALIKE, 8 * torch.finfo(x.dtype).eps / max(x.numel(), 1) ** 0.5)
    return not bool((found.amax(0) - found.amin(0) > noise * found.abs().amax(0)).any())


class _Joined(torch.autograd.Function):
    """``S -> R`` of tokens that are gathered already, as :func:`zfun.collectives.leave`."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, gathered: Tensor, axis: Group, dim: int) -> Tensor:  # type: ignore[override]
        ctx.place = axis.rank, axis.size, dim
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rank, size, dim = ctx.place
        return grad.chunk(size, dim)[rank], None, None, None


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version
