"""Training text that every Python installation has: the source of the standard library."""

from __future__ import annotations

import itertools
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Folders outside the library itself, and long tables that do not resemble source text.
SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


def stdlib_bytes(limit: int = 4_000_000) -> Tensor:
    """Read the source text of Python's standard library, in order of file names.

    Args:
        limit: largest number of bytes to read.

    Returns:
        A uint8 tensor ``[bytes]``, equal on all machines with the same version of Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(_sources(root)):
        text += _read(path)
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(
            f"the standard library's source should be in {root}, but no .py file there can be "
            "read; install it"
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def _sources(root: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(root):
        below[:] = set(below) - SKIPPED  # os.walk enters what is left
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # a dangling link or an unreadable file; the other files suffice
        return b""


def batches(
    text: Tensor,
    batch_size: int,
    length: int,
    rank: int = 0,
    size: int = 1,
    seed: int = 0,
    first: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw random pieces of a text, without end.

    The whole batch of a step depends only on the seed and the step, and the ranks divide the batch.
    Two ranks with 4 sequences each therefore train on the same data as one rank with 8 sequences.

    Args:
        text: a uint8 tensor ``[bytes]``.
        batch_size: sequences of all ranks together, a multiple of ``size``.
        length: bytes in a sequence.
        rank: the part of the batch to return.
        size: number of ranks.
        seed: seed of the random pieces.
        first: the step of the first batch to return; the batches before are skipped.

    Yields:
        Tokens and next tokens, two int64 tensors ``[batch_size / size, length]``.
    """
    if batch_size % size != 0:
        raise ValueError(
            f"the ranks must divide the batch; got {batch_size} sequences for {size} ranks; take "
            f"{batch_size // size * size}"
        )
    generator = torch.Generator().manual_seed(seed)
    share = batch_size // size
    offsets = torch.arange(length + 1)
    for step in itertools.count(1):
        starts = torch.randint(len(text) - length, (batch_size,), generator=generator)
        if step < first:
            continue
        mine = text[starts[rank * share : (rank + 1) * share, None] + offsets].long()
        yield mine[:, :-1], mine[:, 1:]
