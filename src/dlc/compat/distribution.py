"""What `importlib.metadata` tells of hivemind while `dlc.compat` stands in for it: programs look for a version."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType

from dlc.compat.hivemind import __version__

NAME = "hivemind"
ANY = DistributionFinder.Context()
"""Of no name: all that there are."""


class StandIn(Distribution):
    """No file is installed; it has a name and a version."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {__version__}\n" if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parent / path


class _Finder(DistributionFinder):
    """Asked last: a hivemind that is installed tells of itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """It finds no modules."""

    def find_distributions(self, context: DistributionFinder.Context = ANY) -> Iterable[StandIn]:
        return [StandIn()] if (context.name or NAME).lower() == NAME else []


_finder = _Finder()


def show() -> None:
    """From now on, until `hide`."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def hide() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
