"""Figures made without a display, and saved whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseconv.files import check_place, written_whole
from sparseconv.viz.palette import CATEGORIES, SEQUENTIAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: what a picture's file name may end in
FORMATS = (".png", ".pdf", ".svg", ".jpg", ".webp")

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 8,
    "axes.prop_cycle": f"cycler(color={list(CATEGORIES)})",
    "image.cmap": SEQUENTIAL,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.labelcolor": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of that many inches that needs no display; the block uses the package's style.

    Raises:
        ImportError: if matplotlib is not installed.

    >>> with new_figure(4, 3) as figure:
    ...     lines = figure.subplots().plot([0, 1])
    >>> figure.get_size_inches().tolist()
    [4.0, 3.0]
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'sparseconv[viz]'") from None
    with rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")


def checked_picture_path(path: str | Path) -> Path:
    """The path of a picture to write. Raises ValueError for an unknown suffix or a missing folder."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a picture's name must end with {', '.join(FORMATS)}; got {str(path)!r}")
    return check_place(path)


def save_figure(figure: Figure, path: str | Path, dpi: int = 110, *, tight: bool = False) -> Path:
    """Write a figure under its final name only when it is complete; ``tight`` crops its margins.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, new_figure(1, 1) as figure:
    ...     save_figure(figure, Path(folder, "empty.png")).name
    'empty.png'
    """
    from matplotlib import rc_context

    path = checked_picture_path(path)
    with written_whole(path) as unfinished, rc_context(STYLE):
        cropped: Any = {"bbox_inches": "tight", "pad_inches": 0.08} if tight else {}
        figure.savefig(unfinished, dpi=dpi, **cropped)
    return path
