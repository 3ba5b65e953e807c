"""A pytest plugin: tests that ask for a number of ranks run once for each.

``pytest -p zfun.testing.plugin --zfun-sizes 1,2,4``, or in ``pyproject.toml``::

    [tool.pytest.ini_options]
    addopts = ["-p", "zfun.testing.plugin", "--zfun-sizes", "1,2,4"]

A test with the argument ``zfun_size`` runs once for each size; the argument ``zfun_sizes`` is the
tuple of all sizes, for ``assert_invariant(..., sizes=zfun_sizes)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zfun.errors import OptionError
from zfun.options import takes

if TYPE_CHECKING:
    import pytest

_DEFAULT = "1,2,3"


@takes()
def parse_sizes(text: str) -> tuple[int, ...]:
    """Read numbers of ranks.

    Args:
        text: numbers with commas between.

    Returns:
        The numbers, each once, in the given order.

    Raises:
        OptionError: an entry is no positive integer.

    Example:
        >>> parse_sizes("1, 2,4,2")
        (1, 2, 4)
    """
    sizes: dict[int, None] = {}
    for entry in text.split(","):
        if not entry.strip().isdecimal() or int(entry) < 1:
            raise OptionError(
                "--zfun-sizes takes numbers of ranks, 1 or more, with commas between; got "
                f"{text!r}; write --zfun-sizes 1,2,4"
            )
        sizes[int(entry)] = None
    return tuple(sizes)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--zfun-sizes``."""
    parser.getgroup("zfun").addoption(
        "--zfun-sizes",
        default=_DEFAULT,
        metavar="N,N",
        help=f"numbers of simulated ranks for zfun_size and zfun_sizes (default: {_DEFAULT})",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test ``zfun_size``, once for each size, or ``zfun_sizes``."""
    import pytest

    if not {"zfun_size", "zfun_sizes"} & set(metafunc.fixturenames):
        return
    try:
        sizes = parse_sizes(metafunc.config.getoption("--zfun-sizes"))
    except OptionError as error:
        raise pytest.UsageError(str(error)) from error
    if "zfun_size" in metafunc.fixturenames:
        metafunc.parametrize("zfun_size", sizes, ids=[f"{size} ranks" for size in sizes])
    if "zfun_sizes" in metafunc.fixturenames:
        metafunc.parametrize("zfun_sizes", [sizes], ids=["all sizes"])
