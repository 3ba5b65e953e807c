"""``python -m zfun``."""

from __future__ import annotations

import sys

from zfun.cli import main

if __name__ == "__main__":
    sys.exit(main())
