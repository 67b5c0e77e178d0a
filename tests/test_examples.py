"""Each of examples/ runs as a person would start it, and its two peers end with equal weights; so do those that are
started one by one, as on two machines.

One interpreter imports what they need, and forks for each of them: the imports cost far more than the examples.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
RUNNER = f"""\
LIMIT_S = {LIMIT_S}
import json, os, runpy, signal, sys, traceback
sys.path.insert(0, "examples")
import torch, dlc.train.diloco, dlc.peer, dlc.compat.hivemind.peer_swarm
from tests.helpers import wait_until
from tests.swarm import PATIENT
join = dlc.Peer.join.__func__
dlc.Peer.join = classmethod(lambda peer, *words, **options: join(peer, *words, timeouts=PATIENT, **options))
for name in sys.argv[1:]:
    __import__(name)
for log, name, starts in json.load(sys.stdin):
    children = []
    def waits():
        over = os.waitid(os.P_PID, children[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return over or os.path.exists(log) and "training begins when" in open(log).read()
    for words in starts:
        if children:
            wait_until(waits, LIMIT_S + 60)
        child = os.fork()
        if not child:
            status = 1
            try:
                file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(file, 1), os.dup2(file, 2)
                signal.signal(signal.SIGALRM, signal.default_int_handler), signal.alarm(LIMIT_S)
                sys.argv = [name, *words]
                runpy.run_path("examples/" + name + ".py", run_name="__main__")
                status = 0
            except SystemExit as end:
                print(end)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        children.append(child)
    print(log, *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
"""
MODULES = {"accelerate": ["transformers.trainer"], "lightning": ["lightning.pytorch"]}


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
    extras = {extra for name in names for extra in EXAMPLES[name]}
    jobs: list[tuple[str, str, list[list[str]]]] = [(f"{folder}/{name}", name, [[]]) for name in names]
    jobs += [(f"{folder}/{name}-apart", name, starts_apart(name)) for name in APART]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *(module for extra in sorted(extras) for module in MODULES[extra])],
        input=json.dumps(jobs),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    rows = map(str.split, done.stdout.splitlines())
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
