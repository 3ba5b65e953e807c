"""For the fork server: the first kernel of a process loads a hundred modules of numba."""

from __future__ import annotations

import torch

from zfun import ops

ops.SgdRule(learning_rate=0.5)(torch.ones(8), torch.ones(8), None, None)
