"""The gradients of a step of an engine: the sum over its backward passes."""

from __future__ import annotations

import math
import operator
import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import Group, all_reduce, gather_json, sum_group
from zfun.errors import OptionError
from zfun.flat import Flat, leaf_spans, ravel
from zfun.interop._named import named
from zfun.placement import P, S
from zfun.reductions import global_norm
from zfun.transforms import add_grads, redistribute, scale_grads, unshard

# The bits of a digest of what ranks must have alike.
_BITS = 16
# Before the name of a buffer among these numbers.
_BUFFER = "buffer "
_NOTHING: Mapping[str, Any] = {}


class Told(NamedTuple):
    """The loss and the weight of each backward pass, and each flag that any rank has raised."""

    pairs: Tensor
    flags: list[bool]


class Shown(dict[str, tuple[weakref.ref[Tensor], int]]):
    """The gradients that a read has moved to ``.grad``, and their versions then, by name."""

    def held(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those that are the gradients of parameters still, which code may hold."""
        with torch._C.DisableTorchFunctionSubclass():
            found = ((name, ref()) for name, (ref, _) in self.items())
            return {name: x for name, x in found if x is not None and params[name].grad is x}

    def is_all(self, name: str, param: Tensor) -> bool:
        """Whether a parameter has no gradient but the one of these, as it was."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
        found, version = self.get(name, (lambda: None, -1))
        return grad is None or (found() is grad and grad._version == version)


class GradSum:
    """The sum of gradients over the backward passes of a step.

    Args:
        group: the ranks.
        apart: leaves that have buckets of their own, and do not count for the norm.
        scale: the loss scale of the passes.
    """

    def __init__(self, group: Group, apart: Collection[str] = (), scale: float = 1.0) -> None:
        self.grads: Flat | None = None
        # Whether the pass that runs has reached the parameters.
        self.has_run = False
        # The leaves that the pass that runs gives gradients; None for all.
        self.only: frozenset[str] | None = None
        # Whether code wants to differentiate the gradients: create_graph=True.
        self.had_graph = False
        # Whether the passes are those of weighted means.
        self.is_weighted = False
        self._group, self._mesh, self._apart = group, sum_group(group), apart
        # The norm before clipping, and the bound, until the step or cut() clips.
        self._clipped: tuple[Tensor, float] | None = None
        self._fresh: Flat | None = None
        self._pairs: list[Tensor] = []
        # The loss scale that the sum has, the one that unscale() took out, and what it saw then.
        self.scale, self._unscaled, self._overflowed = scale, 1.0, False
        # result() has multiplied the sum with this; later gradients are too, when they are added.
        self._factor = 1.0
        # Whether the passes have the default scale, and no weight.
        self._kinds: set[tuple[bool, bool]] = set()

    @property
    def num_passes(self) -> int:
        """The number of backward passes."""
        return len(self._pairs)

    def check(self, scale: float | None, weight: Any) -> None:
        """Refuse a pass of another kind than those before."""
        if scale is not None and weight is not None:
            raise OptionError("a weighted mean has a weight; got scale= too; leave scale out")
        kind = (scale is None, weight is None)
        if self._kinds - {kind}:
            raise OptionError(
                "the losses of a step have weights of one kind; got a weighted mean, scale= or "
                "neither after another kind; pass the same to each call of backward()"
            )
        self._kinds.add(kind)

    def begin(self, *, weighted: bool) -> None:
        """Begin a backward pass."""
        self.cut()
        self.is_weighted, self.has_run = weighted, False

    def add(self, grads: Flat) -> None:
        """Add gradients of a backward pass."""
        self.has_run = True
        grads = grads if self.only is None else _only(grads, self.only)
        if self.is_weighted:
            self._fresh = add_grads(self._fresh, grads)
        else:
            total = self.grads
            if total is not None:
                # Gradients from outside of calls may have come first, with another placement.
                total = redistribute(total, grads.placement, grads.group, name="grads")
            self.grads = add_grads(total, scale_grads(grads, self._factor / self._unscaled))

    def count(self, total: Tensor, weight: Any, scale: float) -> None:
        """End a backward pass."""
        pair = torch.stack([total * scale, total.new_ones(()) if weight is None else weight])
        fresh, self._fresh = self._fresh, None
        if weight is not None:
            # The gradients of one pass are a mean, and those of several passes a sum.
            if len(self._pairs) == 1:
                self.grads = self._weighted(self.grads, self._pairs[0])
            if self._pairs:
                fresh = scale_grads(self._weighted(fresh, pair), self._factor / self._unscaled)
            self.grads = add_grads(self.grads, fresh)
        self._pairs.append(pair)

    def _weighted(self, grads: Any, pair: Tensor) -> Any:
        return scale_grads(grads, float(all_reduce(pair, self._mesh)[1]))

    def told(self, flags: Sequence[bool], alike: Mapping[str, Any] = _NOTHING) -> Told:
        """Send losses and flags to all ranks; every rank must call.

        Args:
            flags: of this rank.
            alike: numbers of which ranks must have the same.
        """
        device = self._pairs[0].device if self._pairs else None
        bits = _bits(alike) if alike else []
        told = torch.tensor([*map(float, flags), *bits], device=device)
        summed = all_reduce(torch.cat([*self._pairs, told]), self._mesh)
        first = 2 * len(self._pairs)
        found = [x > 0 for x in summed[first:].tolist()]
        # Some rank has the bit, and some rank has not.
        ones, zeros = found[len(flags) :][:_BITS], found[len(flags) :][_BITS:]
        if any(map(operator.and_, ones, zeros)):
            _check_alike(alike, self._mesh)
        return Told(summed[:first].view(-1, 2), found[: len(flags)])

    def add_strays(self, strays: Mapping[str, Tensor], params: Flat, *, divided: bool) -> None:
        """Add gradients that backward has left in tensors of this rank; every rank must call.

        Unless they are ``divided`` already, they are multiplied like the gradients of calls.
        """
        self.cut()
        if (True, False) in self._kinds:
            raise OptionError(
                "a weighted mean has gradients of calls of the engine alone; got a gradient of "
                f"{next(iter(strays), 'a leaf on another rank')!r} from outside; compute the loss "
                "in engine.run(), or return a plain mean"
            )
        layout, like, mesh = params.layout, self.grads, self._mesh
        factor = 1.0 if divided else self._factor / self._unscaled
        whole = [
            scale_grads(strays[slot.path].detach().to_dense(), factor)
            if slot.path in strays
            else torch.zeros(slot.shape, dtype=slot.dtype, device=layout.device)
            for slot in layout.leaves
        ]
        values = tree.unflatten(layout.spec, [whole[position] for position in layout.positions])
        dtypes = (
            [torch.promote_types(bucket.dtype, torch.float32) for bucket in layout.buckets]
            if like is None
            else [buffer.dtype for buffer in like.buffers]
        )
        partial = ravel(values, layout, mesh, P, scale=1.0 / mesh.size, dtypes=dtypes)
        partial = partial.with_missed({x.path: None for x in layout.leaves if x.path not in strays})
        if like is None:
            over = self._group if params.placement is S else mesh
            partial = redistribute(partial, params.placement, over, name="grads")
        elif like.placement is not P:
            partial = redistribute(partial, like.placement, like.group, name="grads")
        self.grads = add_grads(like, partial)

    def check_read(self, name: str, engine: Any) -> None:
        """Refuse a read of a gradient that should have a graph, or that is in no sum."""
        is_missed = engine._groups is not None and engine._groups.leaves_out(name)
        if is_missed and (self._pairs or engine.has_grads or engine._shown):
            raise OptionError(
                "an engine computes the gradients of the parameters in its optimizer; got a read "
                f"of .grad of leaf {name!r}, which is in no group; freeze it with "
                "requires_grad_(False), or give it to the optimizer",
                leaf=name,
            )
        if self.had_graph:
            raise OptionError(
                "gradients of an engine are sums over the ranks, without a graph; got a read of "
                f".grad of leaf {name!r} after backward(create_graph=True); take torch.autograd."
                "grad(..., create_graph=True) by attributes of the module, inside of forward or "
                "engine.run()"
            )

    def move(self, params: Mapping[str, Any], held: Mapping[str, Tensor]) -> Shown:
        """Move the sum to ``.grad`` of parameters, whole; every rank must call.

        Tensors in ``held`` stay the gradients that they were. Returns the gradients that any rank
        has, and their versions, by name.
        """
        self.cut()
        grads: Any = self.grads  # with stray ones
        leaves = [slot.path for slot in grads.layout.leaves]
        used = self.told([path not in grads.missed for path in leaves]).flags
        whole, self.grads = named(unshard(grads)), None
        moved = Shown()
        with torch._C.DisableTorchFunctionSubclass():
            for path in (path for path, is_used in zip(leaves, used, strict=True) if is_used):
                # A version of its own tells what code writes.
                param, grad = params[path], ops.apart(whole[path].detach())
                param.grad_dtype = None  # 16 bits may not hold what 32 bits have
                grad = grad.to(torch.promote_types(grad.dtype, param.dtype))
                param.grad = held[path].copy_(grad) if path in held else grad
                moved[path] = weakref.ref(param.grad), param.grad._version
        return moved

    @property
    def bound(self) -> float | None:
        """The bound to which the step clips."""
        return None if self._clipped is None else self._clipped[1]

    def norm(self) -> Tensor:
        """Return the norm, without the loss scale and before clipping; every rank must call."""
        grads = self.grads
        if grads is not None and self._apart:
            grads = grads.select(_buckets_without(grads, self._apart))
        return global_norm(grads) / self.scale

    def unscale(self) -> None:
        """Take the loss scale out of the sum; every rank must call.

        As in torch, the step is skipped if the sum is not finite now, whatever code makes of it.
        """
        if self.scale == 1.0 or self.grads is None:
            return
        self.cut()
        self._overflowed = not math.isfinite(float(self.norm()))
        # A scale is there because 16 bits do not hold the gradients without it.
        self.grads = scale_grads(_wide(self.grads), 1.0 / self.scale)
        self._unscaled, self.scale = self.scale, 1.0

    def rescaled(self, grads: Flat) -> Flat:
        """Return the gradients of the step with the loss scale, which the step takes out."""
        if self._overflowed:
            return _spoiled(grads)
        return grads if self._unscaled == 1.0 else scale_grads(grads, self._unscaled)

    def clip(self, norm: Tensor, bound: float) -> None:
        """Let the step clip the gradients, whose norm is ``norm``, unless :meth:`cut` does."""
        first, least = self._clipped or (norm, bound)
        self._clipped = first, min(least, bound)

    def clamp(self, bound: float, *, keeps_overflow: bool) -> None:
        """Clip each element."""
        self.cut()
        if self.grads is None:
            return
        here = stores.resident(self.grads)
        buffers = list(here.buffers)
        for index in _buckets_without(here, self._apart):
            x = buffers[index]
            small = x.clamp(-bound * self.scale, bound * self.scale)
            buffers[index] = torch.where(x.isfinite(), small, x) if keeps_overflow else small
        self.grads = here.with_buffers(buffers)

    def cut(self) -> None:
        """Clip now, because other gradients are added to the clipped ones, or code reads these."""
        clipped, grads, self._clipped = self._clipped, self.grads, None
        if clipped is None or grads is None:
            return
        ratio = clipped[1] / (float(clipped[0]) + 1e-6)
        chosen = _buckets_without(grads, self._apart)
        buffers = list(grads.buffers)
        own = grads.select(chosen)
        # As in torch, a norm of NaN makes all gradients NaN.
        own = _spoiled(own) if math.isnan(ratio) else scale_grads(own, min(1.0, ratio))
        for index, x in zip(chosen, own.buffers, strict=True):
            buffers[index] = x
        self.grads = grads.with_buffers(buffers)

    def result(self, told: Told, accumulate: int) -> tuple[Any, Tensor]:
        """Return the gradients and the loss of the step; plain losses are averaged.

        Passes may follow, and another result.
        """
        is_mean, is_plain = next(iter(self._kinds), (False, True))
        losses = told.pairs[:, 0]
        if is_plain:
            count = accumulate if is_mean else 1
            loss, factor = (losses * (1.0 / self._mesh.size)).sum() / count, 1.0 / count
        else:
            weight = float(told.pairs[:, 1].sum()) or 1.0
            loss = losses.sum() / weight
            factor = 1.0 / weight if len(self._pairs) > 1 else 1.0
        if self.grads is not None:
            self.grads = scale_grads(self.grads, factor / self._factor)
        self._factor = factor
        return self.grads, loss


def alike_in(engine: Any, *, steps: bool) -> dict[str, Any]:
    """Return the numbers of which all ranks must have the same, if an engine ``steps`` now."""
    if not steps or sum_group(engine._group).size == 1:
        return {}
    groups, bound = engine._groups, engine._sum.bound
    numbers = engine.hyperparams if groups is None else groups.numbers()
    bounds = {"the bound of the norm": engine.clip_norm, "the bound of clip()": bound}
    written = {f"{_BUFFER}{name}": x for name, x in engine._buffers.written.items()}
    return {**numbers, **bounds, **written}


def _bits(alike: Mapping[str, Any]) -> list[int]:
    """Return the bits of a digest, and those of the complement."""
    digest = zlib.crc32(repr(sorted(alike.items())).encode())
    bits = [digest >> i & 1 for i in range(_BITS)]
    return [*bits, *(1 - bit for bit in bits)]


def _check_alike(alike: Mapping[str, Any], mesh: Group) -> None:
    """Refuse numbers that differ between ranks, and name the first; every rank must call."""
    found = gather_json(dict(alike), mesh, "numbers of a step")
    for name in sorted({name for values in found for name in values}):
        values = [values.get(name) for values in found]
        rank = next((rank for rank, x in enumerate(values) if x != values[0]), None)
        if rank is None:
            continue
        if name.startswith(_BUFFER):
            raise OptionError(
                "the ranks of a step have the same buffers; got another value of buffer "
                f"{name.removeprefix(_BUFFER)!r} on rank {rank} than on rank 0, which code has "
                "written since the last step, outside of forward; write the same value on all "
                "ranks, or write in forward, or pass buffers='by rank'",
                rank=rank,
            )
        raise OptionError(
            f"all ranks step with the same numbers of the optimizer; got {name} {values[rank]} on "
            f"rank {rank}, and {values[0]} on rank 0; give a scheduler a value that all ranks "
            "have, such as a mean over the ranks",
            rank=rank,
        )


def _wide(grads: Flat) -> Flat:
    """Return gradients in at least 32 bits."""
    here = stores.resident(grads)
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in here.buffers]
    return here.with_buffers(wide)


def _spoiled(grads: Flat) -> Flat:
    """Return gradients that are all NaN."""
    here = stores.resident(grads)
    return here.with_buffers([torch.full_like(x, torch.nan) for x in here.buffers])


def _only(grads: Flat, names: Collection[str]) -> Flat:
    """Return gradients in which other leaves have none."""
    here = stores.resident(grads)
    for span in leaf_spans(here):
        if span.path not in names:
            here.buffers[span.bucket][span.start : span.stop].zero_()
    others = {slot.path: None for slot in here.layout.leaves if slot.path not in names}
    return here.with_missed({**grads.missed, **others})


def _buckets_without(grads: Flat, apart: Collection[str]) -> list[int]:
    """Return the buckets that have none of these leaves."""
    first = (grads.layout.leaves[bucket.leaves[0]].path for bucket in grads.layout.buckets)
    return [index for index, path in enumerate(first) if path not in apart]
