"""Move the inputs of a block that are activations; the other inputs stay in place.

Autograd saves the inputs of a recomputed block and nothing else. Saved-tensor hooks around the call
therefore see each input twice: when autograd saves the input, and when backward needs the input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zfun.transforms.call._reducer import is_bucket_view
from zfun.transforms.call._saved import without_cycle
from zfun.transforms.remat._elsewhere import Elsewhere, MovedVector, Stays
from zfun.transforms.remat._vectors import is_plain


def moving_inputs(
    elsewhere: Elsewhere | None, arguments: Sequence[Any], *, results_too: bool
) -> contextlib.AbstractContextManager[Any]:
    """Make the context in which a block is called with these arguments.

    With ``results_too`` autograd also saves results of operations, because nothing is recomputed.
    """
    if elsewhere is None:
        return contextlib.nullcontext()
    hooks = _Hooks(elsewhere, arguments, results_too)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)


class _Hooks:
    """Saved-tensor hooks that move activations in forward and back in backward."""

    def __init__(self, elsewhere: Elsewhere, arguments: Sequence[Any], results_too: bool) -> None:
        self.elsewhere = elsewhere
        self.results_too = results_too
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        # An argument without a gradient history is data, which the caller keeps.
        self.data = {
            leaf.untyped_storage()._cdata
            for leaf in arguments
            if isinstance(leaf, Tensor) and is_plain(leaf) and leaf.grad_fn is None
        }

    def pack(self, tensor: Tensor) -> MovedVector | Stays:
        # If outer hooks convert the tensor, the outer hooks keep the result.
        packed = without_cycle(tensor) if self.outer is None else self.outer[0](tensor)
        # In backward this block is part of an outer block's recomputation, and is short-lived.
        if (
            not isinstance(packed, Tensor)
            or torch._C._current_graph_task_id() != -1
            or not self._is_activation(tensor)
        ):
            return Stays(packed)
        return self.elsewhere.keep(packed)

    def unpack(self, kept: MovedVector | Stays) -> Any:
        value = self.elsewhere.restore(kept)
        return value if self.outer is None else self.outer[1](value)

    def _is_activation(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed and is neither a parameter nor a view of a bucket."""
        if not is_plain(tensor):
            return False
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        node = base.grad_fn
        # A cast parameter counts as a parameter.
        while node is not None and node.name() == "ToCopyBackward0":
            node = node.next_functions[0][0]
        if node is None:
            # Autograd saves results of operations without history.
            return (
                self.results_too
                and not base.requires_grad
                and base.untyped_storage()._cdata not in self.data
            )
        return node.name() != "torch::autograd::AccumulateGrad" and not is_bucket_view(node)
