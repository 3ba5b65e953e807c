"""The likely cause of a difference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from zfun.errors import ZfunError
from zfun.testing import _marks, _mistakes
from zfun.testing._evidence import Evidence

_CAUSES: tuple[Callable[[Evidence], str], ...] = (
    _mistakes.wrong_mean,
    _marks.skips_alone,
    _marks.lost_tail,
    _mistakes.stale,
    _mistakes.lost_tie,
    _mistakes.not_reduced,
    _mistakes.wrong_dual,
    _mistakes.lost_part,
    _marks.own_rule,
    _mistakes.wrong_factor,
    _mistakes.lost_state,
    _mistakes.wrong_weights,
    _marks.decay,
    _marks.rounding,
    _marks.own_norm,
    _marks.no_gradient,
)


def likely_cause(evidence: Evidence) -> str:
    """Return the likely cause, and the place to look at."""
    if evidence.difference.kind == "padding":
        return (
            "padding must be zero and stay zero, because norms and sums count whole buffers; "
            f"{evidence.difference.text}; multiply, or add to the spans of zfun.flat.leaf_spans()"
        )
    for cause in _CAUSES:
        try:
            found = cause(evidence)
        except ZfunError:  # a batch that cannot be split further
            continue
        if found:
            return found
    return _by_elimination(evidence)


def cause_by_axis(evidence: Evidence) -> str:
    """Return the likely cause of a difference that needs a model axis."""
    difference, axes = evidence.difference, evidence.case.model_axes
    if difference.kind == "copies":
        return (
            f"the ranks of axis {difference.text!r} share the leaf, and each steps it by its own "
            "gradient, which is a part of the sum; add the parts over the axis: read the leaf "
            "through zfun.collectives.enter(leaf, axis), or give it the style "
            "'replicated_with_grad_allreduce'"
        )
    named = " and ".join(f"{name!r} ({count} ranks)" for name, count in axes.items())
    if difference.kind != "loss" and difference.leaves:
        found, right = (torch.view_as_real(x) if x.is_complex() else x for x in evidence.leaf_of())
        factor = float((found * right).sum() / right.square().sum())
        off = float(torch.linalg.vector_norm(found - factor * right))
        if off <= 4 * evidence.tolerance * float(torch.linalg.vector_norm(found)):
            for name, count in axes.items():
                for times in (count, 1 / count):
                    if abs(factor / times - 1) < 1e-6:
                        return (
                            f"wrong divisor: the leaf is off by a factor of {times:.6g}, and axis "
                            f"{name!r} has {count} ranks; a sum over the axis comes twice, or is "
                            "missing, or the loss is divided by its size"
                        )
    return (
        f"the case passes with one rank along {named}, so a message along it is missing, or comes "
        "twice: where whole values meet cut leaves use zfun.collectives.enter(x, axis), and where "
        "parts of a sum become whole use leave(x, axis); test a collective of your own with "
        "zfun.testing.assert_adjoint()"
    )


def _by_elimination(evidence: Evidence) -> str:
    composition, kind = evidence.case.composition, evidence.difference.kind
    if kind == "ranks":
        return (
            "the ranks hold different parameters; reduce what they update with, and take sums in "
            "one order on all ranks"
        )
    if kind == "loss":
        return "the parameters agree, so look at the value that is returned as the loss"
    if kind == "parameters" and evidence.seen.grads is not None and composition is not None:
        return (
            "an optimizer that mixes elements: the gradients agree, and the update of shards is "
            "not that of whole leaves; compute each element from the elements at the same place, "
            "or sum over the ranks (see zfun.transforms.probe)"
        )
    if kind == "gradients" and evidence.problem.transform is not None:
        return (
            "transform= computes something else on this rank's buffers than on whole leaves; "
            "sums over elements go over the ranks (zfun.reductions)"
        )
    if evidence.case.size == 1:
        return "one rank fails too, so look at the step itself, not at collectives"
    return (
        "no known mistake gives these numbers; fewer ranks pass, so look for seeds, options and "
        "branches that depend on the rank, compare the collectives in zf.record(group).log with "
        "those of the stage, and test your own with zfun.testing.assert_adjoint()"
    )
