"""Collect nothing from files that import packages which the tests do not need."""

import importlib.util

# The folder stands on PYTHONPATH in scripts for DeepSpeed.
collect_ignore = ["tests/fixtures", "zfun/interop/deepspeed/launcher/site"]
if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")):
    collect_ignore.append("zfun/interop/transformers")
if not importlib.util.find_spec("triton"):
    collect_ignore.append("zfun/ops/_triton")
