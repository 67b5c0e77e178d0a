"""Each of examples/ runs as a person would start it, and its two peers end with equal weights; so do those that are
started one by one, as on two machines.

`examples_runner` starts them, from a process that has imported what they need: the imports cost far more than they do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.swarm import free_addresses

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {
    "pytorch": (),
    "federated": (),
    "custom_strategy": (),
    "opendiloco": (),
    "hivemind_quickstart": (),
    "accelerate_loop": ("accelerate",),
    "lightning_trainer": ("lightning",),
    "transformers_trainer": ("accelerate",),
}
"""What each needs besides dlc."""
APART = {
    "pytorch": ("--found --listen {}", "--peers {} --listen {} "),
    "federated": ("--found --listen {}", "--peers {} --listen {} "),
    "hivemind_quickstart": ("--host {}", "--initial_peers {} --host {} "),
}
"""The words of the first and of the second peer where each is started by itself; {}: an address. The second one comes
when the first says that it waits, or has ended."""
DEADLINE_S = 900.0
"""For all of them: some seconds on an idle machine."""
LIMIT_S = 240
"""For one: who waits without end says where."""


def lacking(name: str) -> list[str]:
    return [extra for extra in EXAMPLES[name] if importlib.util.find_spec(extra) is None]


def starts_apart(name: str) -> list[list[str]]:
    addresses = free_addresses(2)
    if name.startswith("hivemind"):
        addresses = ["/ip4/{}/tcp/{}".format(*address.split(":")) for address in addresses]
    return [words.format(*addresses).split() for words in APART[name]]


Results = dict[str, list[int]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    """Exit statuses by example, and the folder of what they wrote."""
    folder = tmp_path_factory.mktemp("examples")
    names = [name for name in EXAMPLES if not lacking(name)]
    jobs: list[tuple[str, str, list[list[str]]]] = [(f"{folder}/{name}", name, [[]]) for name in names]
    jobs += [(f"{folder}/{name}-apart", name, starts_apart(name)) for name in APART]
    log = folder / "runner.log"
    runner = Forked("tests.examples_runner", [str(LIMIT_S), json.dumps(jobs)], log, os.environ, daemon=False)
    try:
        assert runner.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        runner.kill()
    rows = map(str.split, runner.stdout.read().decode().splitlines())
    return {Path(log).name: [int(status) for status in statuses] for log, *statuses in rows}, folder


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - {"_peers"} == EXAMPLES.keys()


def check(name: str, results: tuple[Results, Path]) -> None:
    statuses, folder = results
    text = (folder / name).read_text("utf-8", "replace")
    assert not any(statuses[name]), text
    ends = re.findall(r"peer (\w{8}) ends with ([0-9a-f]{16})", text)  # both write there: lines may run together
    assert len({peer for peer, _ in ends}) == 2 and len({digest for _, digest in ends}) == 1, text


forks = pytest.mark.skipif(sys.platform != "linux", reason="the runner forks after torch was imported")


@forks
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_two_peers_of_an_example_end_with_equal_weights(name: str, results: tuple[Results, Path]) -> None:
    if missing := lacking(name):
        pytest.skip(f"needs {', '.join(missing)}, which is not installed")
    check(name, results)


@forks
@pytest.mark.parametrize("name", APART)
def test_peers_that_are_started_one_by_one_train_together(name: str, results: tuple[Results, Path]) -> None:
    check(f"{name}-apart", results)
