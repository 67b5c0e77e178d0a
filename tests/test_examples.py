"""Each of examples/ runs as a person would start it, and its two peers end with equal weights.

One interpreter imports what they need, and forks for each of them: the imports cost far more than the examples.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
DEADLINE_S = 900.0
"""For all of them: some seconds on an idle machine."""
RUNNER = """\
import os, runpy, sys, traceback
sys.path.insert(0, "examples")
import torch, dlc.train.diloco, dlc.peer, dlc.compat.hivemind.peer_swarm
from tests.swarm import PATIENT
join = dlc.Peer.join.__func__
dlc.Peer.join = classmethod(lambda peer, *words, **options: join(peer, *words, timeouts=PATIENT, **options))
for name in sys.argv[1:]:
    __import__(name)
for folder_and_name in sys.stdin.read().split():
    out, _, name = folder_and_name.rpartition("/")
    child = os.fork()
    if not child:
        status = 1
        try:
            file = os.open(out + "/" + name + ".log", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.argv = [name]
            runpy.run_path("examples/" + name + ".py", run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
MODULES = {"accelerate": ["transformers.trainer"], "lightning": ["lightning.pytorch"]}


def lacking(name: str) -> list[str]:
    return [extra for extra in EXAMPLES[name] if importlib.util.find_spec(extra) is None]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], Path]:
    """Exit status by example, and the folder of what they wrote."""
    folder = tmp_path_factory.mktemp("examples")
    names = [name for name in EXAMPLES if not lacking(name)]
    extras = {extra for name in names for extra in EXAMPLES[name]}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *(module for extra in sorted(extras) for module in MODULES[extra])],
        input="\n".join(f"{folder}/{name}" for name in names),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(status) for name, status in map(str.split, done.stdout.splitlines())}, folder


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - {"_peers"} == EXAMPLES.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="the runner forks after torch was imported")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_two_peers_of_an_example_end_with_equal_weights(name: str, results: tuple[dict[str, int], Path]) -> None:
    if missing := lacking(name):
        pytest.skip(f"needs {', '.join(missing)}, which is not installed")
    status, folder = results
    text = (folder / f"{name}.log").read_text("utf-8", "replace")
    assert status[name] == 0, text
    ends = re.findall(r"peer (\w{8}) ends with ([0-9a-f]{16})", text)  # both write there: lines may run together
    assert len({peer for peer, _ in ends}) == 2 and len({digest for _, digest in ends}) == 1, text
