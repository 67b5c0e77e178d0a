"""benchmarks/wan.py: which engines there are, and how they are compared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import benchmark_module

for imported in ("_workers", "_hivemind_sites", "_wan"):
    benchmark_module(imported)
wan = benchmark_module("wan")


def test_every_engine_has_a_wire_format_with_a_tolerance() -> None:
    assert {wan.wire_format(engine) for engine in wan.ENGINES} == set(wan.TOLERANCE)
    assert wan.wire_format("gloo-bf16") == "bf16" and wan.wire_format("hivemind") == "fp16"


def test_engines_are_compared_with_the_first() -> None:
    def row(seconds: float) -> dict[str, Any]:
        return {"first_s": seconds, "median_s": seconds, "limit_s": 3.0, "all_s": [seconds]}

    rows = {"fp16": row(4.0), "gloo-bf16": row(6.0), "hivemind": row(10.0)}
    result = {"case": "four-site", "loss": 0.0, "dropped": 0, "probed_mbit": {"a": 100.0}, "rows": rows}
    ours, gloo, hivemind = wan.show(result).splitlines()[2:]
    assert "75.0%" in ours and " x the time" not in ours
    assert "1.50 x the time of fp16" in gloo and "2.50 x the time of fp16" in hivemind


def test_an_unknown_engine_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["wan.py", "--engines", "fp16,gloo"])
    with pytest.raises(SystemExit) as ended:
        wan.main()
    assert ended.value.code == 2
    assert "no engine 'gloo'" in capsys.readouterr().err
