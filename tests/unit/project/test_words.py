"""The counter of words reads prose only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import words

PYTHON = '''"""A module that begins well.

    python what.py --it
"""

# A comment of what it does.
what = "it is what it is"


def f(it):
    """Return it.

    Args:
        it: the value, see ``what``.

    Example:
        >>> f("what")
        'what it is'
    """
    return it  # whatever
'''
MARKDOWN = """# What
Its title, in `it`, [a link](what.md).

```python
what = it
```
"""


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("a.py", PYTHON, {"what": 1, "it/its/they/them": 3}),
        ("a.md", MARKDOWN, {"what": 1, "it/its/they/them": 1}),
    ],
)
def test_code_does_not_count_as_prose(
    name: str, text: str, counts: dict[str, int], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert dict(words.count(tmp_path / name).counts) == counts


def test_sentences_are_listed_by_line_and_too_many_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A good sentence.\nIt waits for it\nand for them. The end.\n")
    done = subprocess.run(
        [sys.executable, words.__file__, "--list", str(page)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"{page}:2: It waits for it and for them.\n" in done.stdout
    assert "too many in" in done.stderr
    page.write_text("A good sentence. " * 400)
    assert (
        subprocess.run(
            [sys.executable, words.__file__, str(page)],
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode
        == 0
    )
