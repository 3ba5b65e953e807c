"""Parts that all pictures share, which matplotlib draws; imported when a picture is asked for."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, whose colours differ for colour-blind readers and in grey.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
RED, PINK, YELLOW, GREY, BLACK = "#D55E00", "#CC79A7", "#F0E442", "#999999", "#222222"
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


class Drawing(Figure):
    """A figure that a notebook and a page show without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=120)
        return buffer.getvalue()


def blank(width: float, height: float, title: str = "") -> Drawing:
    """Return a figure with nothing but a title."""
    figure = Drawing(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=BLACK)
    return figure


def frame(axes: Axes) -> None:
    """Leave the left and the lower line of a panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=BLACK)


def draw_bar(
    axes: Axes, row: int, span: tuple[float, float], colour: str, *, high: float, alpha: float
) -> None:
    """Draw a bar over a start and a length, ``high`` rows high; a lower ``alpha`` is lighter."""
    start, length = span
    axes.barh(row, length, high, start, color=colour, alpha=alpha, edgecolor="white", linewidth=0.8)


def put_legend(figure: Figure, handles: Sequence[Artist], ncols: int = 6) -> None:
    """Explain colours below the panels; each handle has its label."""
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=ncols,
        frameon=False,
        fontsize=9,
        handlelength=1.1,
        handleheight=1.1,
    )


def unit_of(most: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit for an axis.

    Example:
        >>> unit_of(3 * 2**20), unit_of(0)
        ((1048576, 'MiB'), (1, 'bytes'))
    """
    return next((size, unit) for size, unit in _SIZES if most >= size or size == 1)
