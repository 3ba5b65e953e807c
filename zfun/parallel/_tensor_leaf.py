"""Leaves that know their style: a function of torch on such a leaf communicates.

[Note: styled leaves]
Within a tensor-parallel loss each leaf of a style is a :class:`StyledLeaf`, which has the metadata
of this rank's piece and no data, as lazy leaves of stage 3 do. ``F.linear`` on it is this rank's
part of the whole product, with the collectives of the style around it. So only functions of styled
leaves pay for a dispatch in Python, and a recomputation in backward communicates as forward did,
without any context.

The functions know no module: the number of attention heads, for example, follows from the shapes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zfun import collectives, tree
from zfun.collectives import Group
from zfun.errors import PlacementError
from zfun.parallel._tensor_styles import OUTPUT_CUT, SUMMED, USES, TensorStyle
from zfun.transforms.call._lazy import METADATA, BucketSource, LazyLeaf, tensor_of

# Nodes of autograd whose results are their inputs, if the shapes are equal.
_ALIASES = frozenset(["AliasBackward0", "SliceBackward0", "ViewBackward0"])
# The name of messages of activations.
_NAME = "activations"


class Region:
    """The part of one call of a loss in which ranks differ, and its borders.

    Args:
        axis: the ranks.
        sequence_dim: the dimension of the sequence, if activations outside are cut along it.
    """

    def __init__(self, axis: Group, sequence_dim: int | None) -> None:
        self.axis = axis
        self.sequence_dim = sequence_dim
        self.source = BucketSource(lambda leaf: cast("StyledLeaf", leaf).value())
        self._last = threading.local()
        # Of sequences that norms have joined.
        self._lengths: set[int] = set()

    def enter(self, x: Tensor) -> Tensor:
        """Return an activation for use with leaves that are cut; the same one for the same tensor.

        So q, k and v share one sum in backward.
        """
        dim = self.sequence_dim
        gathered = None if dim is None else self._gathered_of(x)
        if gathered is not None:
            return gathered
        key, entered = getattr(self._last, "entered", (None, None))
        # Tensors of inference mode count no writes.
        version = torch.is_grad_enabled(), _version(x)
        if key is not None and key[0]() is x and key[1] == version:
            return cast("Tensor", entered)
        if dim is None or self._is_whole(x.shape[dim]):
            entered = collectives.enter(x, self.axis, name=_NAME)
        else:
            entered = collectives.all_gather(x, self.axis, dim, name=_NAME)
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
        gathered = collectives.all_gather(x, self.axis, dim, name=_NAME)
        self._lengths.add(gathered.shape[dim])
        known = self._last.__dict__.setdefault("gathered", WeakTensorKeyDictionary())
        if not gathered.requires_grad:
            known[gathered] = None, _version(gathered)
            return gathered
        whole: Tensor = _Joined.apply(x, gathered.detach(), self.axis, dim)
        known[whole] = gathered, _version(whole)
        return whole

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
        if self.sequence_dim is None:
            return collectives.leave(x, self.axis, name=_NAME)
        return collectives.reduce_scatter(x, self.axis, self.sequence_dim, name=_NAME)

    def forget(self) -> None:
        """Let go of the activation that was used last."""
        self._last.__dict__.clear()


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


class StyledLeaf(LazyLeaf):
    """A leaf of a tensor-parallel loss; see [Note: styled leaves]."""

    piece: Tensor
    style: TensorStyle
    region: Region

    @classmethod
    def over(cls, piece: Tensor, path: str, style: TensorStyle, region: Region) -> Self:
        """Return a styled leaf for a tensor, or for a lazy leaf."""
        leaf = cls.__new__(
            cls,
            tuple(piece.shape),
            piece.dtype,
            piece.device,
            piece.requires_grad,
            path,
            region.source,
        )
        leaf.piece, leaf.style, leaf.region = piece, style, region
        return leaf

    def recast(self, dtype: torch.dtype) -> LazyLeaf:
        piece = self.piece
        narrow = piece.recast(dtype) if isinstance(piece, LazyLeaf) else piece.to(dtype)
        return StyledLeaf.over(narrow, self.path, self.style, self.region)

    def tensor(self) -> Tensor:
        """Return this rank's piece, gathered if it is lazy."""
        piece = self.piece
        return tensor_of(piece) if isinstance(piece, LazyLeaf) else piece

    def value(self) -> Tensor:
        """Return a whole leaf, whose gradient backward sums over the ranks."""
        if self.style.name in SUMMED:
            return collectives.enter(self.tensor(), self.region.axis, name="grads")
        raise self.refusal("a function that reads it")

    def refusal(self, use: str) -> PlacementError:
        """Return the error of a use that the style does not know."""
        return PlacementError(
            f"a leaf of style {self.style.name!r} is used in {USES[self.style.name]}; leaf "
            f"{self.path!r} met {use}; write the loss with that function, or give the leaf "
            "another style in the plan of tensor_parallel()",
            leaf=self.path,
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        use = _STYLED.get(func)
        if use is not None:
            return use(*args, **kwargs)
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            raise TypeError(
                "compiled code takes whole tensors; got a leaf of tensor_parallel(); compile "
                "functions of activations only"
            )
        return _plainly(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaf = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, StyledLeaf))
        raise leaf.refusal(f"{func}, in code that is compiled or under torch.func")


