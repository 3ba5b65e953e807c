"""Collect the examples of Triton kernels only where Triton is installed."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["zfun/ops/_triton"]
