"""Let all ranks keep the old state until the stores of all ranks have the new state."""

from __future__ import annotations

import torch

from zfun import stores, tree
from zfun.collectives import gather_values
from zfun.flat import Flat
from zfun.stores import Stored


def can_fail(value: tree.Tree) -> bool:
    """Whether a store of a tensor in a tree may fail."""
    return any(isinstance(leaf, Stored) and leaf.can_fail for leaf in tree.leaves(value))


def agree(value: tree.Tree, like: Flat) -> None:
    """Wait until the stores of all ranks keep the new values in a tree."""
    stores.flush(value)
    await_ranks(value, like)


def await_ranks(value: tree.Tree, like: Flat) -> None:
    """Wait until all ranks are here, if a store of a tensor in a tree may fail on one of them."""
    if can_fail(value):
        # No rank gives up the old state before the stores of all ranks keep the new one.
        gather_values(torch.zeros(1, device=like.layout.device), like.group, "offload")
