"""The store that ``docs/extend/store.md`` shows: one that a user writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "extend" / "store.md"


def user_store() -> Any:
    """Run the code of the page and return a store of its class."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names["ZlibStore"]()
