"""Expert parallelism: experts cut over the ranks of an axis, which have tokens of their own.

[Note: tokens and their experts]
A *row* is a token on its way to one of its experts. Rows are sorted by expert, in the order of the
tokens, so that each rank's rows are neighbours and an expert meets tokens in one order. For 2 ranks
with 2 experts each, and 2 tokens a, b and c, d that choose one expert each::

    rank              0              1
    tokens         a3  b0         c0  d2           the number is that of the expert
    rows           b0  a3         c0  d2
    received       b0  c0         a3  d2           sorted by source, then by expert

Ranks first tell each other how many rows each expert gets from them: one gather of as many integers
as there are experts. These are read by the host, because it allocates what arrives. No row is
dropped, and none is added but one for a rank whose experts receive nothing, so that each rank
computes and takes part in backward.

[Note: experts and data ranks]
The ranks of an expert axis are data ranks: each has a batch of its own, and the loss is the mean of
theirs. So the tokens that travel sum the gradients of experts, and the divisor counts the ranks of
all axes. Other leaves are equal on all ranks, and backward sums their gradients along the axis.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zfun import collectives, ops, tree
from zfun.collectives import Group, LeafRecord, axes_of, check_same, exchange_rows, gather_values
from zfun.errors import OptionError, PlacementError
from zfun.flat import Flat
from zfun.options import FUNCTION, GROUP, NAMES, TENSOR, Kind, integer, takes
from zfun.parallel._cuts import ModelAxis, ParallelLoss, call_with, model_axes
from zfun.parallel._pipeline import Pipeline
from zfun.parallel._tensor_leaf import StyledLeaf
from zfun.placement import Cut
from zfun.transforms import WeightedMean
from zfun.transforms.call._lazy import BucketSource, LazyLeaf, check_graph, graph_of, tensor_of
from zfun.transforms.grads._value import NO_AUX, parse

_NAME = "experts"
EXPERTS = ("*.experts.*",)
_CHOICES = Kind(
    lambda x: isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32),
    ("a tensor of integers",),
    "torch.tensor([[0], [1]])",
)
_use_count = Tensor._use_count  # pyrefly: ignore[missing-attribute]


@takes(loss=FUNCTION, axis=GROUP, experts=NAMES, gathered=NAMES)
def expert_parallel(
    loss: Callable[..., Any],
    axis: Group,
    experts: Sequence[str] = EXPERTS,
    gathered: Sequence[str] = (),
) -> ParallelLoss:
    """Cut experts over the ranks of an axis, which have batches of their own.

    Each rank holds ``1/size`` of the experts, and all of the other leaves::

        rank                0          1
        experts           E[:n]      E[n:]        tokens travel to them
        others              W          W          gradients are summed over the ranks
        gathered          V[:m]      V[m:]        joined where the loss uses them
        batch               a          b

    The loss calls :func:`dispatch` where tokens meet experts, as models of
    :func:`zfun.interop.transformers.expert_parallel` do. It is averaged over the axis, so
    :func:`zfun.zero` gets the other data axes alone, and each rank of both a batch of its own. As a
    stage of :func:`zfun.pipeline`, only the last one is averaged; the others give activations.

    Args:
        loss: ``(params, batch) -> scalar``, ``(scalar, aux)`` or :func:`zfun.weighted_mean`, of
            this rank's experts and of other leaves that are whole.
        axis: the ranks that share the experts, such as ``mesh["ep"]``; of a mesh, another axis than
            those of :func:`zfun.zero`.
        experts: globs of the paths of leaves that are cut along dim 0, where their experts lie;
            none for a stage without experts.
        gathered: globs of other leaves that are cut along dim 0 between uses. This saves their
            state, and sends as much as a sum of gradients does, half of it in forward.

    Returns:
        A loss of this rank's leaves, equal on all ranks of the axis; :func:`zfun.zero` cuts the
        whole tree for it. ``aux`` is that of this rank.

    Raises:
        OptionError: an axis along which the loss is cut already, or several axes; a pipeline; from
            the returned loss, a glob that no leaf has.
        LeafError: where leaves are cut: an axis that does not divide a leaf.
        PlacementError: from the returned loss: :func:`zfun.tensor_parallel` stands around it, and
            not inside.
        SpecMismatch: from the returned loss: ranks have different globs.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     mesh = zf.mesh(group, dp=1, ep=2)
        ...     def loss(params, x):  # two experts, which scale tokens
        ...         scale = lambda rows, ids: rows * params["scales"][ids, None]
        ...         chosen, ones = (x > 2).long(), torch.ones_like(x)
        ...         return dispatch(scale, x, chosen, ones, mesh["ep"], 2).sum()
        ...     mean = expert_parallel(loss, mesh["ep"], ["scales"])
        ...     zero = zf.zero(1, mean, zf.optim.sgd(1.0), mesh["dp"])
        ...     state = zero.init({"scales": torch.tensor([1.0, 10.0])})
        ...     state, info = zero.step(state, torch.tensor([[1.0], [3.0]]) + group.rank)
        ...     return info.loss, zero.params(state)["scales"]
        >>> zf.simulate(2, main)[0]
        (tensor(36.5000), tensor([-0.5000,  6.5000]))

    After Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic
    Sharding" (2020).
    """
    outer = model_axes(loss)
    check_experts(axis, axis.size)
    if any(one.group is axis for one in outer):
        raise OptionError(
            "a loss is cut once along an axis; expert_parallel() got the axis of another transform "
            f"of this loss, {axis!r}; name another axis of the mesh"
        )
    if isinstance(loss, Pipeline):
        raise OptionError(
            "expert_parallel() takes the loss of a batch; got a pipeline, whose stages pass "
            "activations on; put expert_parallel() around each of its stages"
        )
    own = _OwnLoss(loss, axis, tuple(experts), tuple(gathered))

    def rule(path: str, leaf: Any) -> Cut | None:
        return None if own.kind_of(path) == "whole" else Cut(0)

    axes = (*outer, ModelAxis(axis, rule, has_batches=True))
    return ParallelLoss(_MeanLoss(own, axis), axes, own)


class _MeanLoss:
    """The mean of a loss over an expert axis."""

    def __init__(self, own: _OwnLoss, axis: Group) -> None:
        self.own = self.__wrapped__ = own
        self.axis = axis

    @ops.uncompiled
    def __call__(self, params: tree.Tree, *batch: Any) -> Any:
        return self._mean(self.own(params, *batch))

    def _mean(self, out: Any) -> Any:
        """Average the result of a loss over the axis."""
        _, total, weight, aux = parse(out)
        if weight is None:
            mean: Any = collectives.leave(total / self.axis.size, self.axis, name="loss")
        else:
            both = torch.stack([total, weight.to(total)])
            mean = WeightedMean(*collectives.leave(both, self.axis, name="loss").unbind())
        return mean if aux is NO_AUX else (mean, aux)


class _OwnLoss:
    """A loss of this rank's batch, of leaves that are whole, gathered or experts'."""

    def __init__(
        self,
        loss: Callable[..., Any],
        axis: Group,
        experts: tuple[str, ...],
        gathered: tuple[str, ...],
    ) -> None:
        self.loss = self.__wrapped__ = loss
        self.axis = axis
        self.globs = {"experts": experts, "gathered": gathered}
        self._known: dict[tree.Spec, list[tuple[str, str]]] = {}
        self._checked: set[tree.Spec] = set()

    def kind_of(self, path: str) -> str:
        """Return "experts", "gathered", or "whole"."""
        matches = lambda globs: any(fnmatch.fnmatchcase(path, glob) for glob in globs)
        return next((kind for kind, globs in self.globs.items() if matches(globs)), "whole")

    @ops.uncompiled
    def __call__(self, params: tree.Tree, *batch: Any) -> Any:
        if isinstance(params, Flat):
            raise PlacementError(
                "expert_parallel() takes a loss of whole leaves; got sharded parameters; put "
                "shard_params() around it: zf.shard_params(expert_parallel(loss, ...), group)"
            )
        leaves, spec = tree.flatten(params)
        kinds = self._known.get(spec)
        if kinds is None:
            kinds = self._known[spec] = self._matched(tree.paths(params), leaves)
        checks = self.axis.size > 1 and torch.is_grad_enabled() and spec not in self._checked
        # Tied leaves stay one leaf.
        made: dict[int, LazyLeaf] = {}
        of_experts: dict[Any, str] = {}
        for place, (leaf, (path, kind)) in enumerate(zip(leaves, kinds, strict=True)):
            if isinstance(leaf, Tensor) and (checks or kind != "experts"):
                if id(leaf) not in made:
                    made[id(leaf)] = self._shared(leaf, path, kind, of_experts)
                leaves[place] = made[id(leaf)]
        out = call_with(self.loss, params, spec, leaves, *batch)
        if checks:
            self._check_uses(out, of_experts)
            self._checked.add(spec)
        # A graph holds a lazy leaf only where an autograd.Function lost its gradient.
        if max(map(_use_count, made.values()), default=0) > 1:
            check_graph(out)
        return out

    def _shared(self, own: Tensor, path: str, kind: str, of_experts: dict[Any, str]) -> LazyLeaf:
        """Return a leaf that the ranks share, whose gradient backward sums at each use.

        A leaf of experts is this rank's alone, and each use adds its node to ``of_experts``.
        """

        def load(_: LazyLeaf) -> Tensor:
            tensor = tensor_of(own) if isinstance(own, LazyLeaf) else own
            if kind == "experts":
                used = tensor.view_as(tensor)
                of_experts[used.grad_fn] = path
                return used
            if kind == "gathered":
                return collectives.all_gather(tensor, self.axis, name="params", part=path)
            return collectives.enter(tensor, self.axis, name="grads", part=path)

        rows = own.shape[0] * self.axis.size if kind == "gathered" else 0
        shape = (rows, *own.shape[1:]) if kind == "gathered" else tuple(own.shape)
        source = BucketSource(load)
        return LazyLeaf(shape, own.dtype, own.device, own.requires_grad, path, source)

    def _check_uses(self, out: Any, of_experts: dict[Any, str]) -> None:
        """Refuse a term over experts that no tokens of other ranks have met.

        Tokens travel by an ``autograd.Function``, so the graph is followed up to the first one.
        """
        value = out[0] if isinstance(out, tuple) else out  # backward starts at no auxiliary result
        for node in graph_of(value, past_functions=False):
            path = of_experts.get(node)
            if path is not None:
                raise PlacementError(
                    "a loss uses the leaves of experts inside of dispatch(), where the tokens of "
                    f"all ranks meet them; got leaf {path!r}, which the result uses directly too: "
                    f"such a term has the experts of one rank of {self.axis.size}; for a penalty, "
                    "use the weight decay of the optimizer; for a leaf of no expert, pass narrower "
                    "globs in experts=",
                    leaf=path,
                )

    def _matched(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[tuple[str, str]]:
        """Return the path and the kind of each leaf, which all ranks must agree on."""
        for glob in (*self.globs["experts"], *self.globs["gathered"]):
            if not fnmatch.filter(paths, glob):
                raise OptionError(
                    f"each glob of expert_parallel() has a leaf; got {glob!r}, which matches none "
                    f"of {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}; mend the glob"
                )
        records = []
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, StyledLeaf):
                raise PlacementError(
                    f"expert_parallel() stands around tensor_parallel(); got leaf {path!r} of a "
                    "tensor-parallel loss; write expert_parallel(tensor_parallel(loss, ...), ...)",
                    leaf=path,
                )
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
            records.append(LeafRecord(path, f"{self.kind_of(path)} {shape}"))
        if self.axis.size > 1:
            with torch.no_grad():
                check_same(records, self.axis, "plan of expert_parallel()")
        return [(path, self.kind_of(path)) for path in paths]


@takes(
    experts=FUNCTION, x=TENSOR, chosen=_CHOICES, weights=TENSOR, axis=GROUP, num_experts=integer(1)
)
def dispatch(
    experts: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    axis: Group,
    num_experts: int,
) -> Tensor:
    """Apply to each token the experts that it chose, which lie on the ranks of an axis: ``S -> S``.

    Rank r has the experts from ``r * num_experts / size`` on. Tokens travel there and back, as many
    as there are for each expert; none is dropped. The host waits once, for the numbers of tokens.

    Args:
        experts: ``(rows, ids) -> rows`` of this rank's experts: row i goes through expert
            ``ids[i]``, counted from 0 on each rank. Rows lie in the order of the ranks that sent
            them, and of one rank in the order of experts and tokens. A rank that receives no row
            gets one of zeros.
        x: this rank's tokens, ``[tokens, width]``.
        chosen: the experts of each token, ``[tokens, k]``, counted over all ranks.
        weights: their weights, ``[tokens, k]``.
        axis: the ranks; each has tokens of its own.
        num_experts: of all ranks.

    Returns:
        For each token the sum of its experts' results by weight, in the dtype of ``x``.

    Raises:
        OptionError: ranks do not divide the experts, or shapes do not fit.

    Example:
        >>> import zfun as zf
        >>> scales = torch.tensor([1.0, 10.0])  # one expert on each rank
        >>> def main(group):
        ...     experts = lambda rows, ids: rows * scales[group.rank + ids, None]
        ...     x = torch.tensor([[1.0], [2.0]]) + 2 * group.rank
        ...     chosen, weights = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[1.0, 0.0]] * 2)
        ...     return dispatch(experts, x, chosen, weights, group, 2).flatten().tolist()
        >>> zf.simulate(2, main)
        [[1.0, 20.0], [3.0, 40.0]]
    """
    check_experts(axis, num_experts)
    fits = x.dim() == chosen.dim() == 2 and len(x) == len(chosen)
    if not fits or weights.shape != chosen.shape:
        raise OptionError(
            "dispatch() takes tokens [tokens, width], and [tokens, k] experts and weights; got "
            f"shapes {tuple(x.shape)}, {tuple(chosen.shape)} and {tuple(weights.shape)}; reshape "
            "them"
        )
    own, k = num_experts // axis.size, chosen.shape[1]
    everywhere, counts = _gathered_counts(chosen, axis, num_experts)
    to_ranks = tuple(
        tuple(sum(row[i : i + own]) for i in range(0, num_experts, own)) for row in counts
    )
    order = chosen.flatten().argsort(stable=True)
    rows = exchange_rows(x[order // k], axis, to_ranks, _NAME, "dispatch")
    received = everywhere.narrow(1, axis.rank * own, own).flatten()
    ids = torch.arange(own, device=x.device).repeat(axis.size)
    ids = ids.repeat_interleave(received, output_size=len(rows))
    if len(rows):
        out = experts(rows, ids)
    else:
        out = experts(F.pad(rows, (0, 0, 0, 1)), F.pad(ids, (0, 1)))[:0]
    back = tuple(zip(*to_ranks, strict=True))
    results = exchange_rows(out, axis, back, _NAME, "combine")
    # The place of each row in the sorted order.
    results = results[order.argsort()].unflatten(0, chosen.shape)
    return (results * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def check_experts(axis: Group, num_experts: int) -> None:
    """Refuse experts that the ranks of an axis do not divide, and several axes."""
    if len(axes_of(axis)) > 1:
        raise OptionError(
            f"experts lie on the ranks of one axis; got {axis!r}; pass one axis, such as mesh['ep']"
        )
    if num_experts % axis.size:
        raise OptionError(
            f"the ranks of an expert axis divide the experts; got {num_experts} experts over "
            f"{axis.size} ranks; use an axis whose size divides the experts"
        )


@ops.uncompiled
def _gathered_counts(
    chosen: Tensor, axis: Group, num_experts: int
) -> tuple[Tensor, list[list[int]]]:
    """Return how many tokens of each rank chose each expert; the host waits."""
    places = chosen.flatten().long()
    counts = places.new_zeros(num_experts).scatter_add_(0, places, torch.ones_like(places))
    everywhere = gather_values(counts, axis, _NAME)
    if ops.is_abstract(chosen):
        # A plan knows no choices, and takes equal ones.
        equal = [(chosen.numel() + expert) // num_experts for expert in range(num_experts)]
        return everywhere, [equal] * axis.size
    return everywhere, everywhere.tolist()
