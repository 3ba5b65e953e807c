"""What pytest collects: the examples of kernels for GPUs only where there is something that compiles them."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["zfun/ops/_triton"]
