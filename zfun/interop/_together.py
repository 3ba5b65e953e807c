"""Calls of a host library that all ranks make, where a script may let one rank call alone."""

from __future__ import annotations

import torch

from zfun.collectives import Group, agreement_group, gather_values


def begin(call: str, ranks: Group) -> None:
    """Wait until all ranks are in a call, so that an error names it if one of them is elsewhere."""
    words = f'{call}, which all ranks call: take it out of any "if" on the rank'
    gather_values(torch.zeros(1, dtype=torch.uint8), agreement_group(ranks), words)
