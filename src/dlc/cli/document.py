"""A RunSpec as a RUN.toml in which every option is explained; the words are the docstrings of its tables."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import tomli_w

from dlc import options
from dlc.runspec import RunSpec

WIDTH = 100


def documented(spec: RunSpec) -> str:
    """TOML that reads back as `spec`."""
    return "\n".join(["# A run of dlc: `dlc join --config FILE` founds it.", *_table(spec, "")]) + "\n"


def _table(table: Any, path: str) -> list[str]:
    """Plain options first, since in TOML what follows a table's head belongs to it."""
    said = docstrings(type(table))
    plain: dict[str, Any] = table.to_dict() if isinstance(table, RunSpec) else options.to_plain(table)
    lines: list[str] = []
    for name in sorted(plain, key=lambda name: isinstance(plain[name], dict)):
        comment = textwrap.wrap(
            said.get(options.attribute(name), ""), WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        inner, value = getattr(table, options.attribute(name)), plain[name]
        if not isinstance(value, dict):
            lines += ["", *comment, assigned(name, value)]
            continue
        lines += ["", *comment, f"[{path}{name}]"]
        lines += (
            _table(inner, f"{path}{name}.") if hasattr(inner, "__dataclass_fields__") else _mapping(value, path + name)
        )
    return lines


def _mapping(values: dict[str, Any], path: str) -> list[str]:
    flat = [assigned(name, value) for name, value in values.items() if not isinstance(value, dict)]
    for name, value in values.items():
        if isinstance(value, dict):
            key = tomli_w.dumps({name: 0}).split(" = ")[0]
            flat += [f"[{path}.{key}]", *_mapping(value, f"{path}.{key}")]
    return flat


def assigned(name: str, value: Any) -> str:
    """`name = value` as TOML; lists on one line."""
    text = tomli_w.dumps({name: value}).strip()
    if isinstance(value, list) and not any(isinstance(item, (list, dict)) for item in value):
        head, *items = (line.strip(" ") for line in text.split("\n"))  # U+2028, say, ends no line of TOML
        return head + " ".join(items).removesuffix(", ]") + "]" if items else head
    return text


def docstrings(kind: type) -> dict[str, str]:
    """Field name of a table to what stands below it in the class; nothing where the source is not at hand."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, SyntaxError):
        return {}
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    found: dict[str, str] = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                found[field.target.id] = " ".join(text.value.value.split())
    return found
