"""Faces of other libraries over dlc's own peer, for programs that were written for those.

import dlc.compat.hivemind as hivemind       a program that may be edited
dlc.compat.install(run_key="run.key")        before `import hivemind` of one that may not
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

from dlc.errors import UsageError

OURS = "dlc.compat.hivemind"
NAME = "hivemind"


def install(run_key: str | bytes | Path | None = None) -> None:
    """From now on `import hivemind`, and whatever stands below it, finds `dlc.compat.hivemind`; `importlib.metadata`
    tells a version of hivemind.

    run_key: for every `DHT` that is made without one of its own. UsageError: the other library is imported already, so
    that some of its names are in use; call this first.
    """
    package = importlib.import_module(OURS)
    if sys.modules.get(NAME, package) is not package:
        raise UsageError("the module hivemind is imported already: call dlc.compat.install() before everything else")
    if run_key is not None:
        importlib.import_module(f"{OURS}.dht").set_run_key(run_key)
    found = [info.name for info in pkgutil.walk_packages(package.__path__, f"{OURS}.")]
    for name in (OURS, *found):  # all at once: one found later by its path would be a second copy
        sys.modules[NAME + name.removeprefix(OURS)] = importlib.import_module(name)
    importlib.import_module("dlc.compat.distribution").show()


def uninstall() -> None:
    """Undo `install`; names that were imported meanwhile stay valid."""
    package = sys.modules.get(OURS)
    if package is not None and sys.modules.get(NAME) is package:
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]
        importlib.import_module("dlc.compat.distribution").hide()


__all__ = ["install", "uninstall"]
