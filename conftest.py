"""Collect nothing from files that need packages which are not there, or that have no example."""

import importlib.util
import sys
from pathlib import Path

import pytest

# The folder stands on PYTHONPATH in scripts for DeepSpeed.
collect_ignore = ["tests/fixtures", "zfun/interop/deepspeed/launcher/site"]
if not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")):
    collect_ignore.append("zfun/interop/transformers")

_ZFUN = Path(__file__).with_name("zfun")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Import no module that has no example: an import takes longer than reading."""
    is_module = collection_path.suffix == ".py" and collection_path.is_relative_to(_ZFUN)
    return (is_module and ">>>" not in collection_path.read_text(encoding="utf-8")) or None


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> None:
    """Forget the precision and the micro-batches of earlier tests, which accelerate keeps."""
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
