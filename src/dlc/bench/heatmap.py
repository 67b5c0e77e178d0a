"""A matrix of links as a picture. matplotlib is an extra, and is only imported here."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

from dlc.bench.matrix import MatrixReport
from dlc.bench.show import rate
from dlc.errors import UsageError
from dlc.train.shelf import demand_place

INCHES_PER_SITE = 0.9
INCHES_FRAME = 3.0


def check(path: Path) -> None:
    """Raise UsageError now, rather than after the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png needs matplotlib, of the extra `plots`: pip install 'dlc[plots]'")
    folder = path.absolute().parent
    if path.suffix.lower() != ".png":
        raise UsageError(f"--png wants the name of a .png file, not {path}")
    if path.is_dir():
        raise UsageError(f"--png wants the name of a file, and {path} is a folder")
    if not folder.is_dir():
        raise UsageError(f"--png {path} cannot be written: there is no folder {folder}; make it, or name another file")
    if not path.exists():
        demand_place("--png", path, folder)
    elif not os.access(path, os.W_OK):  # it is written in place, whatever its folder takes
        raise UsageError(f"--png: {path} cannot be written by this user; name another file")
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:  # it is there, but does not fit numpy, say
        raise UsageError(
            f"--png: matplotlib cannot be loaded here ({error}); install it anew, with a numpy that fits, or leave "
            "out --png"
        ) from None


def draw(report: MatrixReport, path: Path) -> None:
    """Write the picture: rows send, columns receive, colour is the logarithm of the rate. OSError: it cannot be."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sites = report.sites
    rates = {(pair.sender, pair.receiver): pair.up_mbps for pair in report.pairs}
    grid = [[_log(rates.get((a, b))) for b in sites] for a in sites]
    side = INCHES_PER_SITE * len(sites) + INCHES_FRAME
    figure = Figure(figsize=(side, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="viridis")
    middle = sum(image.get_clim()) / 2
    for row, sender in enumerate(sites):
        for column, receiver in enumerate(sites):
            text = "" if row == column else rate(rates.get((sender, receiver)))
            dark = grid[row][column] <= middle
            axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(sites)), sites, rotation=45, ha="right")
    axes.set_yticks(range(len(sites)), sites)
    axes.set_xlabel("receives")
    axes.set_ylabel("sends")
    axes.set_title("Mbit/s of payload")
    figure.savefig(path)


def _log(mbps: float | None) -> float:
    return math.log10(mbps) if mbps else math.nan
