"""The console that tables are printed to."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console


class Stdout(Console):
    """rich's, but where nobody reads any more BrokenPipeError is raised: rich would end the process with status 1."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError("nobody reads stdout any more")
