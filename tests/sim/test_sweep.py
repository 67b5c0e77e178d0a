"""Sweeps that are stopped and go on, scenarios as files, and the shortening of what fails."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlc.comm import entries as entries_module
from dlc.comm.ids import Voter
from dlc.sim import __main__ as command
from dlc.sim import sweep as sweep_module
from dlc.sim.files import from_plain, load, save_json, to_plain
from dlc.sim.run import RAISED, Outcome, run
from dlc.sim.schedule import FAULTS, FIRST_KINDS, SMALL_PEERS, Fault, Scenario, Start, scenario
from dlc.sim.shrink import CALM, shrink
from dlc.sim.sweep import Job, StateFile, Tally
from tests.helpers import wait_until


def outcome(seed: int, violation: str = "", ended_at_s: float = 100.0) -> Outcome:
    return Outcome(seed, violation, 5, {"crash": 1}, 0, 1000, ended_at_s, 10.0)


# -------------------------------------------------------------------- scenarios


def test_a_scenario_survives_its_file(tmp_path: Path) -> None:
    for seed in range(50):
        plan = scenario(seed, 2, 16, FAULTS)
        save_json(tmp_path / "plan.json", to_plain(plan))
        assert load(tmp_path / "plan.json") == plan


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(TypeError):
        from_plain({**to_plain(scenario(1, 2, 3, FAULTS)), "unheard_of": 1})


def test_kinds_added_later_leave_the_schedule_of_a_seed_alone() -> None:
    for seed in range(50):
        old, new = scenario(seed, 2, 8, FIRST_KINDS), scenario(seed, 2, 8, FAULTS)
        assert [s.at_s for s in old.starts] == [s.at_s for s in new.starts]
        assert [f for f in new.faults if f.kind in FIRST_KINDS] == list(old.faults)
        assert dataclasses.replace(old, drift=new.drift, channels=new.channels).weather == new.weather


def test_small_swarms_are_frequent_where_great_ones_are_allowed() -> None:
    sizes = [len(scenario(seed, 2, 16, ()).starts) for seed in range(400)]
    assert 0.7 < sum(n <= SMALL_PEERS for n in sizes) / len(sizes) < 0.9
    assert {2, 8, 9, 16} <= set(sizes)


def test_every_kind_comes_up() -> None:
    plans = [scenario(seed, 2, 8, FAULTS) for seed in range(200)]
    kinds = {fault.kind for plan in plans for fault in plan.faults}
    habits = {"eager", "probes", "filling", "patient", "misfits", "turns", "orphans"}
    assert kinds | {"loss", "drift", "roles", "channels", "images"} | habits == set(FAULTS)
    assert all({getattr(plan, habit) for plan in plans} == {True, False} for habit in habits)
    assert {s.role for plan in plans for s in plan.starts} == {"trainer", "helper", "observer"}
    assert len({plan.channels for plan in plans}) == 4
    assert len({plan.piece_bytes for plan in plans}) == len({plan.drift for plan in plans}) == 2


# -------------------------------------------------------------------- shrinking


def test_shrinking_leaves_what_is_needed() -> None:
    """Broken by a leave, where there are at least two peers: all else goes."""

    def play(plan: Scenario) -> Outcome:
        broken = len(plan.starts) >= 2 and any(f.kind == "leave" and f.for_s == 0 for f in plan.faults)
        return outcome(plan.seed, "S2: a fork" if broken else "")

    plan = next(p for p in (scenario(seed, 5, 8, FAULTS) for seed in range(99)) if play(p).violation and p.drift)
    short, its_outcome = shrink(plan, play(plan), 60.0, play)
    assert its_outcome.broken == "S2"
    assert [f.kind for f in short.faults] == ["leave"]
    assert len(short.starts) == 2 and {s.role for s in short.starts} == {"trainer"}
    assert short.weather == CALM and short.drift == 0 and short.channels == ("train",) and short.n_chunks == 1


def test_shrinking_keeps_to_the_same_invariant() -> None:
    """Without the freeze another invariant breaks: that is another failure."""

    def play(plan: Scenario) -> Outcome:
        return outcome(plan.seed, "S2: x" if any(f.kind == "freeze" for f in plan.faults) else "L1: y")

    starts = (Start(0.0, ()), Start(1.0, (0,)))
    plan = Scenario(1, starts, (Fault(5.0, "crash"), Fault(10.0, "freeze", for_s=8.0)))
    short, _ = shrink(plan, play(plan), 60.0, play)
    assert [(f.kind, f.for_s) for f in short.faults] == [("freeze", 0.5)]


def test_shrinking_ends_with_its_time() -> None:
    plan = scenario(3, 5, 8, FAULTS)
    broken = outcome(3, "S2: x")
    assert shrink(plan, broken, 0.0, lambda p: broken) == (plan, broken)


def test_the_name_of_what_broke() -> None:
    assert outcome(1).broken == ""
    assert outcome(1, "S2: both sides of the fork").broken == "S2"
    assert outcome(1, "I4 chunk 0 of round 3 is off").broken == "I4"
    assert outcome(1, f"{RAISED} (at 3 s): Traceback\n  File x\nValueError: no\n").broken == "ValueError"


# -------------------------------------------------------------------- going on


def test_a_tally_knows_what_is_left() -> None:
    tally = Tally("code", 10)
    for seed in (12, 10, 14):
        tally.add(outcome(seed, "I1: x" if seed == 14 else ""))
    assert (tally.next, tally.ahead, list(tally.left(16))) == (11, [12, 14], [11, 13, 15])
    again = Tally.from_plain(json.loads(json.dumps(tally.to_plain())))
    assert again == tally and again.violations == {14: "I1: x"}


def test_a_sweep_goes_on_unless_the_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, path = Job((2, 8), ("crash", "freeze"), 0), tmp_path / "state.json"
    state = StateFile(path)
    tally, word = state.load(job)
    assert not word and list(tally.left(3)) == [0, 1, 2]
    tally.add(outcome(0))
    state.save(job, tally, now=True)
    tally, word = StateFile(path).load(Job((2, 8), ("freeze", "crash"), 0))
    assert "going on at seed 1" in word and list(tally.left(3)) == [1, 2]
    assert StateFile(path).load(Job((2, 9), ("freeze", "crash"), 0))[1] == ""
    monkeypatch.setattr(sweep_module, "code_version", lambda: "another")
    tally, word = StateFile(path).load(job)
    assert "the code has changed" in word and list(tally.left(3)) == [0, 1, 2]


def test_the_version_is_of_all_that_a_schedule_runs_and_of_nothing_else() -> None:
    listing = f"import sys, {sweep_module.ENTRY}; print(*(m for m in sys.modules if m.split('.')[0] == 'dlc'))"
    loaded = set(subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True).stdout.split())
    named = sweep_module._imported(sweep_module.ENTRY).keys()
    assert loaded - {"dlc", "dlc.comm", "dlc.sim"} == named
    assert {"dlc.sim.schedule", "dlc.comm.exchange", "dlc.errors"} <= named
    assert not {"dlc.sim.sweep", "dlc.comm.transport", "dlc.peer"} & named


def sim(*args: str) -> list[str]:
    return [sys.executable, "-m", "dlc.sim", "--faults", "none", "--peers", "2", "--json", *args]


def test_the_command_runs_in_several_processes_and_goes_on(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    first = subprocess.run(sim("--seeds", "0:3", "--jobs", "2", "--state", state), capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    *schedules, summary = [json.loads(line) for line in first.stdout.splitlines()]
    assert {s["seed"] for s in schedules} == {0, 1, 2} and summary["schedules"] == 3
    again = subprocess.run(sim("--seeds", "0:4", "--jobs", "1", "--state", state), capture_output=True, text=True)
    assert "going on at seed 3" in again.stderr
    assert [json.loads(line).get("seed") for line in again.stdout.splitlines()] == [3, None]


def test_an_interrupt_leaves_a_state_to_go_on_from(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    process = subprocess.Popen(
        sim("--seeds", "0:100000", "--jobs", "2", "--state", str(state)), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=180)
    assert process.returncode == command.INTERRUPTED
    (tally,) = json.loads(state.read_text()).values()
    assert tally["schedules"] >= 1


def test_interrupts_that_come_again_and_again_end_a_sweep_once_and_in_order(tmp_path: Path) -> None:
    """The second one cut short what told the workers of the end, and the sweep waited for them for ever. None of them
    had heard of it: the signals went to the process that collects, alone."""
    state = tmp_path / "state.json"
    process = subprocess.Popen(
        sim("--seeds", "0:100000", "--jobs", "2", "--state", str(state)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()

    def ended() -> bool:
        process.send_signal(signal.SIGINT)
        return process.poll() is not None

    try:
        wait_until(ended, what="the end of the sweep")
    finally:
        process.kill()
    out, err = process.communicate(timeout=180)  # the workers have gone, too: they hold the other ends of the pipes
    assert process.returncode == command.INTERRUPTED, err
    assert "Traceback" not in err and "violations" in out
    (tally,) = json.loads(state.read_text()).values()
    assert tally["schedules"] >= 1


@pytest.mark.parametrize("at", ["wait", "submit"])
def test_an_interrupt_beside_workers_is_raised_where_no_lock_of_theirs_is_held(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was raised in `concurrent.futures`, where it may leave one held: the thread that hears of the workers waited
    for that for ever, and the sweep for the thread."""
    owner: Any = sweep_module if at == "wait" else ProcessPoolExecutor
    call, ended = getattr(owner, at), list[str]()

    def during(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        ended.append(at)
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, at, during)
    state = tmp_path / "state.json"
    monkeypatch.setattr(sys, "argv", ["dlc.sim", *sim("--seeds", "0:100000", "--jobs", "2", "--state", str(state))[3:]])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert command.main() == command.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended and state.exists()


