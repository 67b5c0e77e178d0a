"""Several real processes that are stopped and resume: all of them at once, and one while the others go on.

Over `dlc.DiLoCo`, OpenDiLoCo's optimizer, `transformers.Trainer` and Lightning, each as a user's program has it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dlc.comm.timeouts import Timeouts
from tests.forked import AVAILABLE
from tests.resuming import EXTRAS, KINDS, STEPS, H, Plan, Run, runs
from tests.swarm import free_addresses

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no forkserver")


def need(kind: str) -> None:
    if kind in EXTRAS and importlib.util.find_spec(EXTRAS[kind]) is None:
        pytest.skip(f"needs pip install 'dlc[{EXTRAS[kind]}]'")


def plans(kind: str, folder: Path, n: int, **options: Any) -> list[Plan]:
    at = free_addresses(n)
    return [
        Plan(kind, i, folder / str(i), listen, peers=(at[0],) if i else (), **options) for i, listen in enumerate(at)
    ]


def together(start: Any, planned: list[Plan]) -> list[Run]:
    """All are members before one begins to train."""
    started = [start(plan) for plan in planned]
    for run in started:
        run.wait("joined")
    for run in started:
        run.say("go")
    return started


@pytest.mark.parametrize("kind", KINDS)
def test_a_swarm_that_was_stopped_between_two_rounds_goes_on_as_if_it_had_not(kind: str, tmp_path: Path) -> None:
    """Both peers save in the middle of a phase and train on. Begun again from there they end with the same bits."""
    need(kind)
    if kind == "transformers" and version("transformers").startswith("4."):
        pytest.skip("this Trainer reads other batches once it has resumed in the middle of an epoch")
    planned = plans(kind, tmp_path, 2)
    ends = []
    for resumes in (False, True):
        with runs() as start:
            both = together(start, [dataclasses.replace(plan, resumes=resumes) for plan in planned])
            ends.append([run.ends() for run in both])
            assert all(peers == 2 for run in both for peers, _ in run.rounds().values())
    for end in (end for pair in ends for end in pair):
        assert end == ends[0][0] and end[1] == STEPS // H


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_was_killed_resumes_while_the_others_go_on(kind: str, tmp_path: Path) -> None:
    """It takes the swarm's state, whatever its checkpoint holds, and its work counts again."""
    need(kind)
    planned = plans(kind, tmp_path, 3, told_to_stop=True, timeouts=Timeouts())  # which find it dead soon
    planned[2] = dataclasses.replace(planned[2], holds_once_saved=True)
    with runs() as start:
        first, second, killed = together(start, planned)
        killed.wait("saved")
        killed.process.kill()
        before = first.wait("round")[1]
        t = first.wait("round", where=lambda word: word[1] >= before + 3)[1]
        again = start(dataclasses.replace(planned[2], resumes=True, holds_once_saved=False))
        again.wait("joined")
        again.say("go")
        assert again.wait("round")[1] > t
        again.wait("round", where=lambda word: word[2] == 3)
        everybody = (first, second, again)
        for run in everybody:
            run.say("stop")
        for run in everybody:
            run.ends()
        seen = [run.rounds() for run in everybody]
        for t in set.union(*map(set, seen)):
            assert len({rounds[t][1] for rounds in seen if t in rounds}) == 1, f"they differ after round {t}"
