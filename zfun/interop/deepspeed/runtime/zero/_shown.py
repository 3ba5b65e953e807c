"""Tables on standard output, where DeepSpeed's estimators print theirs."""

from __future__ import annotations

import sys

from zfun.planner.formulae import Estimates

__all__ = ["shown"]


def shown(rows: Estimates) -> Estimates:
    """Write the table of an estimate, and return the rows."""
    sys.stdout.write(f"{rows}\n")
    return rows
