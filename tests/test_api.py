"""docs/api.md says what the docstrings say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import dlc

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def test_the_api_reference_is_up_to_date_and_names_what_dlc_exports() -> None:
    pytest.importorskip("griffe", reason="the reference is written by griffelib, of the extra dev")
    found = importlib.util.spec_from_file_location("api", PAGE.with_suffix(".py"))
    assert found is not None and found.loader is not None
    api = importlib.util.module_from_spec(found)
    found.loader.exec_module(api)
    assert api.reference() == PAGE.read_text("utf-8"), "run `make api`"
    text = PAGE.read_text("utf-8")
    assert all(f"### dlc.{name}\n" in text for name in dlc.__all__ if not name.startswith("_"))
