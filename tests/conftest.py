"""One thread and own ports per test process, no network, a reason for every skip, and tests that measure alone on the
machine."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import ports

if sys.platform != "win32":
    from tests.turns import Turns

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers or datasets is imported: a test never downloads
# Processes that tests start have this source, whatever is installed, and one thread each.
_ROOT = Path(__file__).resolve().parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(_ROOT / "src"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Where the sockets of tests/forked.py lie: not in the folder of a test that has one of its own. Here and not there: the
# server imports that, too, and would leave a folder behind.
multiprocessing.util.get_temp_dir()
# Time is not what these tests are about, and a busy runner has little of it.
hypothesis.settings.register_profile(
    "dlc", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("dlc")
# A runner in the background of a shell starts with Ctrl-C ignored, and would hand that on to every process under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(f"no CUDA device is visible to torch {torch.__version__}")


SIMULATED = "simulated"
"""Name of the property of a test that tells of the fresh seeds it simulated: the summary tells it on success too."""
TURNS = pytest.StashKey["Turns"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seconds", type=float, default=90.0, help="time for fresh seeds of the simulator")
    parser.addoption("--fuzz-seconds", type=float, default=60.0, help="time for hostile frames")


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)  # of pytest-xdist, where several processes run tests
    ports.take(*((int(worker["workerid"][2:]), worker["workercount"]) if worker is not None else (0, 1)))
    if worker is not None and sys.platform != "win32":
        config.stash[TURNS] = Turns(Path(config.option.basetemp).parent / "turns")  # the run's, which pytest clears


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run alone come first: later each would wait until a long test of another process is over."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    turns = item.config.stash.get(TURNS, None)
    if turns is None:
        return (yield)
    with turns.taken(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, line in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
                if name == SIMULATED:
                    terminalreporter.write_line(line)
