"""Tests on real processes of this machine: loopback only, each with a hard timeout."""

from __future__ import annotations

import platform
import sys

import pytest

needs_shared_memory = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"), reason="shared memory is for Linux on x86-64"
)
