"""Element-wise optimizers of torch.optim, and others with the same interface, as pure functions."""

from zfun.optim.of_torch._from_torch import from_torch
from zfun.optim.of_torch._rule import TorchState
