"""Steps that the device leaves out, while the host goes on.

[Note: late counts]
With ``max_skipped=None`` no number of a step comes to the host before the next step: the norm, the
truth that it is finite, the loss scale and the counts of skipped steps stay on the device, and the
kernels of the update read the truth there. The host needs one number, the count of an optimizer,
because schedules and bias corrections are functions of it. So a step starts to copy the count to
page-locked memory, and the next update reads it. By then the device has the forward and backward
pass of that step to run, so it does not run dry, even if the host is early and waits.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor

from zfun import tree
from zfun.flat import Flat
from zfun.optim import LossScaleState
from zfun.stores import LateValues


def _is_count(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 0 and x.dtype == torch.int64 and not x.is_cpu


def _leaves(opt_state: Any) -> tuple[list[Any], Any]:
    return tree.flatten(opt_state, is_leaf=lambda x: isinstance(x, Flat))


def counts_of(opt_state: Any) -> list[Tensor]:
    """Return the counts of an optimizer's state that lie on a device."""
    return [x for x in _leaves(opt_state)[0] if _is_count(x)]


def with_counts(opt_state: Any, late: LateValues) -> Any:
    """Return the state with its counts on the host; counts of another state are read here."""
    leaves, spec = _leaves(opt_state)
    counts = list(filter(_is_count, leaves))
    is_last = len(counts) == len(late.tensors) and all(map(is_, counts, late.tensors))
    numbers = iter(late.read() if is_last else map(int, counts))
    held = [
        torch.tensor(next(numbers), dtype=torch.int64, device="cpu") if _is_count(x) else x
        for x in leaves
    ]
    return tree.unflatten(spec, held) if counts else opt_state


def scale_on(state: LossScaleState, device: torch.device) -> LossScaleState:
    """Return the state of a loss scale on a device, without a wait of the host."""
    return LossScaleState(
        *(torch.full((), x.item(), dtype=x.dtype, device=device) if x.is_cpu else x for x in state)
    )
