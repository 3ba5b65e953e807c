"""Plans: memory, traffic and operations of a step, before the step.

[Note: plans]
A plan is read off the very ``init`` and ``step`` that train, run on tensors without numbers:
:class:`Meter` follows the storages, a recorder the collectives, a counter the matrix products. So a
plan holds for every option and every optimizer. The same observers around a real step on simulated
ranks must find the same numbers, and a test compares the two.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

import torch

from zfun import tree
from zfun.collectives import Group, abstract_group, record
from zfun.options import ANY, DEVICE, FUNCTION, GROUP, integer, takes
from zfun.planner._abstract import abstract
from zfun.planner._kernels import AttentionCounter
from zfun.planner._meter import Meter
from zfun.planner._parts import Live
from zfun.planner.plans._flops import FlopCounter
from zfun.planner.plans._kept import bytes_by_path, num_leaves
from zfun.planner.plans._record import Moved, Plan, Sent

GROUP_OR_SIZE = integer(1, example="8") | GROUP


@takes(group=GROUP, device=DEVICE)
class Observer:
    """A context that reads a :class:`Plan` off steps, planned ones or real ones of simulated ranks.

    Args:
        group: the rank's group.
        device: where the loss is computed; bytes elsewhere count as host memory.

    Attributes:
        group: the group to train with.

    Example:
        >>> import zfun as zf
        >>> def main(group):
        ...     observer = zf.planner.Observer(group)
        ...     loss = lambda params, x: (params["w"] * x).sum()
        ...     z = zf.zero(1, loss, zf.optim.adamw(0.1), observer.group)
        ...     with observer:
        ...         state = z.init({"w": torch.ones(4096)})
        ...         observer.begin(state)
        ...         state, _ = z.step(state, torch.ones(4096))
        ...         return observer.plan(state).bytes_sent("grads")
        >>> zf.simulate(2, main)
        [8192, 8192]
    """

    def __init__(self, group: Group, device: torch.device | str = "cpu") -> None:
        self.meter = Meter(device)
        self.group = record(self.meter.watch(group))
        self._flops, self._attention = FlopCounter(), AttentionCounter()

    def __enter__(self) -> Observer:
        self.meter.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self.meter.__exit__(exc_type, exc_val, exc_tb)

    def begin(self, state: Any) -> None:
        """Begin the description here, with the state that the next step takes."""
        self.meter.name_state(state)
        self.group.clear()
        for counter in (self._flops, self._attention):
            counter.begin()
            if counter not in self.meter.listeners:
                self.meter.listeners.append(counter)
        self.meter.begin()

    def plan(self, state: Any) -> Plan:
        """Return the description since the beginning, with the state that the step returned."""
        # Naming the state reads stores, which is no part of the step.
        sent, flops, moved = self._sent(), self._flops.flops(), Moved(**self.meter.crossed)
        touched = self._flops.touched()
        self.meter.name_state(state)
        return Plan(
            self.meter.live().instants,
            self.group.size,
            self.group.rank,
            bytes_by_path(state),
            sent,
            moved,
            flops,
            touched,
            self._attention.counts(),
            num_leaves(state),
        )

    def _sent(self) -> tuple[Sent, ...]:
        found: dict[tuple[str, str, str], tuple[int, int]] = {}
        for entry in self.group.log:
            key = entry.kind, entry.name, entry.axis
            count, num_bytes = found.get(key, (0, 0))
            found[key] = count + 1, num_bytes + entry.sent_bytes
        return tuple(Sent(*key, *counts) for key, counts in found.items())


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Collect no cycles: a search of all objects frees buffers at moments that depend on chance."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _present(device: torch.device | str) -> torch.device:
    """Return the device, or ``meta`` for one that torch has not."""
    device, found = torch.device(device), torch.accelerator.current_accelerator()
    known = {"cpu", "meta"} | ({found.type} if found is not None else set())
    return device if device.type in known else torch.device("meta")


@takes(
    recipe=FUNCTION,
    params=ANY,
    batch=ANY,
    group=GROUP_OR_SIZE,
    steps=integer(1),
    device=DEVICE,
)
def plan(
    recipe: Callable[[Group], Any],
    params: tree.Tree,
    batch: Any,
    group: Group | int,
    *,
    steps: int = 2,
    device: torch.device | str = "cpu",
) -> Plan:
    """Plan a step: memory, traffic and operations of a rank, with no data, ranks or device.

    The step itself runs, on tensors without numbers, so that all options, optimizers and losses are
    covered. A number that the step reads is taken for 1, a condition for true.

    Args:
        recipe: ``recipe(group)`` returns :func:`zfun.zero`'s three functions, or any object with
            ``init(params) -> state`` and ``step(state, batch) -> (state, info)``.
            ``state.opt_state`` counts as the optimizer's, the rest of the state as parameters.
        params: a tree of tensors, of which shapes and dtypes count; ``meta`` tensors and deferred
            leaves will do.
        batch: the batch of a rank, of which only shapes and dtypes count.
        group: the number of ranks, whose first rank is described, or a group, of which only the
            size and the rank count: :func:`zfun.collectives.abstract_group` makes any rank.
        steps: the number of steps to take, of which the last is described. The first step learns
            the order of use; from the second on they are alike.
        device: where the loss is computed, which chooses the kernels of attention. ``"meta"`` and a
            device that this machine lacks stand for an accelerator with CUDA's kernels, whose bytes
            are told from those of host memory, where stores keep theirs.

    Returns:
        The plan.

    Raises:
        OptionError: no such rank, or no step.

    Example:
        >>> import zfun as zf
        >>> params = {name: torch.empty(64, 64, device="meta") for name in ("a", "b")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> recipe = lambda group: zf.zero(3, loss, zf.optim.adamw(0.1), group, bucket_bytes=1)
        >>> found = zf.plan(recipe, params, torch.empty(8, 64), 8)
        >>> found.bytes_sent("params"), found.bytes_sent("grads"), found.flops.forward
        (43008, 28672, 131072)
        >>> found.steady.device.params, found.steady.device.moments, found.largest.gathered
        (4096, 8192, 32768)

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020).
    """
    return planned(recipe, params, batch, group, steps, device)


def planned(
    recipe: Callable[[Group], Any],
    params: tree.Tree,
    batch: Any,
    group: Group | int,
    steps: int,
    device: torch.device | str,
    watch: Callable[[Meter], object] | None = None,
) -> Plan:
    """Plan a step, as :func:`plan` does; ``watch`` is called with the meter."""
    device = _present(device)
    ranks = abstract_group(group) if isinstance(group, (int, Integral)) else group
    observer = Observer(abstract_group(ranks.size, ranks.rank), device)
    if watch is not None:
        watch(observer.meter)
    # Outside of the context, because optimizers are probed with numbers.
    run = recipe(observer.group)
    with _without_collector(), abstract(device, metered=True) as fake:
        start, data = fake(params), fake(batch)
        with observer:
            state = run.init(start)
            del start
            for _ in range(steps - 1):
                state = run.step(state, data)[0]
            observer.begin(state)
            after = run.step(state, data)
            return observer.plan(after[0])


@takes(
    recipe=FUNCTION,
    params=ANY,
    batch=ANY,
    group=GROUP_OR_SIZE,
    steps=integer(1),
    device=DEVICE,
)
def live_bytes(
    recipe: Callable[[Group], Any],
    params: tree.Tree,
    batch: Any,
    group: Group | int,
    *,
    steps: int = 2,
    device: torch.device | str = "cpu",
) -> Live:
    """Find the bytes that a rank holds at every moment of a step: the memory of :func:`plan`.

    Args:
        recipe: as in :func:`plan`.
        params: as in :func:`plan`.
        batch: as in :func:`plan`.
        group: as in :func:`plan`.
        steps: as in :func:`plan`.
        device: as in :func:`plan`.

    Returns:
        The bytes, by category and place.

    Raises:
        OptionError: no such rank, or no step.

    Example:
        >>> import zfun as zf
        >>> params = {name: torch.empty(64, 64, device="meta") for name in ("a", "b")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> recipe = lambda group: zf.zero(3, loss, zf.optim.sgd(0.1), group, bucket_bytes=1)
        >>> found = zf.planner.live_bytes(recipe, params, torch.empty(8, 64), 8)
        >>> found.steady.device.params, found.peak.what, found.largest.gathered
        (4096, 'empty in backward', 32768)
    """
    return Live(plan(recipe, params, batch, group, steps=steps, device=device).instants)
