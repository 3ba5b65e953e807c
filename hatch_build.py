"""Let wheels carry ``examples/``, whose model and text the demo trains, as a checkout does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExamplesHook(BuildHookInterface[Any]):
    """Puts the examples beside the demo, in wheels that are not editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Say what to include."""
        if version != "editable":
            files = sorted(Path(self.root, "examples").glob("*.py"))
            build_data["force_include"].update(
                {str(file): f"zfun/demo/examples/{file.name}" for file in files}
            )
