"""A forward pass of an engine in autograd's graph; see [Note: the engine]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zfun.errors import ZfunError
from zfun.transforms import Pullback

__all__ = ["Call", "CallNode"]


class Call:
    """A forward pass of an engine that backward may go through."""

    def __init__(self, pullback: Pullback, inputs: list[Tensor], device: torch.device) -> None:
        self.anchor = torch.empty(0, device=device, requires_grad=True)
        self.anchor.register_post_accumulate_grad_hook(_refuse_plain_backward)
        self.weight: Tensor | None = None
        # The engine that is running backward wants the gradients.
        self.is_wanted = False
        self.grads: Any = None
        self._pullback = pullback
        self._inputs = inputs

    def pull(self, cotangents: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Run the pullback, and return the cotangents of the inputs."""
        paths = [path for path in self._pullback.paths if path is not None]
        given = {path: x for path, x in zip(paths, cotangents, strict=True) if x is not None}
        # A loss that the caller keeps leads here, and must not keep the inputs.
        inputs, self._inputs = self._inputs, list[Tensor]()
        grads, into = self._pullback.with_inputs(given, inputs, weight=self.weight)
        if self.is_wanted:
            self.grads = grads
        return into


def _refuse_plain_backward(anchor: Tensor) -> None:
    anchor.grad = None
    raise ZfunError(
        "the gradients of an engine go into its state; got loss.backward(), which knows no engine; "
        "call engine.backward(loss), and run the forward pass again"
    )


class CallNode(torch.autograd.Function):
    """The outputs of a call forward, the pullback backward."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, call: Call, values: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        del tensors
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]
        call: Call = ctx.call
        return None, None, torch.empty_like(call.anchor), *call.pull(grads)
