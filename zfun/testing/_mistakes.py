"""Known mistakes of gradients, each made in the plain loop on purpose.

A function returns the cause in words where its mistake gives the numbers of the failing run, and
else an empty text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zfun.errors import ZfunError
from zfun.testing._evidence import Evidence
from zfun.testing._plain import Leaves, gradient_of, updated


def wrong_mean(evidence: Evidence) -> str:
    """The mean over equally many parts, where the loss is no such mean."""
    size, count = evidence.case.size, evidence.case.num_micro_batches
    parts = evidence.parts
    if len(parts) == 1 or not evidence.reproduced_by(_sum([g for _, g in parts], 1 / len(parts))):
        return ""
    what = "micro-batches'" if size == 1 else "ranks'" if count == 1 else "ranks' micro-batches'"
    weights = _weights(evidence)
    if weights is not None:
        shown = ", ".join(f"{weight:.3g}" for weight in weights[:6])
        return (
            f"wrong mean: the mean of the {what} losses is taken, and their batches do not count "
            f"alike: in the loss of the whole batch they have the weights {shown}"
            f"{', ...' if len(weights) > 6 else ''} (rows or tokens); return "
            "zf.weighted_mean(total, count) from the loss"
        )
    return (
        f"a loss of the whole batch: the mean of the {what} losses is taken, and no weights make "
        "the loss of the whole batch of them; look for statistics over the rows (BatchNorm, "
        "in-batch negatives), which need zfun.collectives.all_reduce, and for random numbers by "
        "place in the batch (dropout), which need a seed for each row"
    )


def _weights(evidence: Evidence) -> list[float] | None:
    """Return the weights with which the parts make up the loss of the whole batch, if any do."""
    losses = torch.tensor([loss for loss, _ in evidence.parts], dtype=torch.float64)
    columns = torch.stack([evidence.vector(grads) for _, grads in evidence.parts], 1)
    scale = float(columns.norm()) or 1.0
    # The weights add up to one, and make the loss and the gradient.
    left = torch.cat([torch.ones(1, len(losses)) * scale, losses[None], columns])
    right = torch.cat(
        [torch.tensor([scale, evidence.right.loss]), evidence.vector(evidence.right.raw)]
    )
    found = torch.linalg.lstsq(left, right[:, None], driver="gelsd").solution.flatten()
    error = float((left @ found - right).norm())
    is_weighted = error <= 1e-8 * float(right.norm()) and bool((found >= -1e-8).all())
    return found.tolist() if is_weighted else None


def wrong_weights(evidence: Evidence) -> str:
    """The gradients of the ranks count otherwise than alike."""
    size = evidence.case.size
    found, _ = evidence.changes()
    if size == 1 or evidence.difference.kind == "loss" or len(found) < size + 2:
        return ""
    columns = torch.stack([evidence.change_of(own) for own in evidence.by_rank], 1)
    weights = torch.linalg.lstsq(columns, found[:, None], driver="gelsd").solution.flatten()
    weighted = [
        [weight * x for x in own]
        for weight, own in zip(weights.tolist(), evidence.by_rank, strict=True)
    ]
    if not evidence.reproduced_by(_sum(weighted, 1.0)):
        return ""
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:6])
    return (
        f"wrong weights: the gradients of the ranks count {shown}{', ...' if size > 6 else ''}, "
        f"and should count {1 / size:.4g} each; look for a factor of the loss or of the gradients "
        "that depends on the rank"
    )


def not_reduced(evidence: Evidence) -> str:
    size = evidence.case.size
    for rank, own in enumerate(evidence.by_rank if size > 1 else []):
        for factor in (1.0, 1 / size):
            if evidence.reproduced_by(_sum([own], factor)):
                return (
                    f"gradients are not reduced: rank {evidence.difference.rank} has the gradient "
                    f"of the batch of rank {rank} alone; put zf.data_parallel() around "
                    "zf.value_and_grad(), or all_reduce in the backward pass"
                )
    return ""


def wrong_dual(evidence: Evidence) -> str:
    size = evidence.case.size
    if size == 1:
        return ""
    own = torch.stack([evidence.vector(grads) for grads in evidence.by_rank])
    for owner in evidence.owners():
        mixed = own.gather(0, owner[None])[0]
        for factor in (1.0, 1 / size):
            if evidence.reproduced_by(_leaves(evidence, mixed * factor)):
                return (
                    "the dual of a gather is a reduce-scatter: each rank keeps its piece of the "
                    "gradient of its own batch, and the other ranks' terms are lost; sum in the "
                    "backward pass, and test the collective with zfun.testing.assert_adjoint()"
                )
    return ""


def stale(evidence: Evidence) -> str:
    step = evidence.difference.step
    for old in range(step - 1, -1, -1):
        if evidence.moved_to(evidence.plain[old].after):
            return (
                f"stale gather: the parameters after step {step} are those after step {old}; "
                "gather again after every update, and key caches by the value, not by the name"
            )
        _, raw = gradient_of(evidence.problem, evidence.plain[old].before, evidence.right.batch)
        if evidence.reproduced_by(raw):
            return (
                f"stale gather: step {step} computes with the parameters of step {old}; a gathered "
                "copy outlives the update; gather again after every update, and key caches by the "
                "value, not by the name"
            )
    return ""


def lost_part(evidence: Evidence) -> str:
    size, problem, right = evidence.case.size, evidence.problem, evidence.right
    for rank in range(size if size > 1 else 0):
        others = [own for other, own in enumerate(evidence.by_rank) if other != rank]
        if any(evidence.reproduced_by(_sum(others, 1 / n)) for n in (size, size - 1)):
            return (
                f"the batch of rank {rank} of {size} is lost; look at the ranks that the sum of "
                "gradients goes over"
            )
    parts = problem.split(right.batch, size)
    for count in sorted({2, 3, 4, max(2, evidence.case.num_micro_batches)}):
        try:
            micro = [problem.split(part, count) for part in parts]
        except ZfunError:
            return ""
        grads = [[gradient_of(problem, right.before, one)[1] for one in part] for part in micro]
        for lost in (count - 1, 0):
            kept = [one for part in grads for i, one in enumerate(part) if i != lost]
            for divisor in (count, count - 1):
                if evidence.reproduced_by(_sum(kept, 1 / (size * divisor))):
                    return (
                        f"lost micro-batch: micro-batch {lost} of {count} does not count; look at "
                        "the loop over micro-batches, and at what the last one returns"
                    )
    return ""


def lost_tie(evidence: Evidence) -> str:
    problem, right = evidence.problem, evidence.right
    first = problem.first
    tied = [i for i, place in enumerate(first) if first.count(place) > 1]
    if not tied:
        return ""
    _, alone = gradient_of(problem, right.before, right.batch, tied=False)
    # Each place with its own gradient, then all places with that of one of them.
    guesses = [alone]
    for turn in range(max(first.count(place) for place in first)):
        chosen = []
        for place in first:
            uses = [i for i, other in enumerate(first) if other == place]
            use = uses[min(turn, len(uses) - 1)]
            chosen.append(alone[use])
        guesses.append(chosen)
    if any(map(evidence.reproduced_by, guesses)):
        names = ", ".join(repr(problem.paths[i]) for i in tied)
        return (
            f"tied gradient counted once: {names} are one tensor, and the gradient of one use "
            "stands for the sum over all uses; differentiate by one variable, and place that "
            "variable at every path"
        )
    return ""


def wrong_factor(evidence: Evidence) -> str:
    size, count = evidence.case.size, evidence.case.num_micro_batches
    _, raw = gradient_of(evidence.problem, evidence.right.before, evidence.right.batch)
    known = {
        float(size): "the gradients are summed over the ranks and not divided by their number",
        1 / size: "the gradients are divided by the number of ranks twice",
        float(count): "the gradients are summed over the micro-batches and not divided",
        1 / count: "the gradients are divided by the number of micro-batches twice",
    }
    known.pop(1.0, None)
    for factor, words in known.items():
        if evidence.reproduced_by(_sum([raw], factor)):
            return f"wrong mean: {words}; look at reduce= and at divisions in your transform"
    if evidence.difference.kind == "loss":
        return ""
    found, right = evidence.changes()
    factor = float(found @ right) / float(right @ right or 1.0)
    if not float((found - factor * right).norm()) <= evidence.tolerance * float(found.norm()):
        return ""
    if evidence.difference.kind == "gradients":
        return (
            f"wrong mean: all gradients are {factor:.6g} times the right ones on {size} ranks and "
            f"{count} micro-batches; look for a factor in the loss or in your transform"
        )
    return (
        f"wrong step size: all changes are {factor:.6g} times the right ones; look for another "
        "learning rate, or for a factor of the loss or of the gradients"
    )


def lost_state(evidence: Evidence) -> str:
    problem, right = evidence.problem, evidence.right
    if evidence.difference.step == 0:
        return ""
    state = problem.rule.init(problem.unflatten(right.before))
    if evidence.moved_to(updated(problem, right.before, state, right.grads)[0]):
        return (
            "lost state: the update starts from a new optimizer state; pass on the state that the "
            "last update returned"
        )
    return ""


def _sum(values: list[Leaves], factor: float) -> Leaves:
    """Return the sum over ranks or micro-batches, times a factor."""
    return [torch.stack(terms).sum(0) * factor for terms in zip(*values, strict=True)]


def _leaves(evidence: Evidence, vector: Tensor) -> Leaves:
    """Cut a vector into leaves; tied leaves get the same piece."""
    pieces = iter(vector.split(evidence.numels()))
    by_place = {place: next(pieces) for place in sorted(set(evidence.problem.first))}
    like = evidence.right.before
    return [_like(by_place[place], like[i]) for i, place in enumerate(evidence.problem.first)]


def _like(piece: Tensor, leaf: Tensor) -> Tensor:
    if leaf.is_complex():
        return torch.view_as_complex(piece.view(*leaf.shape, 2)).to(leaf.dtype)
    return piece.view(leaf.shape).to(leaf.dtype)
