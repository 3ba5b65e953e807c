"""The group of the ranks of one host that share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from zfun.collectives._group import Allocate
from zfun.collectives._ops import Collective, check_collective, describe
from zfun.collectives._ranges import with_ranges
from zfun.collectives._work import Work
from zfun.collectives.backends._base import Mismatch, ProcessGroup, TransportError
from zfun.collectives.shm._memory import SharedMemory
from zfun.errors import OptionError


@final
class SharedGroup(ProcessGroup):
    """Processes of one host. See [Note: collectives through symmetric memory]."""

    is_symmetric = True

    def __init__(self, memory: SharedMemory, *settings: Any) -> None:
        super().__init__(*settings)
        self._memory = memory
        memory.watch(self._watchdog.waiting)

    @with_ranges
    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(
                f"a gloo group moves CPU tensors only; {call.op.kind} got one on {x.device}; use "
                "nccl"
            )
        self._check_open()
        text = describe(call, x.numel(), x.dtype)
        sent = self._memory.send(call, text, _plain(x), None if out is None else _plain(out))
        self._watchdog.note_start(call.stream, lambda: text)

        def wait() -> Tensor:
            self._check_process()
            try:
                found = self._memory.finish(sent)
            except (Mismatch, TransportError):
                with self._explained(call, text, sent.index):
                    raise
            return found if out is None else out

        return Work(wait)

    @property
    def allocate(self) -> Allocate | None:
        return self._allocate

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._check_process()
        found = self._memory.allocate(numel, dtype) if device.type == "cpu" else None
        return torch.empty(numel, dtype=dtype, device=device) if found is None else found

    def await_readers(self, tensors: Sequence[Tensor]) -> None:
        """Do :func:`zfun.collectives.await_readers`."""
        self._check_open()
        # Release all windows before the first wait, because the peers may be waiting for them.
        for sent in [sent for x in tensors for sent in self._memory.release_for(x)]:
            with self._explained(sent.call, sent.text, sent.index):
                self._memory.await_readers(sent)

    def _give_up(self) -> None:
        self._memory.interrupt()

    def _interrupt(self) -> None:
        self._memory.interrupt()

    def _release(self) -> None:
        self._memory.close()


def _plain(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x
