"""The written side of a run: its reference, and the ready ones under configs/."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import torch

from dlc import options
from dlc.cli import main
from dlc.cli.reference import reference
from dlc.runspec import CHUNK_ELEMS_MAX, RunSpec
from dlc.train.model import build_model

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"llama-2m": 2e6, "llama-14m": 14e6, "llama-60m": 60e6, "llama-150m": 150e6, "llama-1.1b": 1.1e9}
STRATEGIES = {
    "data-parallel": "data-parallel",
    "gossip": "gossip",
    "noloco": "gossip",
    "moshpit": "moshpit",
    "parameter-server": "parameter-server",
}
"""One small run for each, beside the sizes, which are DiLoCo's."""


def test_the_reference_is_what_make_docs_writes() -> None:
    page = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")
    assert page == reference(), "docs/run-toml.md is older than src/dlc/runspec.py: run `make docs`"


def test_the_reference_has_every_option_below_its_table() -> None:
    found, table = set(), ""
    for line in reference().splitlines():
        if line.startswith("## "):
            table = f"{heading[1]}." if (heading := re.fullmatch(r"## \[([\w.]+)\]", line)) else ""
        if row := re.fullmatch(r"\| `(\w+)` \| [a-z ]+ \| (below|`.+`) \| .{9,} \|", line):
            found.add(table + row[1])
    tables = {name for name, kind in options.field_kinds(RunSpec).items() if dataclasses.is_dataclass(kind)}
    assert found == set(options.dotted_names(RunSpec)) - tables
    assert f"{CHUNK_ELEMS_MAX:,}" in reference()


def test_there_is_a_ready_run_of_each_size() -> None:
    assert {path.stem for path in (ROOT / "configs").iterdir()} == set(SIZES) | set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_ready_run_of_each_strategy_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / f"{name}.toml"
    spec = RunSpec.from_toml(path)
    assert (spec.run, spec.strategy) == (name, STRATEGIES[name]) and spec.rounds > 0
    assert main(["join", "--config", str(path), "--print-config"]) == 0
    assert RunSpec.from_dict(tomllib.loads(capsys.readouterr().out)) == spec


@pytest.mark.parametrize("name", SIZES)
def test_a_ready_run_is_valid_and_as_large_as_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "configs" / f"{name}.toml"
    spec = RunSpec.from_toml(path)
    assert spec.run == name and spec.rounds > 0
    with torch.device("meta"):
        n = sum(parameter.numel() for parameter in build_model(spec.model.config, spec.seed).parameters())
    assert abs(n / SIZES[name] - 1) < 0.05
    assert f" {n:,} parameters" in path.read_text(encoding="utf-8").splitlines()[0]
    assert main(["join", "--config", str(path), "--print-config"]) == 0
    assert RunSpec.from_dict(tomllib.loads(capsys.readouterr().out)) == spec
