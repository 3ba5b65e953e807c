"""A step of a class of torch's optimizers, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zfun import tree
from zfun.errors import LeafError, NotElementwiseError, OptionError, SpecMismatch
from zfun.flat import Flat, padding_spans
from zfun.optim._base import State
from zfun.optim._missed import StepRun, runs_of
from zfun.optim._rows import aligned, check_fields, check_trainable, flat_view, step_count
from zfun.optim._schedules import rate_at
from zfun.optim._stepping import no_steps
from zfun.optim.of_torch._probe import Kept, as_kind, as_tensor, step_alone
from zfun.tree import Tree

# Torch's loops step the last elements of a tensor by other instructions, which round differently,
# and divide long tensors among threads. Therefore each piece is a whole number of vectors and no
# longer than a thread's share, so that bits do not depend on where a leaf was cut.
_PIECE = 1 << 15
_VECTORS = 64


class TorchState(NamedTuple):
    """State of :func:`from_torch`.

    Attributes:
        count: steps taken, 0-dim int64 on the CPU.
        trees: the state of each element, by torch's names: trees like the parameters.
        scalars: the state of each tensor, by torch's names, equal for all tensors: 0-dim tensors on
            the CPU.
        group: the numbers that a step writes into its group, such as a count or a sum of weights.
        given: those of these numbers that are options, as the caller gave them for the last step.
    """

    count: Tensor
    trees: dict[str, Tree]
    scalars: dict[str, Tensor]
    group: dict[str, Tensor] = {}  # noqa: RUF012, never changed
    given: dict[str, Tensor] = {}  # noqa: RUF012, never changed


class _Kinds(NamedTuple):
    """The values that torch keeps for a tensor of a dtype, by kind."""

    trees: dict[str, Tensor]
    scalars: dict[str, Any]
    group: dict[str, Any]
    # Whether zeros stay zero; in float16 ``0 / (0 + 1e-8)`` is NaN.
    keeps_zeros: bool


class _Numbers(NamedTuple):
    """The numbers after a step: of a tensor that takes every step, and of the group."""

    scalars: dict[str, Tensor]
    group: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class TorchRule:
    """A class with options, whose ``lr`` may be a schedule: the functions of an optimizer."""

    make: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    kept: Kept
    _kinds: dict[torch.dtype, _Kinds] = field(default_factory=dict)

    @property
    def group(self) -> dict[str, Tensor]:
        """The numbers of the group to carry, as they are before the first step."""
        # A schedule of the caller sets the rate of every step.
        is_set = callable(self.options.get("lr"))
        return {name: x for name, x in self.kept.group.items() if not (is_set and name == "lr")}

    def at(self, before: int) -> dict[str, Any]:
        """Return the options of the step after some steps."""
        rate = self.options.get("lr")
        now = {"lr": rate_at(rate, before)} if callable(rate) else {}
        return {**self.options, **now}

    def given(self, before: int) -> dict[str, Tensor]:
        """Return those options of the step that a step writes into the group."""
        now = self.at(before)
        return {name: as_tensor(float(now[name])) for name in self.group if name in now}

    def kinds(self, dtype: torch.dtype) -> _Kinds:
        """Return the kinds of the values that torch keeps for a tensor of a dtype."""
        real = dtype.to_real() if dtype.is_complex else dtype
        if real not in self._kinds:
            with unset_fake_temporarily():
                self._kinds[real] = self._steps_of_zeros(real)
        return self._kinds[real]

    def _steps_of_zeros(self, dtype: torch.dtype) -> _Kinds:
        value, grad = (torch.zeros(_VECTORS, dtype=dtype, device="cpu") for _ in range(2))
        states: list[dict[str, Any]] = [{}]
        groups: list[dict[str, Any]] = [{}]
        keeps_zeros = True
        for before in range(3):
            carried = {name: x for name, x in groups[-1].items() if name in self.group}
            (state,), group = self._stepped(
                self.at(before), [value], [grad], [dict(states[-1])], carried
            )
            states.append(state)
            groups.append(group)
            trees = [x for x in state.values() if _is_tree(x)]
            keeps_zeros &= not any(x.count_nonzero() for x in (value, *trees))
        first = {name: x for name, x in states[1].items() if x is not None}
        return _Kinds(
            {name: x for name, x in first.items() if _is_tree(x)},
            {name: x for name, x in first.items() if not _is_tree(x)},
            groups[1],
            keeps_zeros,
        )

    def init(self, params: Tree) -> TorchState:
        """Return the state of new parameters."""
        check_trainable(params)
        leaves, spec = tree.flatten(params)
        kinds = [self.kinds(leaf.dtype) for leaf in leaves]

        def zeros(name: str, leaf: Tensor) -> Tensor:
            dtype = self.kinds(leaf.dtype).trees[name].dtype
            return torch.zeros_like(
                leaf,
                dtype=dtype.to_complex() if leaf.is_complex() else dtype,
                memory_format=torch.contiguous_format,
                requires_grad=False,
            )

        names = dict.fromkeys(name for each in kinds for name in each.trees)
        trees = {x: tree.unflatten(spec, [zeros(x, leaf) for leaf in leaves]) for x in names}
        values = {name: x for each in kinds for name, x in each.scalars.items()}
        scalars = {name: torch.zeros_like(as_tensor(x)) for name, x in values.items()}
        group = {name: x.clone() for name, x in self.group.items()}
        return TorchState(no_steps(), trees, scalars, group, self.given(0))

    def update(self, grads: Tree, state: State, params: Tree) -> tuple[Tree, TorchState]:
        """Return updates and the new state."""
        new, after = self.step(grads, state, params)
        # In float64 the difference of narrower numbers is exact, so adding the change gives
        # torch's bits.
        changes = [
            n.to(wide(n)) - p.detach().to(wide(n))
            for n, p in zip(new, tree.leaves(params), strict=True)
        ]
        return tree.unflatten(tree.structure(params), changes), after

    @torch.no_grad()
    def step(self, grads: Tree, state: State, params: Tree) -> tuple[list[Tensor], TorchState]:
        """Return new parameters and the new state."""
        self._check(grads, state, params)
        rows, runs = aligned(params, gradients=grads, **state.trees), runs_of(params, grads)
        numbers: _Numbers | None = None
        new: list[list[Tensor]] = []
        for index, row in enumerate(rows):
            # Runs may leave elements out, which then stay.
            results = [
                torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)
                if runs is None
                else x.detach().clone(memory_format=torch.contiguous_format)
                for x in (row[0], *row[2:])
            ]
            vectors, targets = [flat_view(x) for x in row], [flat_view(x) for x in results]
            whole = [StepRun(0, vectors[0].numel(), 0)] if vectors[0].numel() else []
            for start, stop, missed in whole if runs is None else runs[index]:
                pieces = [pieces_of(x[start:stop]) for x in vectors]
                states, group = self._advance(state, *pieces, missed=missed)
                if missed == 0:
                    numbers = self._same_for_all(state, states, group, numbers)
                stepped = [pieces[0], *([x[name] for x in states] for name in state.trees)]
                for target, its in zip(targets, stepped, strict=True):
                    for part, piece in zip(target[start:stop].split(_PIECE), its, strict=True):
                        part.copy_(piece[: part.numel()])
            new.append(results)
        self._clear_padding(params, new)
        if rows and numbers is None:
            # No leaf in these buffers takes every step, but one on another rank may.
            zeros = [[flat_view(x).new_zeros(_VECTORS)] for x in rows[0]]
            numbers = self._same_for_all(state, *self._advance(state, *zeros, missed=0), None)
        spec = tree.structure(params)
        trees = {
            name: tree.unflatten(spec, [results[1 + place] for results in new])
            for place, name in enumerate(state.trees)
        }
        numbers = numbers or _Numbers(dict(state.scalars), dict(state.group))
        return [results[0] for results in new], TorchState(
            state.count + 1, trees, *numbers, self.given(step_count(state.count))
        )

    def _clear_padding(self, params: Tree, new: list[list[Tensor]]) -> None:
        """Let padding be zero, where a step of zeros by zeros gives other numbers."""
        if not isinstance(params, Flat):
            return
        if all(self.kinds(bucket.dtype).keeps_zeros for bucket in params.layout.buckets):
            return
        for results, spans in zip(new, padding_spans(params), strict=True):
            for result in results:
                for start, stop in spans:
                    result[start:stop].zero_()

    def _check(self, grads: Tree, state: State, params: Tree) -> None:
        """Refuse a state of another class, and a leaf whose numbers are not known."""
        check_fields(state, *TorchState._fields)
        name = self.make.__name__
        kinds = [self.kinds(p.dtype) for p in tree.leaves(params)]
        wanted = {*self.group, *(name for x in kinds for name in (*x.trees, *x.scalars))}
        found = {*state.trees, *state.scalars, *state.group}
        if kinds and wanted != found:
            raise SpecMismatch(
                f"a state of from_torch() is of one class; got {sorted(found)} where "
                f"torch.optim.{name} keeps {sorted(wanted)}; pass optimizer.init(params) or the "
                "state of the last step"
            )
        others = sorted({*state.scalars} - self.kept.counters)
        if not others or not isinstance(grads, Flat):
            return
        late = next((x.path for x in grads.layout.leaves if grads.missed.get(x.path)), None)
        if late is not None:
            raise LeafError(
                "from_torch() steps a leaf that has missed steps where the class keeps no number "
                f"for each tensor but the count of its steps; leaf {late!r} is used again after "
                f"{grads.missed[late]} steps without a gradient, and torch.optim.{name} keeps "
                f"{others[0]!r}; use a class that keeps only a count, such as torch.optim.AdamW, "
                "or pass unused='zeros' to zf.zero()",
                leaf=late,
            )

    def _advance(
        self,
        state: TorchState,
        values: list[Tensor],
        grads: list[Tensor],
        *trees: list[Tensor],
        missed: int,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Let torch step pieces of leaves in place, and return torch's states and group.

        The leaves have missed so many steps; ``trees`` are the pieces of each of ``state.trees``.
        """
        before, kinds = step_count(state.count), self.kinds(values[0].dtype)
        now = self.at(before)
        scalars = {
            name: torch.full_like(x, before - missed) if name in self.kept.counters else x
            for name, x in state.scalars.items()
        }
        # Torch makes the first state itself, because that state need not be zeros. Torch counts in
        # place, so every piece has counts of its own.
        states = [
            {
                **dict(zip(state.trees, its, strict=True)),
                **{name: as_kind(kinds.scalars[name], x) for name, x in scalars.items()},
            }
            if before > missed
            else {}
            for its in (zip(*trees, strict=True) if trees else [()] * len(values))
        ]
        group = {
            name: as_kind(kinds.group[name], x)
            for name, x in state.group.items()
            # A value that the caller has set since the last step replaces that of the last step.
            if before and (name not in state.given or state.given[name] == float(now[name]))
        }
        grads = [g.to(p.dtype) for p, g in zip(values, grads, strict=True)]
        return self._stepped(now, values, grads, states, group)

    def _stepped(
        self,
        options: dict[str, Any],
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        twins = [torch.nn.Parameter(value, requires_grad=False) for value in values]
        made: Any = self.make(twins, **options)
        made.param_groups[0].update(group)
        for twin, grad, state in zip(twins, grads, states, strict=True):
            twin.grad = grad
            if state:
                made.state[twin] = state
        step_alone(made)
        return [dict(made.state[twin]) for twin in twins], made.param_groups[0]

    def _same_for_all(
        self,
        before: TorchState,
        states: Sequence[dict[str, Any]],
        group: dict[str, Any],
        first: _Numbers | None,
    ) -> _Numbers:
        """Return the numbers after a step, which may depend on the number of steps only."""
        for state in states:
            numbers = _Numbers(
                self._numbers(state, before.scalars), self._numbers(group, before.group)
            )
            first = first or numbers
            for each, other in zip(first, numbers, strict=True):
                for name, value in each.items():
                    if not torch.equal(other[name], value):
                        raise NotElementwiseError(
                            "an optimizer that runs on shards works element by element; "
                            f"torch.optim.{self.make.__name__} keeps {name!r}, which is one number "
                            f"for each tensor or group; got {value.item():.6g} for one and "
                            f"{other[name].item():.6g} for another; use an optimizer that keeps a "
                            "number for each element"
                        )
        assert first is not None
        return first

    def _numbers(self, after: dict[str, Any], before: dict[str, Tensor]) -> dict[str, Tensor]:
        numbers = {name: as_tensor(after[name]) for name in before}
        for name, x in numbers.items():
            dtype = before[name].dtype
            if torch.promote_types(x.dtype, dtype) != dtype:
                raise OptionError(
                    f"from_torch() carries numbers of one kind; torch.optim.{self.make.__name__} "
                    f"has made {name!r} {x.dtype} that was {dtype}; write a float from the first "
                    "step on"
                )
        return {name: x.to(before[name].dtype) for name, x in numbers.items()}


def _is_tree(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def pieces_of(x: Tensor) -> list[Tensor]:
    """Copy a leaf into pieces of real numbers, the last one filled up with zeros."""
    # Copies, because each piece must begin at a boundary of a vector and of a cache line.
    return [
        torch.nn.functional.pad(piece, (0, -piece.numel() % _VECTORS))
        if piece.numel() % _VECTORS
        else piece.clone()
        for piece in flat_view(x).split(_PIECE)
    ]
