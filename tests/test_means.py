"""The verdict of benchmarks/means.py: it finds every mean that is not what its report says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlc.comm.grid import Grid
from dlc.report import Share
from tests.helpers import benchmark_module

NUMEL, CHUNK = 1000, 250
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
means = benchmark_module("_means")


def mean_of(chunks: list[list[float]]) -> torch.Tensor:
    """Of contributions of these weights, chunk by chunk."""
    like = means.pattern(NUMEL)
    values = [sum(w * means.value_of(w) for w in some) / sum(some) for some in chunks]
    return torch.cat([like[i * CHUNK : (i + 1) * CHUNK] * value for i, value in enumerate(values)])


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_a_right_mean_passes_also_as_the_codec_rounds_it(codec: str) -> None:
    grid = Grid(NUMEL, CHUNK, codec)
    a, b, c = (means.weight_of(peer, 7) for peer in range(3))
    mean = mean_of([[a, b, c], [a, b], [a, b, c], [a, b]])
    for chunk in range(grid.n_chunks):
        part = mean[slice(*grid.span(chunk))]
        part.copy_(grid.coder.decode(grid.coder.encode(part), CHUNK))
    shares = [Share("a", a, 1.0), Share("b", b, 1.0), Share("c", c, 0.5)]
    assert means.wrong(mean, means.pattern(NUMEL), shares, grid) == ""


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ([("a", 0, 1.0), ("b", 1, 1.0)], "no mean of"),
        ([("a", 0, 1.0), ("b", 1, 1.0), ("c", 2, 0.25)], r"0\.2500 of c is said to be in it, and 0\.5000 is"),
        ([("a", 0, 1.0), ("b", 1, 1.0), ("c", 2, 1.0)], "chunk 1 is"),
        ([("a", 0, 1.0), ("b", 3, 1.0), ("c", 2, 0.5)], "no mean of"),
    ],
    ids=["one more", "more of it than told", "less than all", "another one"],
)
def test_what_the_report_does_not_say_is_found(shares: list[tuple[str, int, float]], said: str) -> None:
    grid = Grid(NUMEL, CHUNK, "fp32")
    a, b, c = (means.weight_of(peer, 7) for peer in range(3))
    mean = mean_of([[a, b, c], [a, b], [a, b, c], [a, b]])
    given = [Share(name, means.weight_of(peer, 7), fraction) for name, peer, fraction in shares]
    found = means.wrong(mean, means.pattern(NUMEL), given, grid)
    assert re.search(said, found), found


def test_a_chunk_of_two_means_is_found() -> None:
    a, b = means.weight_of(0, 7), means.weight_of(1, 7)
    like, right = means.pattern(NUMEL), mean_of([[a, b]] * 4)
    right[10] += 0.05 * like[10]
    shares = [Share("a", a, 1.0), Share("b", b, 1.0)]
    assert "not one mean" in means.wrong(right, like, shares, Grid(NUMEL, CHUNK, "fp16"))


@pytest.mark.parametrize("fault", ["", "bits", "wrong", "nothing"])
def test_a_run_fails_where_bits_differ_a_mean_is_wrong_or_there_was_none(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    run = benchmark_module("means").Run(SimpleNamespace(stuck=60.0), SimpleNamespace(take=list), None, "")
    told: dict[str, Any] = {"event": "round", "name": "a", "head": "h", "contributors": 2, "partly": 0, "ballots": 1}
    heard = [
        ("p0", told | {"bits": "x", "wrong": ""}),
        ("p1", told | {"bits": "y" if fault == "bits" else "x", "wrong": "chunk 0" if fault == "wrong" else ""}),
    ]
    run.workers = SimpleNamespace(take=lambda: [] if fault == "nothing" else heard)
    run.hear()
    assert run.verdict() == (1 if fault else 0)
    assert capsys.readouterr().out.splitlines()[-1] == ("wrong" if fault else "all means were right")


@pytest.mark.parametrize("event", ["round", "none", "joined"])
def test_only_a_round_shows_that_a_process_is_not_stuck(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that told every minute that it had no mean counted as one that goes on."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    told = {"event": event, "why": "RoundTimeout", "wrong": "", "address": "127.0.0.1:1"}
    workers = SimpleNamespace(take=lambda: [("p0", told)], said=lambda name: "")
    run = benchmark_module("means").Run(SimpleNamespace(stuck=60.0), workers, None, "")
    run.up["p0"] = -61.0  # of a clock that begins at 0
    run.hear()
    assert bool(run.wrong) == (event != "round")


def test_its_options_are_checked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = benchmark_module("means")
    for words, code in (("--n 2", 2), ("--sites 1", 2), ("--every 0", 2), ("--print-schedule", 0)):
        monkeypatch.setattr(sys, "argv", ["means.py", *words.split()])
        try:
            ended = benchmark.main()
        except SystemExit as stop:
            ended = stop.code
        assert ended == code, words
    assert " kill " in capsys.readouterr().out
