"""Signs, eight to the byte."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_signs(x: Tensor) -> Tensor:
    bits = (x >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, numel: int, scales: Tensor) -> Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    positive = ((packed[..., None] >> places) & 1).flatten(-2)[..., :numel].bool()
    column = scales[..., None]
    return torch.where(positive, column, -column)
