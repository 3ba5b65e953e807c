"""Ranges of ``torch.profiler`` with the names of buckets.

While a profiler runs, the start of a collective and the wait for the result are ranges
``zfun all_gather params (bucket 2: h.1 … (4 leaves))`` and the same with ``: wait``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from torch import Tensor
from torch.autograd import profiler

from zfun.collectives._group import Group
from zfun.collectives._ops import Collective
from zfun.collectives._work import Work

_Start = TypeVar("_Start", bound=Callable[..., Work])


def with_ranges(start: _Start) -> _Start:
    """Decorate :meth:`Group.start`."""

    @functools.wraps(start)
    def ranged(self: Group, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        if not profiler._is_profiler_enabled:
            return start(self, call, x, out)
        name = f"zfun {call.op.kind}{f' {call.name}' * bool(call.name)}"
        name += f" ({call.part})" if call.part else ""
        with profiler.record_function(name):
            work = start(self, call, x, out)

        def wait() -> Tensor:
            with profiler.record_function(f"{name}: wait"):
                return work.wait()

        return Work(wait)

    return cast("_Start", ranged)
