"""How every figure for print looks and is saved: colours, fonts, and files that are equal when drawn again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

Axes: TypeAlias = Any  # matplotlib's; it is imported where something is drawn
INK, GREY, LIGHT = "#1f2430", "#9aa3b2", "#d9dee7"
BLUE = "#1f5fbf"  # colour-blind safe on white, prints as a dark grey
ORANGE = "#d9730d"  # the sparse model; distinct from BLUE in every common colour blindness and in grey
STYLE: Any = {"font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "sparselens", "pdf.fonttype": 42}
SUFFIXES = ("png", "svg", "pdf")
TIMELESS = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


@contextmanager
def pyplot() -> Iterator[Any]:
    """matplotlib.pyplot in our style, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        yield plt


def save(figure: Any, *paths: str | Path, dpi: int = 220) -> None:
    """The figure as files, suffixes say in which formats; then it is closed."""
    import matplotlib.pyplot as plt

    for path in map(Path, paths):
        figure.savefig(path, dpi=dpi, metadata=TIMELESS.get(path.suffix[1:]))
    plt.close(figure)