def _plainly(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the values of styled leaves, where their styles allow it."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = f"an attribute ({getattr(func, '__self__', func)})"
    norms: list[StyledLeaf] = []
    options = dict(zip(kwargs, _values(kwargs.values(), name, norms), strict=True))
    out = func(*_values(args, name, norms), **options)
    if not norms:
        return out
    (norm, *_), dim = norms, norms[0].region.sequence_dim
    if not isinstance(out, Tensor) or dim is None or out.dim() <= dim:
        raise norm.refusal(name)
    return norm.region.join(out)


def _values(arguments: Iterable[Any], name: str, norms: list[StyledLeaf]) -> list[Any]:
    """Replace styled leaves by their values, and note those whose results are joined."""
    found: list[Any] = []
    for value in arguments:
        if type(value) is StyledLeaf:
            if value.style.name not in SUMMED:
                raise value.refusal(name)
            if value.style.name == "sequence_parallel":
                norms.append(value)
            value = value.value()
        elif type(value) in (tuple, list):
            value = type(value)(_values(value, name, norms))
        found.append(value)
    return found


def _linear(
    input: Tensor,  # noqa: A002, torch's name
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """``F.linear`` with a matrix that is cut."""
    x = input
    if type(weight) is StyledLeaf and weight.style.name == "sequence_parallel":
        raise weight.refusal("F.linear")
    if type(weight) is not StyledLeaf or weight.style.name in SUMMED or type(x) is StyledLeaf:
        return cast("Tensor", _plainly(F.linear, (x, weight), {"bias": bias}))
    style, region = weight.style.name, weight.region
    rows = _bias_of(weight, bias)
    matrix = weight.tensor()
    if style in OUTPUT_CUT:
        out = F.linear(region.enter(x), matrix, rows)
        if style in ("colwise_gather_output", "embedding_rowwise"):
            out = collectives.leave(out, region.axis, -1, name=_NAME)
        return out
    if style == "rowwise_split_input":
        x = collectives.enter(x, region.axis, -1, name=_NAME)
    if x.shape[-1] != matrix.shape[-1]:
        raise PlacementError(
            f"a leaf of style {style!r} takes the activations that leaves of style 'colwise' make, "
            f"{matrix.shape[-1]} features on each rank; leaf {weight.path!r} met "
            f"{x.shape[-1]} features; give the leaf before it this style, or keep this one whole",
            leaf=weight.path,
        )
    out = region.leave(F.linear(x, matrix))
    return out if rows is None else out + rows


def _bias_of(weight: StyledLeaf, bias: Tensor | None) -> Tensor | None:
    """Return the bias of a product, which is cut as the output is."""
    if bias is None:
        return None
    if type(bias) is StyledLeaf:
        # Whether each rank adds the bias to tokens of its own.
        is_cut = weight.region.sequence_dim is not None and weight.style.name not in OUTPUT_CUT
        if bias.style.name in SUMMED and is_cut:
            return bias.value()
        if (bias.style.name, bias.style.parts) == (weight.style.name, weight.style.parts):
            rows = bias.tensor()
            return collectives.enter(rows, weight.region.axis, name="grads") if is_cut else rows
    elif weight.style.name not in OUTPUT_CUT:
        return bias
    raise PlacementError(
        f"a bias has the style of its matrix; got another one beside leaf {weight.path!r} of style "
        f"{weight.style.name!r}; let one glob of the plan match both",
        leaf=weight.path,
    )


def _embedding(
    input: Tensor,  # noqa: A002, torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding`` with a table whose rows are cut: a rank looks up the ids that it has."""
    ids = input
    if type(weight) is not StyledLeaf or weight.style.name not in (*SUMMED, "embedding_rowwise"):
        return cast("Tensor", _plainly(F.embedding, (ids, weight), {}))
    region, name = weight.region, weight.style.name
    if name in SUMMED:
        if name == "sequence_parallel":
            assert region.sequence_dim is not None
            ids = collectives.enter(ids, region.axis, region.sequence_dim)
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return F.embedding(ids, weight.value(), *options)
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise weight.refusal("F.embedding with max_norm, scale_grad_by_freq or sparse")
    table = weight.tensor()
    rows, axis = table.shape[0], region.axis
    own, is_elsewhere = own_rows(ids, rows, axis)
    padding = None
    if padding_idx is not None:
        padding = padding_idx % (rows * axis.size) - axis.rank * rows
        padding = padding if 0 <= padding < rows else None
    out = F.embedding(own, table, padding)
    return region.leave(out.masked_fill(is_elsewhere.unsqueeze(-1), 0))


def own_rows(ids: Tensor, rows: int, axis: Group) -> tuple[Tensor, Tensor]:
    """Return ids among the rows of this rank, and which of them lie on another rank.

    Ids below the first row and above the last one stay on the first and last rank, where the
    look-up refuses them.
    """
    own = ids - axis.rank * rows
    is_elsewhere = torch.zeros_like(ids, dtype=torch.bool)
    if axis.rank > 0:
        is_elsewhere |= own < 0
    if axis.rank < axis.size - 1:
        is_elsewhere |= own >= rows
    return own.masked_fill(is_elsewhere, 0), is_elsewhere


def _expert(leaf: Tensor, index: Any) -> Tensor:
    """The matrix of one expert, which has the style of all."""
    if type(leaf) is not StyledLeaf or leaf.style.name in SUMMED:
        return cast("Tensor", _plainly(Tensor.__getitem__, (leaf, index), {}))
    is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
    if leaf.dim() != 3 or not is_one:
        raise leaf.refusal("an index")
    return StyledLeaf.over(leaf.tensor()[index], leaf.path, leaf.style, leaf.region)


_STYLED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.__getitem__: _expert,
}
