"""Tables of plans, as a notebook shows them."""

from __future__ import annotations

import html
from collections.abc import Sequence

_MOST = 60


def in_bytes(count: int) -> str:
    """Return a number of bytes in a readable unit.

    Example:
        >>> in_bytes(512), in_bytes(3 * 2**20)
        ('512 bytes', '3.00 MiB')
    """
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} bytes"


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in columns, the first column to the left and the others to the right.

    Example:
        >>> print(in_columns([("", "bytes"), ("params", "8")]))
                bytes
        params      8
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        lines.append("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
    return "\n".join(line.rstrip() for line in lines)


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as HTML; after 60 rows only the number of the others.

    Example:
        >>> html_table("buckets", ["label"], [["a < b"]]).partition("<tbody>")[2]
        '<tr><td>a &lt; b</td></tr></tbody></table>'
    """

    def line(tag: str, cells: Sequence[object]) -> str:
        shown = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
        return f"<tr>{shown}</tr>"

    body = [line("td", row) for row in rows[:_MOST]]
    if len(rows) > _MOST:
        body.append(f'<tr><td colspan="{len(header)}">and {len(rows) - _MOST} more</td></tr>')
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead>{line('th', header)}</thead>"
        f"<tbody>{''.join(body)}</tbody></table>"
    )
