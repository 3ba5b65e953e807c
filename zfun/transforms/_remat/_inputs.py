"""The inputs of a block: which of them are activations, and so move; the others stay.

A block that is computed again saves its inputs, and nothing else, by way of autograd. So hooks for what autograd saves, put around the call
of the block, see each input twice: when it is saved, and when backward asks for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun.transforms._remat._elsewhere import Elsewhere, Moved, Stays
from zfun.transforms._remat._vectors import is_plain
from zfun.transforms.grads._reducer import is_bucket_view

__all__ = ["moving_inputs"]


def moving_inputs(elsewhere: Elsewhere | None, arguments: Sequence[Any], *, results_too: bool) -> contextlib.AbstractContextManager[Any]:
    """Make the context in which a block is called.

    Args:
        elsewhere: where activations go; ``None`` where nothing moves.
        arguments: all that the block is called with.
        results_too: whether autograd saves the results of the block's operations as well, because nothing is computed again.

    Returns:
        The context.
    """
    if elsewhere is None:
        return contextlib.nullcontext()
    hooks = _Hooks(elsewhere, arguments, results_too)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


class _Hooks:
    """Takes over in forward what autograd saves, and gives it back in backward."""

    def __init__(self, elsewhere: Elsewhere, arguments: Sequence[Any], results_too: bool) -> None:
        self.elsewhere = elsewhere
        self.results_too = results_too
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        # What has no gradient is data, and is kept by who made it.
        self.data = {
            leaf.untyped_storage()._cdata for leaf in arguments if isinstance(leaf, Tensor) and is_plain(leaf) and leaf.grad_fn is None
        }

    def pack(self, tensor: Tensor) -> Moved | Stays:
        # What the hooks around the block make into something else is theirs.
        packed = tensor if self.outer is None else self.outer[0](tensor)
        # Within backward this block is part of one that is being computed again, and lives for a moment only.
        if not isinstance(packed, Tensor) or torch._C._current_graph_task_id() != -1 or not self._is_activation(tensor):
            return Stays(packed)
        return self.elsewhere.keep(packed)

    def unpack(self, kept: Moved | Stays) -> Any:
        value = self.elsewhere.restore(kept)
        return value if self.outer is None else self.outer[1](value)

    def _is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed, and is no parameter or view of a bucket, which somebody else keeps."""
        if not is_plain(tensor):
            return False
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        node = base.grad_fn
        # A cast parameter is one still.
        while node is not None and node.name() == "ToCopyBackward0":
            node = node.next_functions[0][0]
        if node is None:
            # Autograd saves the results of operations without their history.
            return self.results_too and not base.requires_grad and base.untyped_storage()._cdata not in self.data
        return node.name() != "torch::autograd::AccumulateGrad" and not is_bucket_view(node)
