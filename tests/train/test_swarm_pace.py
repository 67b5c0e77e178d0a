"""Trainers of unequal speed over peers, on a virtual clock: who is late is left out, goes on, and is counted all the
same."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlc.train.phases
from dlc.comm.events import Waiting
from dlc.comm.filling import Filling
from dlc.comm.timeouts import Timeouts
from dlc.errors import DlcError
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from tests.train.test_trainer import LLAMA
from tests.train.virtual import Player, Troupe

H = 10
STEP_S = (1.0, 1.0, 1.0, 1.625)
"""Seconds of an inner step, for each peer: three that wait would lose more than the slow one brings."""
TIMEOUTS = Timeouts(straggler_floor_s=0.5)
"""What is waited beyond that has to pay."""
ROUNDS = 8


@pytest.fixture
def troupe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Troupe]:
    with Troupe(monkeypatch) as troupe:
        yield troupe


def spec_of(folder: Path, rounds: int, lease_blocks: int = 0) -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    return RunSpec(
        rounds=rounds,
        sync_every=H,
        chunk_elems=1024,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16, lease_blocks=lease_blocks),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )


def regularly(counted: list[bool]) -> bool:
    """Left out of some rounds, never of two in a row, and not of most."""
    twice = any(not any(counted[i : i + 2]) for i in range(len(counted) - 1))
    return not all(counted) and not twice and counted.count(False) <= 0.6 * len(counted)


def test_a_slower_peer_is_counted_regularly_with_all_its_work(tmp_path: Path, troupe: Troupe) -> None:
    spec = spec_of(tmp_path, ROUNDS)
    for i, step_s in enumerate(STEP_S):
        Player(troupe, spec, tmp_path / str(i), lambda step, step_s=step_s: step_s, TIMEOUTS).goes()
    summaries, players = troupe.end(), troupe.players
    assert {s.reason for s in summaries} == {"rounds"}
    assert len({(s.t, s.digest) for s in summaries}) == 1

    slow = players[-1]
    rounds = {event["t"]: event for player in players for event in player.all("round")}
    everybody = [t for t, event in rounds.items() if len(event["contributors"]) + len(event["missing"]) == len(STEP_S)]
    counted = [any(c["peer"] == slow.peer.id for c in rounds[t]["contributors"]) for t in sorted(everybody)]
    assert len(everybody) == len(rounds) == ROUNDS
    assert regularly(counted), f"counted too seldom, or waited for every time: {counted}"

    # All that anybody trained is counted, but for what was in hand at the end of the run.
    tokens: Counter[str] = Counter()
    for event in rounds.values():
        tokens.update({c["peer"]: c["weight"] for c in event["contributors"]})
    for player, summary in zip(players, summaries, strict=True):
        assert len(player.all("step")) * 32 == tokens[player.peer.id] + summary.setbacks.tokens_dropped
    assert sum(tokens.values()) == summaries[0].tokens


def test_without_a_quorum_inner_steps_go_on_and_all_of_them_count(tmp_path: Path, troupe: Troupe) -> None:
    """Two of three die at once: the third may only go on without them after T_evict, and works until then."""
    spec = spec_of(tmp_path, rounds=1000, lease_blocks=20_000)
    told: list[tuple[float, float]] = []
    """What the one that is left says is left of T_evict, and T_evict as it has it just then."""
    for i in range(3):
        Player(troupe, spec, tmp_path / str(i), lambda step: 0.5).goes()
    left, *dead = troupe.players
    hear = left.peer._on_event
    assert hear is not None

    def noted(event: object) -> None:
        if isinstance(event, Waiting) and event.reason == "no quorum" and event.left_s is not None:
            told.append((event.left_s, left.peer._node.members.t_evict_s))  # type: ignore[union-attr]
        hear(event)

    left.peer._on_event = noted
    troupe.until(lambda: any(len(e["contributors"]) == 3 for e in left.all("round")), what="all take part")
    for player in dead:
        player.peer._driver.stop(0.0)  # nothing is announced
    died = len(left.events)

    def missed() -> int:
        """Which of its events says first that there is no quorum; 0: none does yet."""
        after = enumerate(left.events[died:], died)
        return next((i for i, e in after if (e["event"], e.get("reason")) == ("waiting", "no quorum")), 0)

    troupe.until(missed, what="the quorum is missed")
    earlier = left.events[: missed()]
    at = max(event["t"] for event in earlier if event["event"] == "round")
    steps = sum(event["event"] == "step" for event in earlier)
    troupe.until(lambda: left.all("round")[-1]["t"] >= at + 3, what="it goes on alone")
    left.stop.set()
    ends = [player.goes_on.done for player in troupe.players]
    troupe.until(lambda: all(end.done() for end in ends), what="all end")
    summary = ends[0].result()
    for end in ends[1:]:
        with pytest.raises(DlcError):
            end.result()
    # In steps of 5 s.
    assert told and all(left_s <= given_s and left_s % 5.0 == 0.0 for left_s, given_s in told)
    later = [event for event in left.all("round") if event["t"] > at]
    ahead = max(event["weight"] for event in later) / (2 * 16)
    assert ahead > 3 * H, f"no more than {ahead} steps were made while there was no quorum"
    assert steps + ahead <= len(left.all("step")) + H
    counted = sum(c["weight"] for e in left.all("round") for c in e["contributors"] if c["peer"] == left.peer.id)
    assert len(left.all("step")) * 2 * 16 == counted + summary.setbacks.tokens_dropped


def test_rounds_of_steps_that_take_their_time_are_agreed_upon_before_these_end(
    tmp_path: Path, troupe: Troupe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All offers of all peers are whole, and none is made twice."""
    spec = dataclasses.replace(spec_of(tmp_path, rounds=8), sync_every=3)
    planned: list[bool] = []
    reached = Filling.reached

    def noted(filling: Filling, start: int) -> None:
        nodes = [player.peer._node for player in troupe.players]
        mine = next(node for node in nodes for o in list(node.exchange.offered.values()) if o.filling is filling)
        planned.append(mine.slot.plan is not None)
        reached(filling, start)

    monkeypatch.setattr(Filling, "reached", noted)
    for i in range(3):
        Player(troupe, spec, tmp_path / str(i), lambda step: 0.3).goes()
    summaries, players = troupe.end(), troupe.players
    assert {s.reason for s in summaries} == {"rounds"} and len({(s.t, s.digest) for s in summaries}) == 1
    rounds = {event["t"]: event for player in players for event in player.all("round")}
    tokens: Counter[str] = Counter()
    for event in rounds.values():
        assert all(c["fraction"] == 1.0 for c in event["contributors"])
        tokens.update({c["peer"]: c["weight"] for c in event["contributors"]})
    for player, summary in zip(players, summaries, strict=True):
        assert len(player.all("step")) * 32 == tokens[player.peer.id] + summary.setbacks.tokens_dropped
    assert all(planned), f"the last steps of contributors ended before their rounds were planned: {planned}"
    assert len(planned) == 3 * (spec.rounds - 1), "each of all rounds but the first, before which no step is known"


def test_a_last_step_that_takes_much_longer_than_the_others_costs_a_lone_trainer_no_round(
    tmp_path: Path, troupe: Troupe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nobody to go on without it: its round would be one with nobody in it, and the run a round shorter."""
    monkeypatch.setattr(dlc.train.phases, "EXPECTED_S_MIN", 0.1)  # others would not wait for as long as it takes
    monkeypatch.setattr(dlc.train.phases, "OVERRUN_STEPS", 0.5)
    spec = dataclasses.replace(spec_of(tmp_path, rounds=2), sync_every=3)
    alone = Player(troupe, spec, tmp_path / "alone", lambda step: 8.0 if step == 5 else 0.25)
    alone.goes()
    (summary,) = troupe.end()
    assert [event["counted"] for event in alone.all("round")] == [True, True]
    assert (summary.t, summary.tokens) == (2, 2 * spec.tokens_per_round)
    assert not summary.setbacks.tokens_dropped
