"""Different optimizers for different leaves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from zfun import tree
from zfun.errors import OptionError, PlacementError, SpecMismatch
from zfun.flat import Flat, change_layout, check_same_layout
from zfun.layout import LabelFn, labels_of, layout_of, split_by_label
from zfun.optim._base import InitFn, Optimizer, State, UpdateFn, as_optimizer, prepared
from zfun.optim._factors import ScalingApply, is_scaling
from zfun.optim._rows import aligned, check_trainable
from zfun.options import OF_LEAVES, instance, takes
from zfun.tree import Tree


@takes(
    optimizers=instance(Mapping, "a dict of optimizers by label", "{'all': zf.optim.sgd(0.1)}"),
    label=OF_LEAVES,
)
def by_label(
    optimizers: Mapping[str, Optimizer | tuple[InitFn, UpdateFn]], label: LabelFn
) -> Optimizer:
    """Step each leaf with the optimizer of a label: other weight decay, learning rate or rule.

    A bucket holds leaves of one label only, because an optimizer steps whole buckets.
    :func:`zfun.zero`, :func:`zfun.shard_optimizer` and :func:`zfun.data_parallel` lay out buckets
    accordingly; to shard parameters by hand, call
    ``shard(params, group, labels=optimizer.labels)``.

    Args:
        optimizers: the optimizer of each label.
        label: ``label(path, leaf)`` gives each leaf one of the labels, by path, shape and dtype.
            The leaf may be a lazy leaf, without numbers.

    Returns:
        An optimizer whose state is a dict: by label, the state of the optimizer on the leaves of
        that label; ``None`` for a label without leaves.

    Raises:
        OptionError: there is no optimizer, a label is no string, or a leaf has a label without an
            optimizer.
        PlacementError: an optimizer is sharded already, so that it would be sharded twice, or sums
            the terms of gradients by itself.

    Example:
        >>> import torch
        >>> from zfun.optim import sgd
        >>> kinds = {"decay": sgd(0.5, weight_decay=1.0), "rest": sgd(0.5)}
        >>> optimizer = by_label(kinds, lambda path, leaf: "decay" if leaf.ndim > 1 else "rest")
        >>> params = {"w": torch.ones(1, 2), "b": torch.ones(2)}
        >>> grads = {"w": torch.zeros(1, 2), "b": torch.ones(2)}
        >>> optimizer.apply(grads, optimizer.init(params), params)[0]
        {'w': tensor([[0.5000, 0.5000]]), 'b': tensor([0.5000, 0.5000])}
    """
    parts = {name: as_optimizer(part) for name, part in optimizers.items()}
    if not parts:
        raise OptionError(
            "by_label() takes at least one optimizer; got none; pass them by label, as in "
            "by_label({'all': sgd(0.1)}, label)"
        )
    for name, part in parts.items():
        if not isinstance(name, str):
            raise OptionError(
                f"the labels of by_label() are strings; got {name!r}; write {str(name)!r}, and let "
                "label() return strings too"
            )
        if part.placement is not None:
            raise PlacementError(
                "by_label() stands inside of shard_optimizer(), which shards all states; got an "
                f"optimizer for {name!r} that computes in {part.placement!r}; write "
                "shard_optimizer(by_label(...), group)"
            )
        if part.partial is not None:
            raise PlacementError(
                "by_label() gives all of its optimizers the sum of the gradients; got an optimizer "
                f"for {name!r} that sums the terms of the gradients by itself, as onebit_adam() "
                "does; use that optimizer without by_label(), for all leaves"
            )

    return _by_label(parts, _Table(parts, label))


def _by_label(parts: dict[str, Optimizer], table: _Table) -> Optimizer:
    def init(params: Tree) -> State:
        check_trainable(params)
        pieces = table.split(table.laid_out(params))
        return {
            name: part.init(pieces[name]) if name in pieces else None
            for name, part in parts.items()
        }

    def run(
        method: str, grads: Tree, state: State, params: Tree, **options: Any
    ) -> tuple[Tree, State]:
        _check_state(state, parts)
        whole = table.laid_out(params)
        values, gradients = table.split(whole), table.split(whole, table.laid_out(grads))
        found: dict[str, Tree] = {}
        states = dict(state)
        for name, value in values.items():
            found[name], states[name] = getattr(parts[name], method)(
                gradients[name], state[name], value, **options
            )
        new = table.merge(found, whole)
        return change_layout(new, params.layout) if isinstance(params, Flat) else new, states

    def update(grads: Tree, state: State, params: Tree) -> tuple[Tree, State]:
        return run("update", grads, state, params)

    def apply(
        grads: Tree, state: State, params: Tree, *, donate: bool = False
    ) -> tuple[Tree, State]:
        return run("apply", grads, state, params, donate=donate)

    def scaling(
        grads: Tree, state: State, params: Tree, donate: bool, scale: Any, taken: Any
    ) -> tuple[Tree, State]:
        return run("apply", grads, state, params, donate=donate, scale=scale, taken=taken)

    def prepare(grads: Tree | None, state: State, params: Tree) -> Optimizer | None:
        _check_state(state, parts)
        ready = dict(parts)
        pieces = table.split(params)
        gradients = {} if grads is None else table.split(params, grads)
        for name, piece in pieces.items():
            part = prepared(parts[name], gradients.get(name), state[name], piece)
            if part is None:
                return None
            ready[name] = part
        # The same table, because the labels of a layout are cached by the functions of the table.
        return _by_label(ready, table)

    return Optimizer(
        init,
        update,
        ScalingApply(scaling) if all(map(is_scaling, parts.values())) else apply,
        labels=table.place,
        by_leaf=True,
        prepare=prepare,
        parts=tuple(parts.values()),
        name=by_label.__name__,
        options=(("labels", tuple(parts)),),
    )


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    """The assignment of leaves to optimizers."""

    parts: dict[str, Optimizer]
    label: LabelFn

    def name(self, path: str, leaf: Any) -> str:
        """Return the label of a leaf."""
        found = self.label(path, leaf)
        if not isinstance(found, str) or found not in self.parts:
            raise OptionError(
                f"label() gives every leaf one of the labels {', '.join(map(repr, self.parts))}; "
                f"leaf {path!r} got {found!r}; add an optimizer for it",
                leaf=path,
            )
        return found

    def place(self, path: str, leaf: Any) -> Hashable:
        """Return the key that the leaves of a bucket share: the label, and the part's own label."""
        name = self.name(path, leaf)
        inner = self.parts[name].labels
        return (name, None if inner is None else inner(path, leaf))

    def laid_out(self, value: Tree) -> Tree:
        """Cut the buckets of a flat value so that each holds leaves of one label."""
        return (
            change_layout(value, split_by_label(value.layout, self.place))
            if isinstance(value, Flat)
            else value
        )

    def split(self, params: Tree, value: Tree = None) -> dict[str, Tree]:
        """Split the parameters, or a value like the parameters, by label."""
        value = params if value is None else value
        if isinstance(params, Flat):
            check_same_layout(params, value, "parameters and gradients")
            return {
                name: value.select(buckets) for name, buckets in self._buckets_of(params).items()
            }
        values = [leaf for _, leaf in aligned(params, gradients=value)]
        # Tied leaves have one state and one label, the label of the first leaf.
        layout = layout_of(params)
        labels = labels_of(layout, self.name)
        names = [labels[position] for position in layout.positions]
        spec = tree.structure(params)
        return {
            name: tree.unflatten(
                spec,
                [leaf if its == name else None for leaf, its in zip(values, names, strict=True)],
            )
            for name in self.parts
            if name in names
        }

    def merge(self, found: dict[str, Tree], params: Tree) -> Tree:
        """Join the parts of all labels."""
        if not isinstance(params, Flat):
            return tree.combine(*found.values()) if found else params
        buffers: list[Any] = list(params.buffers)
        for name, buckets in self._buckets_of(params).items():
            for index, buffer in zip(buckets, found[name].buffers, strict=True):
                buffers[index] = buffer
        return params.with_buffers(buffers)

    def _buckets_of(self, flat: Flat) -> dict[str, list[int]]:
        labels = labels_of(flat.layout, self.name)
        found: dict[str, list[int]] = {}
        for index, bucket in enumerate(flat.layout.buckets):
            found.setdefault(str(labels[bucket.leaves[0]]), []).append(index)
        return {name: found[name] for name in self.parts if name in found}


def _check_state(state: State, parts: dict[str, Optimizer]) -> None:
    if not isinstance(state, dict) or set(state) != set(parts):
        got = ", ".join(map(repr, state)) if isinstance(state, dict) else type(state).__name__
        raise SpecMismatch(
            "the state of an optimizer by label is a dict with the labels "
            f"{', '.join(map(repr, parts))}; got {got}; pass optimizer.init(params) or the "
            "state of the last step"
        )
