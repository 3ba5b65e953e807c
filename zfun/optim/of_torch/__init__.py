"""Element-wise optimizers of torch.optim, and others with the same interface, as pure functions."""

from zfun.optim.of_torch._from_torch import from_torch
from zfun.optim.of_torch._muon import torch_muon
from zfun.optim.of_torch._probe import FLAGS, keys_that_steps_read
from zfun.optim.of_torch._rule import TorchState
