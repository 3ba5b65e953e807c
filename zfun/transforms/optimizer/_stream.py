"""Step bucket by bucket over stores: read the next, compute this one, write the last.

See [Note: the streamed update] in ``_plan.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zfun import ops, stores, tree
from zfun.collectives import Work, await_readers, is_symmetric, model_groups
from zfun.flat import Flat, empty_like
from zfun.optim import MasterState, Optimizer, prepared
from zfun.placement import Placement
from zfun.reductions import Spent
from zfun.stores import Stored
from zfun.transforms._notes import noting_steps
from zfun.transforms.optimizer._cut import CutState, cut_state
from zfun.transforms.optimizer._placing import await_ranks, can_fail, deliver, layout_for
from zfun.transforms.optimizer._plan import UpdateKind, UpdatePlan, UpdateStep, plan_update
from zfun.transforms.optimizer._probe import is_separable
from zfun.transforms.values._redistribute import redistribute


def streamed(
    optimizer: Optimizer, grads: Flat | None, state: Any, params: Flat
) -> StreamedUpdate | None:
    """Prepare an update that goes bucket by bucket; ``None`` for one that must be taken at once.

    That is so where the optimizer mixes buckets, or layouts differ. The update has looked at all
    gradients; without ``grads`` backward has not made them yet.
    """
    layout = params.layout
    if not layout.buckets or optimizer.partial is not None:
        return None
    if layout_for(optimizer, layout) != layout or (grads is not None and grads.layout != layout):
        return None
    cut = cut_state(state, layout)
    if cut is None:
        return None
    placement, group = optimizer.placement or params.placement, optimizer.group or params.group
    grads = None if grads is None else deliver(grads, placement, group)
    ready = prepared(optimizer, grads, state, params)
    if ready is None or not is_separable(ready):
        return None
    masters = cut_state(state.master, layout) if isinstance(state, MasterState) else None
    places = () if masters is None else masters.places
    has_master = frozenset(bucket for place in places if place is not None for bucket in place)
    missed = {} if grads is None else grads.missed
    return StreamedUpdate(ready, grads, params, cut, has_master, placement, group, missed)


@dataclass(slots=True)
class _Bucket:
    """The values of one bucket on the way through an update.

    Attributes:
        device: computes the step.
        store: of the state, if the state is in one.
        grads: the gradients, on the way; ``None`` until backward has made these.
        params: the parameters, on the way; ``None`` where the step makes them anew.
        state: buffers by the index of the part, on the way.
    """

    device: torch.device
    store: Any
    grads: Work | Tensor | None
    params: Work | Tensor | None
    state: dict[int, Work | Tensor]


@dataclass(slots=True)
class StreamedUpdate:
    """One update; each kind of step of the plan is a method."""

    optimizer: Optimizer
    grads: Flat | None
    params: Flat
    state: CutState
    has_master: frozenset[int]
    placement: Placement
    group: Any
    # See Flat.missed.
    missed: Mapping[str, int | None]
    donate: bool = False
    # Whether values in memory must not be overwritten yet.
    is_late: bool = False
    # Whether a step may write to the memory of the gradients of the bucket before.
    spends: bool = False
    # Whether gradients go to a store after an update in backward, which counts the transfer.
    stores_grads: bool = False
    new_params: dict[int, Any] = field(default_factory=dict)
    new_state: dict[tuple[int, int], Any] = field(default_factory=dict)
    others: dict[int, Any] = field(default_factory=dict)
    _left: deque[UpdateStep] = field(default_factory=deque)
    _labels: tuple[str, ...] = ()
    _read: dict[int, _Bucket] = field(default_factory=dict)
    _computed: dict[int, tuple[Flat, dict[int, Tensor], Any]] = field(default_factory=dict)
    # The memory of the gradients of the last bucket, for the new parameters of the next.
    _spare: Tensor | None = None

    def plan(self, *, in_backward: bool = False) -> UpdatePlan:
        """Return the steps of the update."""
        count = len(self.params.layout.buckets)
        stored = [
            bucket
            for bucket in range(count)
            if isinstance(self.params.buffers[bucket], Stored)
            or any(isinstance(x, Stored) for x in self.state.buffers(bucket).values())
        ]
        return plan_update(
            self.params.layout,
            stored=stored,
            late=self.is_late or in_backward,
            reads_first=self.is_late and self.grads is not None and can_fail(self.grads),
            in_backward=in_backward,
        )

    def run(self, *, donate: bool, spends: bool) -> tuple[Flat, Any]:
        """Run the steps of the plan, and return new parameters and the new state."""
        self.donate, self.spends = donate, spends
        self.is_late = donate and can_fail((self.state.parts, self.params))
        if donate and not self.is_late and self.grads is not None and can_fail(self.grads):
            # Nothing in memory is overwritten before the last read that can fail.
            self.grads = stores.resident(self.grads)
        self._start(self.plan())
        return self._finish()

    def begin(self, *, donate: bool, stores_grads: bool, missed: Mapping[str, int | None]) -> None:
        """Start the first reads of an update in backward."""
        self.missed = missed
        self.donate = self.is_late = donate
        self.stores_grads = stores_grads
        self._start(self.plan(in_backward=True))
        self._run_to("wait", "commit")

    def take(self, bucket: int, grads: Tensor) -> Tensor | Spent:
        """Step a bucket whose gradients are complete, and start the next read.

        Returns:
            The gradients, or a :class:`Spent` where the next step may write to the memory.
        """
        if self._left[0] != UpdateStep("wait", bucket):
            return grads
        # Gradients that are not finite stay, because an error names the first bad leaf. The host
        # knows this at once only on a CPU.
        squares = ops.squares_in_bins(grads) if self._may_spend(grads) else None
        self.spends = squares is not None and (ops.is_abstract(grads) or int(squares[-1]) == 0)
        self._read[bucket].grads = grads
        self._run_to("wait", "commit")
        return Spent(squares) if squares is not None and self._spare is grads else grads

    def finish(self, grads: Flat) -> tuple[Flat, Any]:
        """Step what is left, and return new parameters and the new state."""
        self.grads, self.missed = grads, grads.missed
        for bucket, it in self._read.items():
            with stores.locating(leaf=self._labels[bucket]):
                it.grads = stores.start_read(grads.buffers[bucket], it.device)
        return self._finish()

    def _start(self, plan: UpdatePlan) -> None:
        self._labels = plan.labels
        self._left.extend(plan.steps)

    def _run_to(self, *kinds: UpdateKind) -> None:
        """Run at least one step, and stop before a step of one of these kinds."""
        with noting_steps(self._labels) as note:
            while self._left:
                step = self._left.popleft()
                label = None if step.bucket < 0 else self._labels[step.bucket]
                with stores.locating(leaf=label), note(step.kind, step.bucket):
                    getattr(self, step.kind)(step.bucket)
                if self._left and self._left[0].kind in kinds:
                    return

    def _finish(self) -> tuple[Flat, Any]:
        self._run_to()
        params = self.params.with_buffers(
            self.new_params[bucket] for bucket in range(len(self.params.layout.buckets))
        )
        return params, self.state.joined(self.new_state, self.others)

    def read(self, bucket: int) -> None:
        """Start the reads of a bucket."""
        state = self.state.buffers(bucket)
        old = self.params.buffers[bucket]
        kept = next((x for x in state.values() if isinstance(x, Stored)), None)
        if kept is None and not state and isinstance(old, Stored):
            kept = old
        device = self.params.layout.device if kept is None else kept.store.device
        # Master weights make parameters anew, so the old ones are read only to be overwritten.
        is_made = bucket in self.has_master and (
            self.is_late or isinstance(old, Stored) or old.device != device
        )
        self._read[bucket] = _Bucket(
            device,
            None if kept is None else kept.store,
            None if self.grads is None else stores.start_read(self.grads.buffers[bucket], device),
            None if is_made else stores.start_read(old, device),
            {index: stores.start_read(x, device) for index, x in state.items()},
        )

    def wait(self, bucket: int) -> None:
        """Wait for the reads of a bucket."""
        it = self._read[bucket]
        it.grads = None if it.grads is None else _wait(it.grads)
        it.params = None if it.params is None else _wait(it.params)
        it.state = {index: _wait(x) for index, x in it.state.items()}

    def compute(self, bucket: int) -> None:
        """Step a bucket."""
        it = self._read.pop(bucket)
        old_state, old = self.state.buffers(bucket), self.params.buffers[bucket]
        one = self.params.layout.select([bucket])
        state = {
            index: self._own(_wait(x).to(it.device), old_state[index])
            for index, x in it.state.items()
        }
        params = self._lowered(it, bucket)
        if isinstance(old, Tensor) and self.donate and not self.is_late:
            # Peers may still read the shards.
            await_readers(params.group, params.buffers)
        moved = params.buffers[0]
        if moved.device != it.device:
            it.store.crossed("put", "params", moved.nbytes)
            moved = moved.to(it.device)
        if it.params is not None:
            moved = self._own(moved, old)
        assert it.grads is not None
        grads = _wait(it.grads)
        in_store = (
            self.stores_grads
            if self.grads is None
            else isinstance(self.grads.buffers[bucket], Stored)
        )
        if it.store is not None and not in_store:
            it.store.crossed("put", "grads", grads.nbytes)
        new, after = self.optimizer.apply(
            Flat([grads.to(it.device)], self.placement, one, self.group, missed=self.missed),
            self.state.part(bucket, state),
            Flat([moved], self.placement, one, self.group),
            donate=self.donate,
        )
        # An optimizer may return the gradients as the state.
        if (
            self.spends
            and not in_store
            and self._may_spend(grads)
            and not any(
                isinstance(x, Tensor) and _share_storage(x, grads)
                for x in tree.leaves((new, after))
            )
        ):
            self._spare = grads
        parts = self.state.split(after)
        for index, (part, place) in enumerate(zip(parts, self.state.places, strict=True)):
            if place is None and part is not self.state.parts[index]:
                # Counts advance once; a part by label returns the counts of other labels.
                self.others.setdefault(index, part)
        found = {index: parts[index].buffers[0] for index in old_state}
        for index, kept in old_state.items():
            if isinstance(kept, Tensor):
                self.new_state[index, bucket] = found.pop(index).to(kept.device)
        self._computed[bucket] = new, found, it.store

    def write(self, bucket: int) -> None:
        """Start the writes of a bucket."""
        new, state, _ = self._computed[bucket]
        for index, old in self.state.buffers(bucket).items():
            if isinstance(old, Stored):
                self.new_state[index, bucket] = old.store.put(state.pop(index), old.name)
        old = self.params.buffers[bucket]
        if isinstance(old, Stored):
            whole = new if self._is_placed else self._lifted(new)
            self.new_params[bucket] = old.store.put(whole.buffers[0], old.name)
            del self._computed[bucket]

    def gather(self, bucket: int) -> None:
        """Bring new parameters to the placement and the place of the old ones."""
        if bucket in self.new_params:
            return
        new, _, store = self._computed.pop(bucket)
        if store is not None:
            store.crossed("get", "params", new.buffers[0].nbytes)
        old = self.params.select([bucket])
        new = self._on_device(new)
        if self.donate and is_symmetric(self.params.group):
            target = self._placed_params(old.buffers[0], bucket)
            if not _share_storage(target.buffers[0], new.buffers[0]):
                # The step could not overwrite the old parameters, which now may go. Peers map the
                # memory of the old ones, so the new ones go there.
                await_readers(target.group, target.buffers)
                target.buffers[0].copy_(new.buffers[0])
                new = target
        if not self._is_placed:
            new = self._lifted(new, old if self.donate else None)
        self.new_params[bucket] = new.buffers[0]

    def commit(self, bucket: int) -> None:
        """Wait until the stores of all ranks keep the new values."""
        del bucket
        # From here on no read may fail, because values in memory are overwritten.
        for started in self._read:
            with stores.locating(leaf=self._labels[started]):
                self.wait(started)
        put = [
            *((place, x) for (_, place), x in self.new_state.items() if isinstance(x, Stored)),
            *((place, x) for place, x in self.new_params.items() if isinstance(x, Stored)),
        ]
        for place, handle in put:
            with stores.locating(leaf=self._labels[place]):
                handle.flush()
        await_ranks([handle for _, handle in put], self.params)
        self.is_late, self._spare = False, None

    @property
    def _is_placed(self) -> bool:
        """Whether the optimizer computes in the placement of the parameters."""
        return self.params.placement is self.placement and self.params.group is self.group

    def _on_device(self, new: Flat) -> Flat:
        buffer, device = new.buffers[0], self.params.layout.device
        return new if buffer.device == device else new.with_buffers([buffer.to(device)])

    def _lifted(self, new: Flat, into: Flat | None = None) -> Flat:
        """Bring new parameters to the placement of the old ones."""
        return redistribute(
            self._on_device(new),
            self.params.placement,
            self.params.group,
            name="params",
            zero_copy=True,
            into=into,
        )

    def _placed_params(self, buffer: Tensor, bucket: int) -> Flat:
        one = self.params.layout.select([bucket])
        placed = Flat([buffer], self.params.placement, one, self.params.group)
        if self._is_placed:
            return placed
        return redistribute(placed, self.placement, self.group, name="params")

    def _lowered(self, it: _Bucket, bucket: int) -> Flat:
        """Return the parameters of a bucket in the placement of the optimizer."""
        if it.params is not None:
            return self._placed_params(_wait(it.params), bucket)
        dtype = self.params.layout.buckets[bucket].dtype
        one = Flat((), self.placement, self.params.layout.select([bucket]), self.group)
        return empty_like(one, [dtype], it.device)

    def _may_spend(self, grads: Tensor) -> bool:
        """Whether new parameters may go to the memory of gradients that no one else needs."""
        # From another device, or to shared memory, the parameters are copied anyway.
        return (
            self.is_late
            and not self.stores_grads
            and grads.device.type == "cpu"
            and grads.untyped_storage().nbytes() == grads.nbytes
            and not is_symmetric(self.params.group)
            # The squares of a spent bucket are those of all leaves, and here some count elsewhere.
            and not model_groups(self.params.group)
        )

    def _own(self, x: Tensor, old: Any) -> Tensor:
        """Copy a value that the step would overwrite before the stores keep the new one."""
        # A store that can fail returns a copy, and so does a change of device or placement.
        is_copy = old.can_fail if isinstance(old, Stored) else not _share_storage(x, old)
        if not self.is_late or is_copy:
            return x
        if not x.is_floating_point():
            return x.clone()
        spare, self._spare = self._spare, None
        fits = spare is not None and spare.dtype == x.dtype and spare.shape == x.shape
        out = spare if fits and spare is not None else torch.empty_like(x)
        # After clone(), OpenMP's threads would keep the cores busy for some milliseconds.
        ops.ravel_into(out, [x], [0])
        return out


def _share_storage(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


def _wait(x: Work | Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else x.wait()
