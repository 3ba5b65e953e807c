"""A backward pass in two halves: inputs first, parameters later.

[Note: two halves]
Nodes of the graph from which an input can be reached are the *stem*; the others hang off it, on the
way to parameters. A node of the stem with a child off the stem, such as that of a matrix product,
computes two gradients from one. The first half runs the stem alone, and keeps what these nodes
receive. The second half runs each of them again from there, for its children off the stem alone. So
every gradient is computed once, as in one pass.

The second half asks for the gradients of some parameters only, so each has a node of its own: the
caller gives views of the parameters, which the function has used. A parameter that is used in
several places is the exception to "once": the stem between these places runs twice.

A hook of an activation changes its gradient once, but is called in both halves, so its side effects
happen twice.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


def backward_of_inputs(
    roots: Sequence[Any],
    seeds: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    views: Sequence[Tensor],
) -> tuple[list[Tensor | None], Callable[[], list[Tensor | None]]]:
    """Run the first half of a backward pass.

    Args:
        roots: the outputs.
        seeds: the gradient of each; ``None`` for one that takes none.
        inputs: leaves of the graph.
        views: of the parameters.

    Returns:
        The gradients of the inputs, and the second half: a function that returns the gradients of
        the views.
    """
    # An output may be an input itself, so roots are edges, which leaves have too.
    live = [
        (get_gradient_edge(x), seed)
        for x, seed in zip(roots, seeds, strict=True)
        if seed is not None
    ]
    ends = {get_gradient_edge(x).node for x in inputs}
    owners = {view.grad_fn: place for place, view in enumerate(views)}
    parents = _parents(root.node for root, _ in live)
    stem = _above(ends, parents)
    kept: dict[Any, tuple[Tensor | None, ...]] = {}

    def keeping(node: Any) -> Callable[[Any], None]:
        def keep(grads: Any) -> None:
            kept[node] = tuple(grads)

        return keep

    # The nodes of the stem above each view.
    above = {place: _above([owner], parents, stem) & stem for owner, place in owners.items()}
    hooks = [node.register_prehook(keeping(node)) for node in set().union(*above.values())]
    try:
        found: list[Tensor | None] = [None] * len(inputs)
        on_stem = [(root, seed) for root, seed in live if root.node in stem]
        if on_stem:
            found = list(
                torch.autograd.grad(
                    [root for root, _ in on_stem],
                    list(inputs),
                    [seed for _, seed in on_stem],
                    retain_graph=True,
                    allow_unused=True,
                )
            )
    finally:
        for hook in hooks:
            hook.remove()
    beside = [(root, seed) for root, seed in live if root.node not in stem]

    return found, functools.partial(_second_half, views, above, kept, beside)


def _second_half(
    views: Sequence[Tensor],
    above: dict[int, set[Any]],
    kept: dict[Any, tuple[Tensor | None, ...]],
    beside: Sequence[tuple[GradientEdge, Tensor]],
) -> list[Tensor | None]:
    """Run the second half of a backward pass.

    Args:
        views: of the parameters.
        above: the nodes of the stem above each view.
        kept: what these nodes have received, in the order of the first half.
        beside: outputs off the stem, and their gradients.

    Returns:
        The gradient of each view.
    """
    grads: list[Tensor | None] = [None] * len(views)

    def add(edges: Sequence[Any], given: Sequence[Tensor], places: Sequence[int]) -> None:
        ends: list[Any] = [GradientEdge(views[place].grad_fn, 0) for place in places]  # type: ignore[arg-type]
        made = torch.autograd.grad(edges, ends, given, retain_graph=True, allow_unused=True)
        for place, grad in zip(places, made, strict=True):
            before = grads[place]
            grads[place] = grad if before is None else before if grad is None else before + grad

    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, nodes in above.items():
        groups[tuple(node for node in kept if node in nodes)].append(place)
    for nodes, places in groups.items():
        pairs = [
            (GradientEdge(node, i), grad)
            for node in nodes
            for i, grad in enumerate(kept[node])
            if grad is not None
        ]
        # Below the first of several nodes the stem runs again, to the others, which have received
        # everything already. What a node has received went through the hooks of its tensors, which
        # run again here, so their results are replaced too.
        hooks = [node.register_prehook(_giving(kept[node])) for node in nodes]
        if pairs:
            add([edge for edge, _ in pairs], [grad for _, grad in pairs], places)
        for hook in hooks:
            hook.remove()
    kept.clear()
    if beside:
        add([root for root, _ in beside], [seed for _, seed in beside], range(len(views)))
    return grads


def _giving(grads: tuple[Tensor | None, ...]) -> Callable[[Any], Any]:
    """Return a hook that replaces what a node receives."""
    return lambda received: grads


def _parents(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """Return the nodes above each node of a graph."""
    found: dict[Any, list[Any]] = {}
    todo = [root for root in roots if root is not None]
    for root in todo:
        found.setdefault(root, [])
    while todo:
        node = todo.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in found:
                found[child] = []
                todo.append(child)
            found[child].append(node)
    return found


def _above(
    ends: Iterable[Any], parents: dict[Any, list[Any]], barrier: Iterable[Any] = ()
) -> set[Any]:
    """Return the nodes from which one of some ends can be reached; go no further than a barrier."""
    stop = barrier if isinstance(barrier, set) else set(barrier)
    todo = [end for end in ends if end in parents]
    found = set(todo)
    while todo:
        node = todo.pop()
        if node in stop:
            continue
        for parent in parents[node]:
            if parent not in found:
                found.add(parent)
                todo.append(parent)
    return found
