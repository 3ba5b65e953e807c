"""Groups of which one collective of one rank fails, comes late, or is another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from zfun.collectives import Collective, Group, Work
from zfun.collectives._group import Wrapper

FAILS = ("at the start", "at the end")
LATE = ("late start", "late end")
DIFFERS = ("other name", "other length", "other dtype", "left out", "twice", "swapped")


class Injected(OSError):
    """The error of a link, which no code of the library expects."""


class FaultyGroup(Wrapper):
    """Disturbs one collective, counted from 0 over all streams.

    * ``at the start``, ``at the end``: ``start`` or ``wait`` raises.
    * ``late start``: the collective begins when this rank waits for the result, or before the next
      one of the same stream. ``late end``: ``start`` returns after the result is there.
    * ``other name``, ``other length``, ``other dtype``: the rank starts another collective.
    * ``left out``: the rank takes part in no collective, and goes on with wrong values.
    * ``twice``: the rank starts the collective once more.
    * ``swapped``: the rank starts the next collective of the same stream first.

    Args:
        group: the ranks.
        at: the index of the collective; ``None`` disturbs none.
        fault: one of the above.

    Attributes:
        calls: the collectives so far.
        hit: whether a collective was disturbed.
    """

    def __init__(self, group: Group, at: int | None = None, fault: str = FAILS[0]) -> None:
        super().__init__(group)
        self.at = at
        self.fault = fault
        self.calls: list[Collective] = []
        self.hit = False
        self._held: dict[int, Callable[[], Work]] = {}

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        index = len(self.calls)
        self.calls.append(call)
        if index == self.at:
            self.hit = True
            return self._disturbed(call, x, out)
        held = self._held.pop(call.stream, None)
        if held is None:
            return self.wrapped.start(call, x, out)
        if self.fault == "swapped":
            work = self.wrapped.start(call, x, out)
            held()
            return work
        held()
        return self.wrapped.start(call, x, out)

    def _disturbed(self, call: Collective, x: Tensor, out: Tensor | None) -> Work:
        start = self.wrapped.start
        match self.fault:
            case "at the start":
                raise Injected("the link is down")
            case "at the end":
                work = start(call, x, out)
                return Work(lambda: _fail(work))
            case "late start" | "swapped":
                return self._held_back(call, x, out)
            case "late end":
                work = start(call, x, out)
                work.wait()
                return work
            case "other name":
                return start(dataclasses.replace(call, name="another"), x, out)
            case "other length":
                longer = torch.cat([x, x.new_zeros(self.size)])
                return start(call, longer)
            case "other dtype":
                wider = torch.float64 if x.dtype != torch.float64 else torch.float32
                return start(call, x.to(wider))
            case "left out":
                numel = call.op.output_numel(x.numel(), self.size)
                return Work.done(x.new_zeros(numel) if out is None else out)
            case "twice":
                start(call, x.clone()).wait()
                return start(call, x, out)
            case _:
                raise ValueError(self.fault)

    def _held_back(self, call: Collective, x: Tensor, out: Tensor | None) -> Work:
        started: list[Work] = []

        def begin() -> Work:
            if not started:
                self._held.pop(call.stream, None)
                started.append(self.wrapped.start(call, x, out))
            return started[0]

        self._held[call.stream] = begin
        return Work(lambda: begin().wait())


def _fail(work: Work) -> Tensor:
    work.wait()
    raise Injected("the link is down")
