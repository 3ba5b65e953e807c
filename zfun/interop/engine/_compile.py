"""``torch.compile`` of the blocks of a live module."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from zfun.interop.engine._live import LiveMethod, LiveParameters


def compile_blocks(module: nn.Module, **options: Any) -> None:
    """Compile the repeated blocks of a module, or the whole module where no block repeats.

    Blocks are compiled one by one, so that stage 3 gathers one block at a time, and code that was
    compiled for one block serves the others.

    Args:
        module: its calls are plain ones; see :meth:`Live.leave`.
        options: of ``torch.compile``.
    """
    lists = [
        part
        for part in module.modules()
        if isinstance(part, nn.ModuleList) and len(part) > 1 and len({type(x) for x in part}) == 1
    ]
    for block in [block for part in lists for block in part] or [module]:
        if not isinstance(block.forward, CompiledForward):
            block.forward = CompiledForward(block, torch.compile(block.forward, **options))


def adopt_compiled(module: nn.Module) -> None:
    """Let code that ``torch.compile`` made of parts of a module get plain tensors.

    Args:
        module: not live yet.
    """
    for part in list(module.modules()):
        if isinstance(part, OptimizedModule):
            part.forward = CompiledForward(part, part.forward)
        elif part._compiled_call_impl is not None:
            compiled, part._compiled_call_impl = part._compiled_call_impl, None
            part.forward = CompiledForward(part, compiled, is_call=True)


class CompiledForward:
    """The compiled ``forward`` of a block, which gets plain tensors as parameters.

    Args:
        block: a module.
        compiled: the compiled code.
        is_call: whether the code calls ``block.forward`` by itself.
    """

    is_whole = True

    def __init__(self, block: nn.Module, compiled: Any, *, is_call: bool = False) -> None:
        self.own = self.__wrapped__ = block.forward
        self._block, self._compiled, self._is_call = block, compiled, is_call
        self._modes: set[bool] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = torch.is_grad_enabled()
        with self._plain():
            if mode in self._modes:
                return self._compiled(*args, **kwargs)
            self._modes.add(mode)
            with warnings.catch_warnings():
                # While Dynamo traces, it asks for the .grad of every tensor.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                return self._compiled(*args, **kwargs)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Let the parts of the block hold the tensors of the call."""
        parts = list(self._block.modules())
        live = [(x, x._parameters) for x in parts if isinstance(x._parameters, LiveParameters)]
        entry = self._block.__dict__.get("forward")
        try:
            for part, params in live:
                part.__dict__["_parameters"] = {key: params[key] for key in params}
            if self._is_call:
                self._block.__dict__["forward"] = self.own
            yield
        finally:
            for part, params in live:
                part.__dict__["_parameters"] = params
            if self._is_call:
                self._block.__dict__["forward"] = entry

    # As for other methods of live modules.
    of_copy = LiveMethod.of_copy
    __deepcopy__ = LiveMethod.__deepcopy__
