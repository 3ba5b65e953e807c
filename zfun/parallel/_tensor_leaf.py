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

from collections.abc import Callable, Iterable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zfun import collectives, tree
from zfun.errors import PlacementError
from zfun.parallel._tensor_region import NAME, Region
from zfun.parallel._tensor_styles import OUTPUT_CUT, SUMMED, USES, WHOLE, TensorStyle
from zfun.transforms.call._lazy import METADATA, BucketSource, LazyLeaf, tensor_of


def leaf_for(region: Region, own: Tensor, path: str, style: TensorStyle | None) -> Tensor:
    """Return a leaf for a loss, which knows its style or is whole."""
    if style is not None:
        return StyledLeaf.over(own, path, style, region)
    if not own.requires_grad:
        return own
    compared = lambda x: region.alike(x.view_as(x), f"leaf {path!r}", path)
    if not isinstance(own, LazyLeaf):
        return compared(own)
    source = BucketSource(lambda _: compared(tensor_of(own)))
    return LazyLeaf(tuple(own.shape), own.dtype, own.device, True, path, source)


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
        """Return a whole leaf, whose gradient backward sums over the ranks or compares."""
        of = f"leaf {self.path!r}"
        if self.style.name == "replicated":
            own = self.tensor()
            return self.region.alike(own.view_as(own), of, self.path)
        if self.style.name in SUMMED:
            whole = collectives.enter(self.tensor(), self.region.axis, name="grads")
            if self.style.name == "sequence_parallel":
                return whole
            return self.region.alike(whole, of, self.path, sums=True)
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
    region, dim = norms[0].region, norms[0].region.sequence_dim
    values = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    have_tokens = any(type(x) is not StyledLeaf and region.dim_of(x) is not None for x in values)
    if not isinstance(out, Tensor) or dim is None or out.dim() <= dim or not have_tokens:
        raise norms[0].refusal(name)
    return region.join(out)


def _values(arguments: Iterable[Any], name: str, norms: list[StyledLeaf]) -> list[Any]:
    """Replace styled leaves by their values, and note those whose results are joined."""
    found: list[Any] = []
    for value in arguments:
        if type(value) is StyledLeaf:
            if value.style.name not in WHOLE:
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
    if type(weight) is not StyledLeaf or weight.style.name in WHOLE or type(x) is StyledLeaf:
        return cast("Tensor", _plainly(F.linear, (x, weight), {"bias": bias}))
    style, region = weight.style.name, weight.region
    rows = _bias_of(weight, bias, is_cut=style not in OUTPUT_CUT and region.dim_of(x) is not None)
    matrix = weight.tensor()
    if style in OUTPUT_CUT:
        if x.shape[-1] != matrix.shape[-1]:
            raise PlacementError(
                f"a leaf of style {style!r} takes whole activations, of {matrix.shape[-1]} "
                f"features; leaf {weight.path!r} met {x.shape[-1]} features; give the leaf before "
                "it the style 'colwise_gather_output', or this one 'rowwise'",
                leaf=weight.path,
            )
        out = F.linear(region.enter(x), matrix, rows)
        if style in ("colwise_gather_output", "embedding_rowwise"):
            out = collectives.leave(out, region.axis, -1, name=NAME)
            out = region.alike(out, f"the result of leaf {weight.path!r}")
        return out
    if style == "rowwise_split_input":
        x = collectives.enter(x, region.axis, -1, name=NAME)
    if x.shape[-1] != matrix.shape[-1]:
        raise PlacementError(
            f"a leaf of style {style!r} takes the activations that leaves of style 'colwise' make, "
            f"{matrix.shape[-1]} features on each rank; leaf {weight.path!r} met "
            f"{x.shape[-1]} features; give the leaf before it this style, or keep this one whole",
            leaf=weight.path,
        )
    out = region.leave(F.linear(x, matrix))
    return out if rows is None else out + rows


def _bias_of(weight: StyledLeaf, bias: Tensor | None, *, is_cut: bool) -> Tensor | None:
    """Return the bias of a product, which is cut as the output is.

    With ``is_cut`` each rank adds the bias to tokens of its own.
    """
    if bias is None:
        return None
    if type(bias) is StyledLeaf:
        if bias.style.name in SUMMED and is_cut:
            return bias.value()
        if bias.style.name == "replicated" and not is_cut and weight.style.name not in OUTPUT_CUT:
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
    if type(weight) is not StyledLeaf or weight.style.name not in (*WHOLE, "embedding_rowwise"):
        return cast("Tensor", _plainly(F.embedding, (ids, weight), {}))
    region, name = weight.region, weight.style.name
    if name in WHOLE:
        if name == "sequence_parallel":
            assert region.sequence_dim is not None
            region.has_cut = True
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


def own_rows(ids: Tensor, rows: int, axis: collectives.Group) -> tuple[Tensor, Tensor]:
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
    if type(leaf) is not StyledLeaf or leaf.style.name in WHOLE:
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
