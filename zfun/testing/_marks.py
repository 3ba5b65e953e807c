"""Known mistakes on shards, recognised by the elements that are wrong, and by how much."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zfun.testing._evidence import Evidence

_PRECISIONS = (torch.bfloat16, torch.float16, torch.float32)


def rounding(evidence: Evidence) -> str:
    if evidence.difference.kind == "loss":
        return ""
    found, right = evidence.changes()
    size = float(right.norm())
    error = float((found - right).norm()) / size if size else math.inf
    for dtype in _PRECISIONS:
        for factor in (1, evidence.case.size, evidence.case.num_micro_batches):
            x = found * factor
            exact = bool(((x - x.to(dtype).double()).abs() <= 1e-13 * x.abs()).all())
            if exact and error <= 8 * torch.finfo(dtype).eps:
                return _in_dtype(dtype, error)
    if evidence.seen.grads is None:
        # The root mean square of rounding errors is about 0.3 eps.
        far = {dtype: _distance(error, 0.3 * torch.finfo(dtype).eps) for dtype in _PRECISIONS}
        nearest = min(far, key=lambda dtype: far[dtype])
        return _in_dtype(nearest, error) if far[nearest] < math.log(12) else ""
    return ""


def _distance(x: float, y: float) -> float:
    return abs(math.log(x / y)) if x else math.inf


def _in_dtype(dtype: torch.dtype, error: float) -> str:
    return (
        f"reduction in the wrong dtype: the relative error of {error:.2g} is that of rounding to "
        f"{dtype}; cast before the collective, not after, and see "
        "zf.Precision(reduce=...); zf.record(group).log shows the dtype of every collective"
    )


def decay(evidence: Evidence) -> str:
    """All changes are right but for a multiple of the parameters."""
    if evidence.difference.kind == "loss":
        return ""
    found, right = evidence.changes()
    factor = _decay_of(evidence, found - right, torch.ones_like(found, dtype=torch.bool))
    return (
        f"wrong decay: the {_what(evidence)} differ by {factor:.4g} times the parameters; look for "
        "weight decay, or an L2 term of the loss, that is added twice, on some ranks only, or "
        "not at all"
        if factor
        else ""
    )


def _decay_of(evidence: Evidence, error: Tensor, part: Tensor) -> float:
    """Return the factor by which an error is a multiple of the parameters, or 0."""
    error, values = error[part], evidence.vector(evidence.right.before)[part]
    square = float(values @ values)
    factor = float(error @ values) / square if square else 0.0
    # Two elements at least, because one is always a multiple.
    is_decay = len(error) > 1 and float((error - factor * values).norm()) <= 1e-6 * float(
        error.norm()
    )
    return factor if is_decay else 0.0


def _what(evidence: Evidence) -> str:
    return "gradients" if evidence.difference.kind == "gradients" else "changes"


def own_rule(evidence: Evidence) -> str:
    """Some ranks are right, and all elements of the others are wrong."""
    size, difference = evidence.case.size, evidence.difference
    if difference.kind == "loss" or size == 1:
        return ""
    found, right = evidence.changes()
    wrong = evidence.wrong()
    if len(difference.ranks) < size and difference.kind != "ranks":
        return _of_rank(evidence, difference.ranks, found, right, wrong)
    for owner in evidence.owners():
        mine = [owner == rank for rank in range(size)]
        bad = [rank for rank in range(size) if bool(wrong[mine[rank]].any())]
        good = [rank for rank in range(size) if bool(mine[rank].any()) and rank not in bad]
        if good and bad and all(bool(wrong[mine[rank] & (right != 0)].all()) for rank in bad):
            part = torch.stack([mine[rank] for rank in bad]).any(0)
            return _of_rank(evidence, bad, found, right, part)
    return ""


def _of_rank(
    evidence: Evidence, ranks: list[int], found: Tensor, right: Tensor, part: Tensor
) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    factor = _decay_of(evidence, found - right, part)
    square = float(right[part] @ right[part])
    scale = float(found[part] @ right[part]) / square if square else 0.0
    how = ""
    if factor:
        how = f" by {factor:.4g} times the parameters, as by another weight decay"
    elif float((found - scale * right)[part].norm()) <= 1e-6 * float(right[part].norm()):
        how = f" by the factor {scale:.6g}, as by another learning rate"
    return (
        f"a rule of one rank: the {_what(evidence)} of {names} differ{how}, and the other ranks "
        "are right; look for options, branches and random numbers that depend on the rank"
    )


def lost_tail(evidence: Evidence) -> str:
    if evidence.difference.kind == "loss":
        return ""
    found, right = evidence.changes()
    lost = evidence.wrong()
    if bool(found[lost].any()) or not bool(lost.any()):
        return ""
    size, numels = evidence.case.size, evidence.numels()
    tails = [torch.arange(n) >= n - n % size for n in numels]
    total = sum(numels)
    for tail in (torch.cat(tails), torch.arange(total) >= total - total % size):
        if torch.equal(lost, tail & (right != 0)):
            return (
                f"lost padding: the last {int(lost.sum())} elements, the remainder of a division "
                f"by {size} ranks, get nothing; pad to a multiple of the ranks before cutting, "
                "and cut the padding off after gathering"
            )
    return ""


def skips_alone(evidence: Evidence) -> str:
    difference, size = evidence.difference, evidence.case.size
    if difference.kind == "loss" or size == 1:
        return ""
    found, right = evidence.changes()
    if len(difference.ranks) < size and not (found.any() and right.any()):
        return _skips(difference.ranks)
    lost = evidence.wrong()
    for owner in evidence.owners():
        skipping = []
        for rank in range(size):
            mine = owner == rank
            if not bool(lost[mine].any()):
                continue
            moved, should = bool(found[mine].any()), bool(right[mine].any())
            if moved == should:
                break
            skipping.append(rank)
        else:
            others = [rank for rank in range(size) if rank not in skipping and any(owner == rank)]
            if skipping and others:
                return _skips(skipping if right.any() else others)
    return ""


def _skips(ranks: list[int]) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return (
        f"one rank skips alone: {names} left the step out, and the others took the step; all ranks "
        "decide together: zfun.reductions.any_rank(flag, group), or a norm over all ranks"
    )


def own_norm(evidence: Evidence) -> str:
    if evidence.difference.kind == "loss" or evidence.case.size == 1:
        return ""
    found, right = evidence.changes()
    leaf = torch.cat([torch.full((n,), i) for i, n in enumerate(evidence.numels())])
    for owner in evidence.owners():
        # One factor for each rank, or one for each rank and leaf.
        for parts in (owner, owner + evidence.case.size * leaf):
            if 2 * len(parts.unique()) > len(parts):
                continue  # a part of one element is always a multiple
            factors = _factors(found, right, parts, 4 * evidence.tolerance)
            spread = max(factors, default=0.0) - min(factors, default=0.0)
            if spread > 10 * evidence.tolerance:
                shown = ", ".join(f"{factor:.4g}" for factor in factors[:6])
                return (
                    "norm of the own shard: the pieces of the ranks are the right ones times "
                    f"{shown}{', ...' if len(factors) > 6 else ''}; a norm over shards is summed "
                    "over the ranks, as zfun.reductions.global_norm() does"
                )
    return ""


def _factors(found: Tensor, right: Tensor, parts: Tensor, tolerance: float) -> list[float]:
    """Return the factor of each part; nothing if a part is no multiple of the right one."""
    factors = []
    for part in parts.unique().tolist():
        x, y = found[parts == part], right[parts == part]
        if not y.any():
            continue
        factor = float(x @ y) / float(y @ y)
        if not float((x - factor * y).norm()) <= tolerance * float(y.norm()):
            return []
        factors.append(factor)
    return factors


def no_gradient(evidence: Evidence) -> str:
    if evidence.difference.kind == "loss" or not evidence.difference.leaves:
        return ""
    place = evidence.difference.leaves[0]
    if evidence.seen.grads is not None:
        is_lost = not evidence.seen.grads[place].any()
    else:
        is_lost = torch.equal(evidence.seen.params[place], evidence.right.before[place])
    return (
        f"leaf {evidence.path!r} gets no gradient at all; look for detach(), .data and "
        "torch.no_grad() between that leaf and the loss, and for a leaf that the cut leaves out"
        if is_lost
        else ""
    )