def test_the_workers_of_a_killed_sweep_end_with_it() -> None:
    process = subprocess.Popen(sim("--seeds", "0:100000", "--jobs", "2"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.kill()
    process.communicate(timeout=180)  # ends when nobody holds the other end of the pipe any more


def test_a_failure_is_shortened_and_replayed_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mutant(present: Iterable[Voter], electorate: Sequence[Voter], rank0: Voter | None) -> bool:
        return bool(electorate) and 2 * len(set(present) & set(electorate)) >= len(electorate)

    monkeypatch.setattr(entries_module, "is_quorum", mutant)
    monkeypatch.setattr(command, "SHRINK_S", 5.0)
    state = tmp_path / "state.json"
    args = ["dlc.sim", "--peers", "2", "--seeds", "0:50", "--faults", "partition", "--jobs", "1", "--state", str(state)]
    monkeypatch.setattr(sys, "argv", args)
    assert command.main() == 1
    (path,) = tmp_path.glob("seed-*.json")
    told = capsys.readouterr().out
    assert "VIOLATION" in told and f"--scenario {path}" in told
    monkeypatch.setattr(sys, "argv", ["dlc.sim", "--scenario", str(path), "--transcript"])
    assert command.main() == 1
    again = capsys.readouterr().out
    assert run(load(path)).violation in again and "is told" in again
