"""docs/run-toml.md: every option of a run, written from the tables themselves. `make docs` runs this module.

What `dlc join --print-config` says above each option stands here beside it: the words are the same docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from dlc import options
from dlc.cli.document import assigned, docstrings
from dlc.runspec import EMBEDDED_LLAMA, RunSpec

HEAD = """\
# RUN.toml

<!-- Written by `make docs` from src/dlc/runspec.py and src/dlc/strategyspec.py: change the docstrings there. -->

A run is described by one file, which whoever founds it gives to `dlc join --config RUN.toml`. The swarm holds it: those
who join need an address and the key, and receive the rest. What may differ between peers (addresses, device, folders)
is no part of it, but an option of `dlc join`.

- What is left out has its default. The defaults are a small run that needs nothing but Python.
- An unknown option is an error that names the nearest known one; so is a value that does not fit, alone or with others.
- `dlc join --config RUN.toml --print-config` prints all options as they are in effect, each with its meaning.
- Two runs that differ in any option are different runs: their peers do not mix, and each has checkpoints of its own.
- Ready ones are in `configs/`.

## Options
"""
KINDS = {str: "string", int: "whole number", float: "number", bool: "true or false"}


def reference() -> str:
    """The whole page."""
    model = [assigned(name, value) for name, value in EMBEDDED_LLAMA.items()]
    end = ["", "## The embedded model", "", "```toml", "[model.config]", *model, "```"]
    return "\n".join([HEAD, *_table(RunSpec(), ""), *end]) + "\n"


def _table(table: Any, path: str) -> list[str]:
    """One row per plain option, then the tables inside, each below a heading."""
    said = docstrings(type(table))
    rows, inner = ["| option | kind | default | meaning |", "|---|---|---|---|"], list[str]()
    for name, kind in options.field_kinds(type(table)).items():
        value = getattr(table, name)
        if dataclasses.is_dataclass(kind):
            whole = " ".join((inspect.getdoc(type(value)) or said[name]).split())
            inner += ["", f"## [{path}{name}]", "", whole, "", *_table(value, f"{path}{name}.")]
        else:
            named = options.option(name)
            rows.append(f"| `{named}` | {_kind(kind)} | {_default(named, value)} | {_cell(said[name])} |")
    return rows + inner


def _kind(kind: Any) -> str:
    pair = getattr(kind, "__args__", ())
    return KINDS.get(kind) or ("two numbers" if pair == (float, float) else "table")


def _default(name: str, value: Any) -> str:
    if value == EMBEDDED_LLAMA:
        return "below"
    return f"`{assigned(name, options.to_plain(value)).partition(' = ')[2] or '{}'}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
