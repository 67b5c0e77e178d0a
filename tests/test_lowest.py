"""`make lowest` tries the least versions that pyproject.toml promises: its list is theirs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def promised() -> dict[str, str]:
    """Name and least version of each package that dlc needs, or takes as an extra; not of tools of its developers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for extra, lines in project["optional-dependencies"].items() if extra != "dev" for line in lines]
    return dict(line.split(">=") for line in [*project["dependencies"], *extras])


def listed() -> dict[str, str]:
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    direct, _ = text.split("# What these need themselves")
    return dict(re.findall(r"^([\w-]+)==([\d.]+)$", direct, re.MULTILINE))


def test_the_least_versions_that_are_tried_are_those_that_are_promised() -> None:
    def padded(version: str) -> list[int]:
        return ([*map(int, version.split(".")), 0, 0])[:3]

    promises = promised()
    assert len(promises) > 10
    assert {name: padded(v) for name, v in promises.items()} == {name: padded(v) for name, v in listed().items()}
