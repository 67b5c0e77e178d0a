"""Averaging without rounds: the algebra of NoLoCo, and trainers over real peers on loopback."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import shutil
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import dlc.train.trainer
from dlc import handover
from dlc import mesh as mesh_module
from dlc.cli.sinks import sentence
from dlc.cli.trackers import point
from dlc.comm import meshmessages
from dlc.comm.calls import GoneOn
from dlc.comm.clock import clock
from dlc.comm.graphs import pairs
from dlc.comm.groupowner import RESULT
from dlc.comm.ids import Voter
from dlc.comm.mesh import Mesh
from dlc.comm.roles import TRAINER
from dlc.comm.rotation import Place, Seen
from dlc.comm.wire import pack
from dlc.errors import DlcError, JoinError, RoundTimeout, SwarmClosed
from dlc.handover import Handover, Notice, Standing
from dlc.moshpit import _Met
from dlc.peer import Peer
from dlc.report import GossipReport, GroupReport
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec, TimeoutsSpec
from dlc.sim.meshnet import MeshNet
from dlc.statedir import StateDir
from dlc.strategyspec import GossipSpec, MoshpitSpec
from dlc.train import averaging, gifts, noloco, saves
from dlc.train import grids as grids_module
from dlc.train.averaging import Averaged
from dlc.train.grids import Grids
from dlc.train.inner import InnerLoop
from dlc.train.noloco import Pairs, noloco_step
from dlc.train.saves import Local
from tests.comm.netpeer import NetPeer
from tests.helpers import wait_until
from tests.swarm import Host, free_addresses, late_for_its_partner, swarm
from tests.train.school import DEADLINE_S, Pupil, School
from tests.train.test_trainer import DROPPING, LLAMA

Event = dict[str, Any]


def spec_in(folder: Path, **options: Any) -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    usual: dict[str, Any] = {"rounds": 8, "sync_every": 3, "codec": "fp32", "strategy": "gossip"}
    usual["gossip"] = GossipSpec(wait_s=10.0)
    inner, data = InnerSpec(batch_size=2, warmup_steps=3), DataSpec(source=str(text), seq_len=16)
    usual |= {"data": data, "inner": inner, "model": ModelSpec(config=LLAMA)}
    return RunSpec(**{**usual, **options})


@pytest.fixture
def school() -> Any:
    with School() as school:
        yield school


# ------------------------------------------------------------------ NoLoCo


def test_a_pair_of_equals_takes_the_step_of_sgd_with_momentum() -> None:
    torch.manual_seed(0)
    theta, d = torch.randn(50), torch.randn(50)
    phi, m = theta.clone(), torch.zeros(50)
    reference = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([reference], lr=1.0, momentum=0.5)
    for _ in range(4):
        reference.grad = -0.7 * d
        sgd.step()
        noloco_step(phi, m, d, d, phi.clone(), lr=0.7, mu=0.5, pull=0.6)
    assert torch.allclose(phi, reference.detach(), atol=1e-5)


@pytest.mark.parametrize("n", [4, 8])
def test_pairs_that_learn_nothing_new_come_together(n: int) -> None:
    phi, m = torch.randn(n, 20, generator=torch.Generator().manual_seed(2)), torch.zeros(n, 20)
    mean = phi.mean(0)
    before = (phi - mean).norm()
    for t in range(60):
        partners = pairs(n, t)
        means = [(phi[i] + phi[partners[i]]) / 2 for i in range(n)]
        for i in range(n):
            nothing = torch.zeros(20)
            noloco_step(phi[i], m[i], nothing, nothing, means[i].clone(), lr=0.7, mu=0.5, pull=0.6)
    assert torch.allclose(phi.mean(0), mean, atol=1e-4) and (phi - phi.mean(0)).norm() < 0.05 * before


# ------------------------------------------------------------------ the trainer


PLAIN = {"gossip": GossipSpec(wait_s=10.0)}
NOLOCO = {"gossip": GossipSpec("random-pairs", "noloco", wait_s=10.0)}
MOSHPIT = {"strategy": "moshpit", "gossip": GossipSpec(), "moshpit": MoshpitSpec(group_size=2, wait_s=10.0)}


@pytest.mark.parametrize("options", [PLAIN, MOSHPIT], ids=["gossip", "moshpit"])
def test_alone_it_is_the_inner_loop(tmp_path: Path, school: School, options: dict[str, Any]) -> None:
    spec = spec_in(tmp_path, **options)
    pupil = school.add(Pupil(spec, tmp_path / "0"))
    school.start(pupil)
    (summary,) = school.summaries()
    assert (summary.reason, summary.t) == ("rounds", 8) and summary.tokens == 8 * spec.tokens_per_round
    assert [e["step"] for e in pupil.all("step")] == list(range(8 * 3))
    assert [(e["t"], e["partners"], e["distance"]) for e in pupil.all("averaging")] == [
        (t, [], 0.0) for t in range(1, 9)
    ]
    losses = [event["loss"] for event in pupil.all("step")]
    means = [statistics.mean(losses[3 * i : 3 * i + 3]) for i in range(8)]
    assert [event["loss"] for event in pupil.all("averaging")] == pytest.approx(means)
    last_exchange = pupil.all("averaging")[-1]
    assert sentence(last_exchange).startswith("round 8: with nobody; distance 0; ")
    shown = point(last_exchange)
    assert shown is not None and (shown.at, shown.values["round/peers"]) == (8, 1)
    first, last = (event["loss"] for event in pupil.all("validation"))
    assert last < first


@pytest.mark.parametrize("kind", ["average", "noloco", "moshpit"])
def test_who_is_to_stop_waits_for_nobody(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first Ctrl-C was heard when `wait_s` was over."""
    wait_s, update = 10 * DEADLINE_S, "noloco" if kind == "noloco" else "average"
    moshpit: dict[str, Any] = {"strategy": "moshpit", "gossip": GossipSpec(), "moshpit": MoshpitSpec(2, wait_s=wait_s)}
    spec = spec_in(
        tmp_path, **(moshpit if kind == "moshpit" else {"gossip": GossipSpec("random-pairs", update, wait_s=wait_s)})
    )
    one = school.add(Pupil(spec, tmp_path / "0"))
    two = school.add(Pupil(spec, tmp_path / "1", one.peer.address))
    school.acquainted()
    trains, waits, go_on = threading.Event(), threading.Event(), threading.Event()

    def busy(event: Event) -> None:
        if event["event"] == "step":
            trains.set()
            go_on.wait(DEADLINE_S)

    two.on_event = busy
    one.on_event = lambda event: waits.set() if event.get("phase") == "waiting" else None
    monkeypatch.setattr(averaging, "LOOK_S", 0.0)
    slow = school.start(two)
    assert trains.wait(DEADLINE_S)
    monkeypatch.setattr(averaging, "LOOK_S", DEADLINE_S)  # it hears of the other
    stopped = school.start(one)
    try:
        assert waits.wait(DEADLINE_S)
        one.stop.set()
        wait_until(stopped.done, DEADLINE_S, "it ends without the other")
    finally:
        two.stop.set()
        go_on.set()
        one.peer.leave()
    summary = stopped.result()
    assert (summary.reason, summary.t, summary.saved) == ("interrupted", 1, True)
    assert [event["partners"] for event in one.all("averaging")] == [[]]
    slow.result(DEADLINE_S)


@pytest.mark.parametrize("options", [PLAIN, NOLOCO, MOSHPIT], ids=["average", "noloco", "moshpit"])
def test_two_peers_learn_from_each_other(tmp_path: Path, school: School, options: dict[str, Any]) -> None:
    spec = spec_in(tmp_path, **options)
    one = school.add(Pupil(spec, tmp_path / "0"))
    two = school.add(Pupil(spec, tmp_path / "1", one.peer.address))
    school.acquainted()
    both = threading.Barrier(2)

    def together(event: Event) -> None:
        """Neither is through with its eight exchanges before the other begins."""
        if event["event"] == "step" and event["step"] == 0:
            both.wait(DEADLINE_S)

    for pupil in (one, two):
        pupil.on_event = together
        school.start(pupil)
    summaries = school.summaries()
    assert {s.reason for s in summaries} == {"rounds"}
    for pupil, other in ((one, two), (two, one)):
        told = pupil.all("averaging")
        assert any(event["partners"] == [other.peer.id] for event in told), "they never met"
        met = {event["t"] for event in told if event["partners"]} & {
            event["t"] for event in other.all("averaging") if event["partners"]
        }
        apart = [event["distance"] for event in told if {event["t"] - i for i in range(3)} <= met]
        assert max(apart, default=0.0) < 0.2, "where they meet; a phase alone moves a model by up to 0.4"
    assert (one.model() - two.model()).norm() < 0.2 * one.model().norm()


def test_fewer_peers_than_the_grid_needs_train_alone_and_say_so(
    tmp_path: Path, school: School, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_in(tmp_path, strategy="moshpit", gossip=GossipSpec(), moshpit=MoshpitSpec(dims=2), rounds=3)
    pupil = school.add(Pupil(spec, tmp_path / "0"))
    school.start(pupil)
    assert school.summaries()[0].reason == "rounds"
    told = pupil.all("averaging")
    assert [event["t"] for event in told] == [1, 2, 3]
    assert all("needs at least 4 peers" in event["missing"][pupil.peer.id] for event in told)
    (record,) = [record for record in caplog.records if record.name == grids_module.__name__]
    assert record.levelname == "WARNING" and record.message == (
        "this peer trains alone for now: a grid of 2 dimensions needs at least 4 peers, and there is 1: set dims lower"
    )


def ahead(school: School, old: Pupil) -> tuple[Pupil, threading.Event]:
    """It has made 20 exchanges alone, and waits there until the event is set."""
    gate = threading.Event()

    def hold(event: Event) -> None:
        if event["event"] == "averaging" and event["t"] == 20:
            gate.wait(DEADLINE_S)

    old.on_event = hold
    school.start(school.add(old))
    wait_until(lambda: any(e["t"] == 20 for e in old.all("averaging")), DEADLINE_S, "the old one is ahead")
    return old, gate


def test_a_newcomer_takes_over_the_model_and_the_step_of_who_is_furthest(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=averaging.__name__)
    monkeypatch.setattr(averaging, "LOOK_S", DEADLINE_S)
    spec = spec_in(tmp_path, rounds=40)
    old, gate = ahead(school, Pupil(spec, tmp_path / "0"))
    model = old.model()
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address))
    seen: list[Tensor] = []
    new.on_event = lambda event: seen.append(new.model()) if event["event"] == "synced" else None
    school.acquainted()
    school.start(new)
    wait_until(lambda: new.all("step"), DEADLINE_S, "the newcomer trains")
    gate.set()
    assert new.all("synced")[0]["t"] == 20 and torch.equal(seen[0], model)
    assert new.all("step")[0]["step"] == 20 * 3, "the schedule is that of the others"
    assert {s.reason for s in school.summaries()} == {"rounds"}
    told = [record.message for record in caplog.records if record.name == averaging.__name__]
    assert told == ["goes on from the model of another peer, of round 20; its own was of round 0"]


@pytest.mark.parametrize("options", [PLAIN, MOSHPIT], ids=["gossip", "moshpit"])
def test_who_has_come_to_the_end_stays_for_a_newcomer_which_ends_with_its_model(
    tmp_path: Path, school: School, options: dict[str, Any]
) -> None:
    """The newcomer was given none any more, waited a minute for another, and could not join."""
    spec = spec_in(tmp_path, rounds=3, **options)
    old = school.add(Pupil(spec, tmp_path / "0"))
    saving = threading.Event()

    def hold(event: Event) -> None:
        if event["event"] == "validation" and event["t"] == 3:
            saving.set()
            wait_until(lambda: len(old.peer.members()) == 2, DEADLINE_S, "somebody comes")

    old.on_event = hold
    school.start(old)
    assert saving.wait(DEADLINE_S)
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address))
    wait_until((tmp_path / "0" / "model").is_dir, DEADLINE_S, "the old one has saved, and only stays")
    school.start(new)
    assert [(summary.reason, summary.t) for summary in school.summaries()] == [("rounds", 3)] * 2
    assert torch.equal(new.model(), old.model()) and not new.all("step")


def test_a_newcomer_that_finds_nobody_with_the_model_of_a_run_that_has_ended_says_so(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to start one of them again, as if the run went on."""
    monkeypatch.setattr(dlc.train.trainer, "LINGER_S", 0.0)
    spec = spec_in(tmp_path, rounds=3, timeouts=TimeoutsSpec(probe_s=0.14, evict_s=5.0))
    old = school.add(Pupil(spec, tmp_path / "0"))
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address))
    school.acquainted()
    with monkeypatch.context() as patch:
        patch.setattr(averaging, "LOOK_S", 0.0)  # the newcomer does not train yet, and tells nothing
        assert school.start(old).result(DEADLINE_S).t == 3
    wait_until(lambda: len(new.peer.members()) == 1, DEADLINE_S, "the leave is heard")
    end = school.start(new)
    with pytest.raises(
        JoinError, match=rf"the run has ended, .* before this peer had its first round \({old.peer.id[:8]}\)"
    ):
        end.result(DEADLINE_S)


def stands(pupil: Pupil) -> object:
    """What has come to this one of where the others stand."""
    return pupil.peer.mesh.ask(lambda mesh, now: mesh.board.get(f"state/{averaging.NAME}"))


def gone(school: School, old: Pupil, new: Pupil, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is ahead leaves, or cannot be reached any more, and the newcomer knows it."""
    school.acquainted()
    wait_until(lambda: any(m.status.get("t") for m in new.peer.members() if not m.me), DEADLINE_S, "it tells its step")
    if how == "left":
        old.peer.leave()
        wait_until(lambda: len(new.peer.members()) == 1, DEADLINE_S, "the leave is heard")
        return
    members = new.peer.members
    monkeypatch.setattr(
        new.peer,
        "members",
        lambda **some: [dataclasses.replace(m, alive=m.me) for m in members(**some)],
    )
    monkeypatch.setattr(averaging, "LOOK_S", 0.0)
    monkeypatch.setattr(Handover, "standings", lambda self: [])


@pytest.mark.parametrize("options", [PLAIN, MOSHPIT], ids=["gossip", "moshpit"])
@pytest.mark.parametrize("how", ["left", "silent"])
def test_a_newcomer_whose_fellows_are_all_gone_before_it_has_their_model_trains_no_other_one(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, how: str, options: dict[str, Any]
) -> None:
    """It trained the whole run alone, and ended as if all were well."""
    spec = spec_in(tmp_path, rounds=40, timeouts=TimeoutsSpec(probe_s=0.14, evict_s=5.0), **options)
    old, gate = ahead(school, Pupil(spec, tmp_path / "0"))
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address))
    gone(school, old, new, how, monkeypatch)
    gate.set()
    end = school.start(new)
    with pytest.raises(JoinError, match=rf"have left, or do not answer.*\({old.peer.id[:8]}\)"):
        end.result(DEADLINE_S)
    assert not new.all("step") and saves.newest(tmp_path / "1", spec) is None


def newcomer_when_the_old_left(school: School, spec: RunSpec, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Pupil:
    """It knows that one has made 20 exchanges and is gone, with its state in folder "0"."""
    old = school.add(Pupil(spec, folder / "0"))
    old.on_event = lambda event: old.stop.set() if event["event"] == "averaging" and event["t"] == 20 else None
    new = school.add(Pupil(spec, folder / "1", old.peer.address))
    school.acquainted()
    with monkeypatch.context() as patch:
        patch.setattr(averaging, "LOOK_S", 0.0)  # the newcomer does not train yet, and tells nothing
        school.start(old)
        assert school.summaries()[0].t == 20
    wait_until(lambda: len(new.peer.members()) == 1, DEADLINE_S, "the leave is heard")
    return new


def test_a_newcomer_that_only_waits_for_those_who_are_gone_takes_the_model_of_one_that_comes_back(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_in(tmp_path, rounds=40, timeouts=TimeoutsSpec(evict_s=DEADLINE_S))
    new = newcomer_when_the_old_left(school, spec, tmp_path, monkeypatch)
    school.start(new)
    saved = saves.newest(tmp_path / "0", spec)
    back = school.add(Pupil(spec, tmp_path / "0", new.peer.address, resume=saved))
    school.start(back)
    assert [summary.t for summary in school.summaries()] == [20, 40, 40]
    assert new.all("synced")[0]["t"] >= 20


def test_one_that_comes_back_is_waited_for_until_it_has_its_model_again(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had joined between two looks, and told nothing yet: the newcomer began from its own model."""
    spec = spec_in(tmp_path, rounds=40, timeouts=TimeoutsSpec(evict_s=DEADLINE_S))
    new = newcomer_when_the_old_left(school, spec, tmp_path, monkeypatch)
    look, looks, back_here = new.trainer.strategy._furthest, list[int](), threading.Event()  # type: ignore[attr-defined]

    def look_and_be_late(handover: Handover) -> int:
        looks.append(look(handover))
        if len(looks) == 2:
            back_here.wait(DEADLINE_S)
        return looks[-1]

    monkeypatch.setattr(averaging, "LOOK_S", 0.0)
    monkeypatch.setattr(new.trainer.strategy, "_furthest", look_and_be_late)
    school.start(new)
    wait_until(lambda: len(looks) == 2, DEADLINE_S, "it has looked")
    back = school.add(Pupil(spec, tmp_path / "0", new.peer.address, resume=saves.newest(tmp_path / "0", spec)))
    wait_until(lambda: len(new.peer.members()) == 2, DEADLINE_S, "the join is heard")
    back_here.set()
    wait_until(lambda: len(looks) > 3 or new.all("step"), DEADLINE_S, "it looks again, or trains")
    school.start(back)
    assert [summary.t for summary in school.summaries()] == [20, 40, 40]
    assert new.all("synced")[0]["t"] >= 20


@pytest.mark.parametrize("who", ["nobody had trained", "it has its own"])
def test_who_needs_no_model_of_those_who_left_trains_on(
    tmp_path: Path, school: School, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    spec = spec_in(tmp_path, rounds=40)
    own = who == "it has its own"
    if own:
        first = school.add(Pupil(spec, tmp_path / "1"))
        first.on_event = lambda event: first.stop.set() if event["event"] == "averaging" and event["t"] == 4 else None
        school.start(first)
        assert school.summaries()[0].t == 4
    saved = saves.newest(tmp_path / "1", spec) if own else None
    old, gate = Pupil(spec, tmp_path / "0"), threading.Event()
    if own:
        gate = ahead(school, old)[1]
    else:
        school.add(old)
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address, resume=saved))

    def known() -> bool:
        return any(m.status.get("t", 0) > 4 or not own for m in new.peer.members() if not m.me)

    wait_until(known, DEADLINE_S, "it is known, and how far it is")
    old.peer.leave()
    wait_until(lambda: len(new.peer.members()) == 1, DEADLINE_S, "the leave is heard")
    gate.set()
    summary = school.start(new).result(DEADLINE_S)
    assert (summary.reason, summary.t) == ("rounds", 40)
    assert new.all("averaging")[0]["t"] == (5 if own else 1)
    assert (f"{old.peer.id[:8]} trained further" in caplog.text) == own


def test_shares_that_may_count_twice_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Steps:
        """In place of a gossip."""

        t = 0

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def step(self, vector: Tensor, wait_s: float) -> GossipReport:
            unsure = 0.25 * self.t
            return GossipReport("g", self.t + 1, 1, {}, {}, {}, 0.0, 1.0, 0.0, unsure, 0.0, 0, 0, 0.0, 0.0)

    monkeypatch.setattr(gifts, "Gossip", Steps)
    exchange = gifts.Gifts(cast(Peer, None), spec_in(tmp_path))
    exchange.step(1, torch.zeros(2))
    assert not caplog.records
    exchange.step(2, torch.zeros(2))
    assert "0.25 at most" in caplog.text


@pytest.mark.parametrize(
    ("heard", "options"),
    [("late", PLAIN), ("too late", PLAIN), ("too late", NOLOCO), ("of another newcomer", PLAIN)],
)
def test_a_newcomer_that_has_not_heard_of_the_others_yet_does_not_go_on_from_its_own_model(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, heard: str, options: dict[str, Any]
) -> None:
    """It waits for who is listed, though no answer of it came yet; or begins alone, and takes theirs over before it
    averages. So it does where it heard of others who are no further."""
    monkeypatch.setattr(averaging, "LOOK_S", DEADLINE_S if heard == "late" else 0.0)
    spec = spec_in(tmp_path, rounds=40, **options)
    old, gate = ahead(school, Pupil(spec, tmp_path / "0"))
    model = old.model()
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address))
    school.acquainted()
    wait_until(lambda: stands(new), DEADLINE_S, "it could hear")
    if heard == "of another newcomer":
        wait_until(
            lambda: any(m.status.get("t") for m in new.peer.members() if not m.me), DEADLINE_S, "it tells its step"
        )
    early = [Standing(Voter("f" * 64, 1), 0, 0, None)] if heard == "of another newcomer" else []
    standings, members, looks = Handover.standings, new.peer.members, [0]

    def told(self: Handover) -> list[Standing]:
        looks[0] += self._me == new.peer.voter
        deaf = looks[0] <= 5 if heard == "late" else not new.all("step")
        return early if deaf and self._me == new.peer.voter else standings(self)

    monkeypatch.setattr(Handover, "standings", told)
    if heard == "late":
        monkeypatch.setattr(new.peer, "members", lambda: [dataclasses.replace(m, alive=False) for m in members()])
    seen, kept = list[Tensor](), list[Local]()

    def look(event: Event) -> None:
        if event["event"] == "step" and not seen and event["t"] == 20:
            kept.append(new.trainer.strategy.local().copy())
            seen.append(new.model())

    new.on_event = look
    school.start(new)
    wait_until(lambda: seen, DEADLINE_S, "the newcomer trains on from there")
    gate.set()
    alone = [e["step"] for e in new.all("step") if e["t"] < 20]
    assert alone == ([] if heard == "late" else [0, 1, 2]) and new.all("step")[len(alone)]["step"] == 20 * 3
    assert [e["tokens"] for e in new.all("work_dropped")] == [spec.tokens_per_round] * (len(alone) // 3)
    assert (seen[0] - model).norm() < 0.1 * model.norm(), "one step from theirs"
    assert int(kept[0].inner["0.step"]) == 1 and torch.equal(kept[0].own.get("phi", model), model)
    assert {s.reason for s in school.summaries()} == {"rounds"}


@pytest.mark.parametrize("heard", ["at once", "too late"])
def test_a_newcomer_asks_for_the_model_until_it_is_given_and_exchanges_none_of_its_own(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, heard: str
) -> None:
    """Three times in vain, and what nobody had trained was averaged with what the others had."""
    monkeypatch.setattr(averaging, "LOOK_S", DEADLINE_S if heard == "at once" else 0.0)
    spec = spec_in(tmp_path, rounds=40)
    old, gate = ahead(school, Pupil(spec, tmp_path / "0"))
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address))
    school.acquainted()
    wait_until(lambda: stands(new), DEADLINE_S, "it could hear")
    standings, fetch, asked = Handover.standings, Handover.fetch, list[int]()

    def told(self: Handover) -> list[Standing]:
        deaf = heard == "too late" and self._me == new.peer.voter and not new.all("step")
        return [] if deaf else standings(self)

    def given(self: Handover, out: Tensor, above: int = -1) -> int | None:
        asked.append(above)
        return fetch(self, out, above) if len(asked) > 5 else None

    monkeypatch.setattr(Handover, "standings", told)
    monkeypatch.setattr(Handover, "fetch", given)
    school.start(new)
    wait_until(lambda: any(e["t"] >= 20 for e in new.all("step")), DEADLINE_S, "the newcomer trains on from there")
    gate.set()
    assert {s.reason for s in school.summaries()} == {"rounds"}
    assert len(asked) == 6 and min(e["t"] for e in new.all("averaging")) > 20
    assert [r.getMessage() for r in caplog.records if "give its model" in r.getMessage()] == [
        "nobody could give its model: it is asked for again"
    ]


@pytest.mark.parametrize("where", ["averaging", "step"])
@pytest.mark.parametrize("gossip", [GossipSpec(), GossipSpec("random-pairs", "noloco")])
def test_who_resumes_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, school: School, gossip: GossipSpec, where: str
) -> None:
    """After an exchange, and after the first of the three inner steps that follow it."""
    spec = spec_in(tmp_path, gossip=gossip, model=ModelSpec(config=DROPPING))
    StateDir(tmp_path / "a").close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # the same peer, twice
    whole = school.add(Pupil(spec, tmp_path / "a"))
    school.start(whole)
    school.summaries()
    half = school.add(Pupil(spec, tmp_path / "b"))
    half.on_event = lambda event: half.stop.set() if event["event"] == where and event["t"] == 4 else None
    school.start(half)
    assert school.summaries()[-1].reason == "interrupted"
    saved = saves.newest(tmp_path / "b", spec)
    assert saved is not None and saved.t == 4
    rest = school.add(Pupil(spec, tmp_path / "b", resume=saved))
    school.start(rest)
    school.summaries()
    losses = [[(e["step"], e["loss"]) for e in pupil.all("step")] for pupil in (whole, half, rest)]
    assert losses[0] == losses[1] + losses[2] and len(losses[2]) == 4 * 3 - (where == "step")
    assert torch.equal(rest.model(), whole.model())
    assert rest.trainer.strategy.position.tokens == whole.trainer.strategy.position.tokens == 8 * spec.tokens_per_round
    told = [e["loss"] for e in rest.all("step") if e["t"] == 4]
    assert rest.all("averaging")[0]["loss"] == pytest.approx(statistics.mean(told)), "of the steps that it made itself"


def test_who_goes_on_from_the_checkpoint_of_another_peer_counts_its_own_tokens(tmp_path: Path, school: School) -> None:
    """It told those of the other one as its own, too."""
    spec = spec_in(tmp_path)
    first = school.add(Pupil(spec, tmp_path / "0"))
    first.on_event = lambda event: first.stop.set() if event["event"] == "averaging" and event["t"] == 4 else None
    school.start(first)
    school.summaries()
    saved = saves.newest(tmp_path / "0", spec)
    assert saved is not None and saved.t == 4 and saved.peer == first.peer.id
    rest = school.add(Pupil(spec, tmp_path / "1", resume=saved))
    school.start(rest)
    school.summaries()
    assert rest.all("step")[0]["step"] == 4 * 3
    assert rest.trainer.strategy.position.tokens == 4 * spec.tokens_per_round


def test_who_resumes_after_the_last_step_of_a_phase_tells_no_loss_of_steps_that_it_did_not_make(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the exchange after it failed: the steps are in the checkpoint, their losses were told."""
    spec = spec_in(tmp_path, rounds=2)

    def fails(*_: Any) -> Averaged:
        raise DlcError("the network thread stopped")

    with monkeypatch.context() as broken:
        broken.setattr(gifts.Gifts, "step", fails)
        first = school.add(Pupil(spec, tmp_path / "0"))
        with pytest.raises(DlcError, match="thread stopped"):
            school.start(first).result(DEADLINE_S)
    rest = school.add(Pupil(spec, tmp_path / "0", resume=saves.newest(tmp_path / "0", spec)))
    summary = school.start(rest).result(DEADLINE_S)
    assert (summary.t, summary.tokens) == (2, 2 * spec.tokens_per_round)
    assert [e["step"] for e in first.all("step") + rest.all("step")] == list(range(2 * 3))
    one, two = rest.all("averaging")
    assert one["loss"] is None and "loss" not in sentence(one)
    assert two["loss"] > 0 and f"; loss {two['loss']:.4f}; " in sentence(two)


def test_who_finds_the_others_further_drops_the_phase_that_it_was_stopped_in_and_its_own_slow_weights(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "LOOK_S", DEADLINE_S)
    spec = spec_in(tmp_path, rounds=40, **NOLOCO)
    first = school.add(Pupil(spec, tmp_path / "1"))
    first.on_event = lambda event: first.stop.set() if event["event"] == "step" and event["t"] == 4 else None
    school.start(first)
    school.summaries()
    saved = saves.newest(tmp_path / "1", spec)
    assert saved is not None and saved.t == 4 and saved.own["momentum"].any()
    old, gate = ahead(school, Pupil(spec, tmp_path / "0"))
    new = school.add(Pupil(spec, tmp_path / "1", old.peer.address, resume=saved))
    wait_until(lambda: sum(m.alive for m in new.peer.members()) == 2, DEADLINE_S, "they know each other")
    kept: list[dict[str, Tensor]] = []

    def look(event: Event) -> None:
        if event["event"] == "synced":
            kept.append(new.trainer.strategy.local().copy().own)

    new.on_event = look
    school.start(new)
    wait_until(lambda: new.all("step"), DEADLINE_S, "it trains")
    theirs = old.model()
    new.stop.set()
    gate.set()
    assert new.all("step")[0]["step"] == 20 * 3, "it begins the phase of the others"
    assert torch.equal(kept[0]["phi"], theirs) and not kept[0]["momentum"].any()


def test_steps_that_diverge_are_undone_and_not_averaged(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_in(tmp_path)
    pupil = school.add(Pupil(spec, tmp_path / "0"))
    step = InnerLoop.train_step

    def spoil(self: InnerLoop, *rest: Any) -> Any:
        result = step(self, *rest)
        with torch.no_grad():
            pupil.trainer._engine.view.tensors[0].fill_(float("nan"))
        return result

    monkeypatch.setattr(InnerLoop, "train_step", spoil)
    school.start(pupil)
    wait_until(lambda: school.ends[0].done(), DEADLINE_S, "it gives up")
    with pytest.raises(DlcError, match="3 times in a row"):
        school.ends[0].result()
    assert [e["in_a_row"] for e in pupil.all("diverged")] == [1, 2, 3] and not pupil.all("averaging")
    dropped = [(e["steps"], e["tokens"], e["others"]) for e in pupil.all("work_dropped")]
    assert dropped == [(1, spec.tokens_per_round // 3, False)] * 3, "the step after the one that spoilt it is told so"
    assert pupil.trainer.strategy.position.tokens == 0, "what was undone is not counted"


def test_a_phase_whose_last_step_diverges_is_undone_and_after_a_good_one_they_are_counted_anew(
    tmp_path: Path, school: School
) -> None:
    """What the last step spoilt has no loss yet. No two good phases are of one that diverged: the run goes on."""
    spec = spec_in(tmp_path, rounds=3)
    pupil = school.add(Pupil(spec, tmp_path / "0"))

    def spoil(event: Event) -> None:
        if event["event"] == "step" and len(pupil.all("step")) in (3, 9, 12):
            with torch.no_grad():
                pupil.trainer._engine.view.tensors[0].fill_(float("nan"))

    pupil.on_event = spoil
    school.start(pupil)
    (summary,) = school.summaries()
    assert (summary.reason, summary.t, summary.tokens) == ("rounds", 3, 3 * spec.tokens_per_round)
    assert [e["in_a_row"] for e in pupil.all("diverged")] == [1, 1, 2] and bool(pupil.model().isfinite().all())
    assert [(e["t"], e["steps"], e["tokens"]) for e in pupil.all("work_dropped")] == [
        (t, 3, spec.tokens_per_round) for t in (0, 1, 1)
    ]
    made = pupil.trainer.strategy.local().inner["0.step"]
    assert int(made) == 2 * 3, "the inner optimizer is a new one since the last phase that diverged"


def test_what_diverges_after_a_resume_in_the_midst_of_a_phase_is_undone_to_there(
    tmp_path: Path, school: School
) -> None:
    spec = spec_in(tmp_path, rounds=2)
    first = school.add(Pupil(spec, tmp_path / "0"))
    first.on_event = lambda event: first.stop.set() if event["event"] == "step" and event["step"] == 3 else None
    school.start(first)
    school.summaries()
    rest = school.add(Pupil(spec, tmp_path / "0", resume=saves.newest(tmp_path / "0", spec)))

    def spoil(event: Event) -> None:
        if event["event"] == "step" and len(rest.all("step")) == 2:
            with torch.no_grad():
                rest.trainer._engine.view.tensors[0].fill_(float("nan"))

    rest.on_event = spoil
    school.start(rest)
    assert school.summaries()[-1].t == 2
    assert [e["step"] for e in rest.all("step")] == [4, 5, 4, 5], "the first of the phase is in the checkpoint"
    assert [e["steps"] for e in rest.all("work_dropped")] == [2]


@pytest.mark.parametrize("options", [PLAIN, NOLOCO, MOSHPIT], ids=["average", "noloco", "moshpit"])
def test_a_member_that_tells_of_an_exchange_beyond_the_end_of_the_run_ends_nobody_s_training(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Who followed it was through at once, or trained alone for as long as that one was there. On a slow machine it was
    said to have followed it, where it had not waited."""
    table = "moshpit" if options is MOSHPIT else "gossip"
    quick = {table: dataclasses.replace(options[table], wait_s=0.1)}
    monkeypatch.setattr(averaging, "LOOK_S", 0.1)
    monkeypatch.setattr(dlc.train.trainer, "LINGER_S", 0.0)  # the one that trains nothing never has a model
    passed_s, comes = [0.0], noloco.Places.comes

    def slowly(places: noloco.Places) -> Any:  # before anybody is waited for
        passed_s[0] += 60.0
        return comes(places)

    monkeypatch.setattr(noloco, "clock", lambda: clock() + passed_s[0])
    monkeypatch.setattr(noloco.Places, "comes", slowly)
    patient = TimeoutsSpec(probe_s=1.0)  # the one that is there and trains nothing is not taken for dead
    spec = spec_in(tmp_path, **{**options, **quick}, rounds=3, timeouts=patient)
    pupil = school.add(Pupil(spec, tmp_path / "0"))
    far = 10**6
    told = {
        "state/train": pack(Notice(far, far, b"")),
        "gossip/train": pack(meshmessages.Place(far, 1.0, b"", 0)),
        "place/train/noloco": pack(Place(far, True, False, 1.0, 0.0)),
    }
    with Peer.join([pupil.peer.address], join_timeout_s=DEADLINE_S) as liar:
        for key, value in told.items():
            liar.mesh.act(lambda mesh, now, key=key, value=value: mesh.post(key, value, 1000.0, now))  # type: ignore[misc]
        board = pupil.peer.mesh.ask(lambda mesh, now: mesh.board)
        wait_until(lambda: all(map(board.get, told)), DEADLINE_S, "it is heard")
        school.start(pupil)
        (summary,) = school.summaries()
        assert (summary.reason, summary.t) == ("rounds", 3) and summary.tokens == 3 * spec.tokens_per_round
        assert [event["t"] for event in pupil.all("averaging")] == list(range(1, 4))
        missed = [event["missing"] for event in pupil.all("averaging")]
        assert options is not NOLOCO or missed == [{liar.id: "did not come"}] * 3, "it is waited for where it belongs"


@pytest.mark.parametrize(
    ("others", "made"),
    [([6], [1, 2, 3, 4, 5, 6]), ([6, 3], [1, 3, 4, 5, 6]), ([6, 6], [1, 6]), ([6, 6, 2], [1, 2, 3, 4, 5, 6])],
)
def test_to_the_end_of_the_run_one_goes_by_itself_or_with_most(
    tmp_path: Path, school: School, monkeypatch: pytest.MonkeyPatch, others: list[int], made: list[int]
) -> None:
    """One that had ended alone, behind a cut, ended everybody's training when it was started again."""
    pupil, shown = school.add(Pupil(spec_in(tmp_path, rounds=6), tmp_path / "0")), list[Standing]()
    monkeypatch.setattr(Handover, "standings", lambda self: [*shown])

    def come(event: Event) -> None:
        if event["event"] == "averaging" and not shown:
            shown.extend(Standing(Voter(f"{i:064}", 1), t, t, None) for i, t in enumerate(others))

    pupil.on_event = come
    school.start(pupil)
    (summary,) = school.summaries()
    assert (summary.reason, [event["t"] for event in pupil.all("averaging")]) == ("rounds", made)


def test_a_gossip_of_a_run_follows_nobody_to_its_end() -> None:
    net = MeshNet(1)
    host, other = net.add(2)
    spec = RunSpec(strategy="gossip", codec="fp32", rounds=6, gossip=GossipSpec(wait_s=0.0))
    exchange, told = gifts.Gifts(cast(Peer, NetPeer(net, host)), spec), list[int]()
    for t, theirs in ((1, 4), (5, 6), (6, 6)):
        place = pack(meshmessages.Place(theirs, 1.0, b"", 0))
        net.act(other, lambda mesh, now, place=place: mesh.post("gossip/train", place, 1000.0, now))  # type: ignore[misc]
        net.run(1.0)
        told.append(exchange.step(t, torch.ones(4)).t)
    assert told == [4, 5, 6]


# ------------------------------------------------------------------ models for newcomers


def test_a_model_stays_shown_while_it_is_fetched_and_none_is_fetched_from_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "ASK_RTTS", 0)  # not for this reason
    with swarm(2, log=False) as (one, two):
        shows, takes = (Handover(peer, "x", 100_000) for peer in (one, two))
        out = torch.empty(100_000)
        assert takes.fetch(out) is None
        vectors = [torch.randn(100_000, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        assert shows.stand(1, vectors[0]) == 0.0
        wait_until(takes.standings, DEADLINE_S)
        assert takes.fetch(out) == 1 and torch.equal(out, vectors[0])
        shows.stand(2, vectors[1])  # somebody fetched what is shown, and may still do so
        wait_until(lambda: takes.standings()[0].t == 2, DEADLINE_S)
        assert takes.standings()[0].held == 1
        shows.stand(3, vectors[2])
        wait_until(lambda: takes.standings()[0].held == 3, DEADLINE_S)
        assert takes.fetch(out) == 3 and torch.equal(out, vectors[2])
        assert takes.fetch(out, above=2) == 3
        assert takes.fetch(out, above=3) is None, "who is no further has nothing to give"
        apart = takes.stand(3, vectors[1])
        exact = float((vectors[1] - vectors[2]).norm()) / 2
        assert apart == pytest.approx(exact, rel=0.3)
        shows.close()
        wait_until(lambda: not takes.standings(), DEADLINE_S)


def test_who_has_just_heard_of_a_model_finds_it_though_the_next_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exchanges are quicker than round trips no newcomer got any: each was gone when it was asked for."""
    monkeypatch.setattr(handover, "ASK_RTTS", 1e9)  # those of loopback are short
    with swarm(2, log=False) as (one, two):
        wait_until(lambda: all(sum(m.alive for m in peer.members()) == 2 for peer in (one, two)), DEADLINE_S)
        shows, takes = (Handover(peer, "x", 1000) for peer in (one, two))
        shows.stand(1, torch.ones(1000))
        wait_until(takes.standings, DEADLINE_S)
        steps, fetched = itertools.count(2), takes._fetched

        def asks_late(donor: Standing, out: Tensor) -> bool:
            shows.stand(next(steps), torch.zeros(1000))
            return fetched(donor, out)

        monkeypatch.setattr(takes, "_fetched", asks_late)
        out = torch.zeros(1000)
        assert takes.fetch(out) == 1 and bool((out == 1.0).all())


# ------------------------------------------------------------------ processes


def test_three_peers_of_which_one_is_killed(tmp_path: Path) -> None:
    host = Host(tmp_path)
    config = tmp_path / "RUN.toml"
    config.write_text('strategy = "gossip"\n' + Path(host.config(0)).read_text())
    (address,) = free_addresses(1)
    try:
        words = ("--config", str(config), "--key-file", str(host.key), "--history-bytes", "1GiB")
        first = host.start("first", *words, "--listen", address)
        second, third = (
            host.start(name, "--peers", address, "--key-file", str(host.key)) for name in ("second", "third")
        )
        for peer in (first, second, third):
            peer.event("averaging")
        second.kill()
        ids = [peer.event("started")["peer"] for peer in (first, third)]
        first.event("member", peer=second.event("started")["peer"], change="down")
        at = first.all("averaging")[-1]["t"]
        end = time.monotonic() + DEADLINE_S
        for peer, other in ((first, ids[1]), (third, ids[0])):
            while not any(e["t"] > at + 5 and e["partners"] == [other] for e in peer.all("averaging")):
                peer._take(end, "averaging of the two")
        for peer in (first, third):
            peer.signal(signal.SIGINT)
        assert [first.exit_code(), third.exit_code()] == [0, 0]
        assert "--history-bytes changes nothing here" in first.log()
        assert "--history-bytes" not in third.log()
        losses = [event["loss"] for event in first.all("averaging")]
        assert min(losses[-5:]) < losses[0]
        apart = [event["distance"] for event in first.all("averaging") if event["t"] > at]
        assert statistics.median(apart) < 2.0, "some 0.1 where they meet; a phase alone moves a model by up to 0.4"
    finally:
        host.close()


def on_the_grid(mesh: Mesh, _: float) -> int:
    return len(mesh.board.get(f"moshpit/{averaging.NAME}"))


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_steps_below_the_codecs_resolution_add_up(codec: str) -> None:
    """Parameters near 1 that move by 1e-4 between two exchanges: fp16 has nothing between 1 and 1.00098."""
    spec = RunSpec(strategy="moshpit", codec=codec, moshpit=MoshpitSpec(group_size=2, wait_s=DEADLINE_S))
    with swarm(2, log=False) as peers:
        grids = [Grids(peer, spec) for peer in peers]
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
            wait_until(lambda p=peer: p.mesh.ask(on_the_grid) == 2, DEADLINE_S, "both are on the grid")
        vectors = [torch.ones(1000), torch.full((1000,), 1.25)]
        for t in range(1, 13):
            for vector in vectors:
                vector.add_(1e-4)
            with ThreadPoolExecutor(2) as pool:
                told = list(pool.map(lambda grid, vector, t=t: grid.step(t, vector), grids, vectors))
            assert all(len(averaged.partners) == 1 for averaged in told)
        mean = (vectors[0] + vectors[1]) / 2
        torch.testing.assert_close(mean, torch.full((1000,), 1.125 + 12e-4), rtol=0, atol=2e-4)
        torch.testing.assert_close(vectors[0], vectors[1], rtol=0, atol=2.0**-7)
        for grid in grids:
            grid.close()


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_steps_below_the_codecs_resolution_move_slow_weights_as_far_as_exact_means_do(codec: str) -> None:
    """As above, of pairs that hold phi = 1: what is said of it does not draw it back."""
    gossip = GossipSpec("random-pairs", "noloco", wait_s=DEADLINE_S)
    spec, rounds, learned = RunSpec(strategy="gossip", codec=codec, gossip=gossip), 12, torch.full((1000,), 1e-4)
    exact, m = torch.ones(1000), torch.zeros(1000)
    for _ in range(rounds):
        noloco_step(exact, m, learned, learned, exact.clone(), gossip.outer_lr, gossip.outer_momentum, gossip.pull)
    with swarm(2, log=False) as peers:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        many, vectors = [Pairs(peer, spec) for peer in peers], [torch.ones(1000) for _ in peers]
        for pair, vector in zip(many, vectors, strict=True):
            pair.begin(vector)
        for t in range(1, rounds + 1):
            for vector in vectors:
                vector.add_(learned)
            with ThreadPoolExecutor(2) as pool:
                told = list(pool.map(lambda pair, vector, t=t: pair.step(t, vector), many, vectors))
            assert all(len(averaged.partners) == 1 for averaged in told)
    for vector in vectors:
        torch.testing.assert_close(vector - 1.0, exact - 1.0, rtol=0.02, atol=1e-5)


def test_who_is_a_step_behind_its_partner_meets_it_at_the_next() -> None:
    """Of two of equal speed the one waited for step t, the other for t + 1, both in vain and for ever."""
    gossip = GossipSpec("random-pairs", "noloco", wait_s=DEADLINE_S)
    spec = RunSpec(strategy="gossip", codec="fp32", gossip=gossip)
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        ahead, behind = (Pairs(peer, spec) for peer in peers)
        vectors = [torch.ones(10), torch.ones(10)]
        for pair, vector in zip((ahead, behind), vectors, strict=True):
            pair.begin(vector)
        waits = pool.submit(behind.step, 3, vectors[1])

        def wishes(mesh: Mesh, now: float) -> list[str]:
            return mesh.board.keys("meet/train/noloco")

        wait_until(lambda: peers[0].mesh.ask(wishes), DEADLINE_S, "the one behind waits")
        told = [ahead.step(4, vectors[0]), waits.result(DEADLINE_S)]
        assert [(averaged.t, len(averaged.partners)) for averaged in told] == [(4, 1), (4, 1)]
        wait_until(lambda: rounds_seen(behind) == [5], DEADLINE_S, "it is known there")
        both = [pool.submit(ahead.step, 5, vectors[0]), pool.submit(behind.step, 4, vectors[1])]
        assert [(f.result(DEADLINE_S).t, len(f.result().partners)) for f in both] == [(5, 1), (5, 1)]


def test_what_comes_too_late_for_the_partner_is_in_the_own_mean_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the partner's vector for the mean, and lost what it had learned."""
    monkeypatch.setattr(noloco, "EXCHANGE_S", 2.0)
    gossip = GossipSpec("random-pairs", "noloco", wait_s=DEADLINE_S)
    spec = RunSpec(strategy="gossip", codec="fp32", gossip=gossip)
    with late_for_its_partner(DEADLINE_S) as (owner, late), ThreadPoolExecutor(2) as pool:
        pairs, vectors = [Pairs(peer, spec) for peer in (owner, late)], [torch.zeros(4), torch.full((4,), 8.0)]
        for pair, vector in zip(pairs, vectors, strict=True):
            pair.begin(vector)
        learned = vectors[0] + 1.0, vectors[1] + 3.0
        told = list(pool.map(lambda pair, vector: pair.step(1, vector), pairs, learned))
        assert [averaged.partners for averaged in told] == [(), (owner.id,)]
        assert all(dict(averaged.missing) == {late.id: "late"} for averaged in told)
        assert float(learned[0][0]) == pytest.approx(0.7 * 1.0)
        assert float(learned[1][0]) == pytest.approx(8.0 + 0.7 * 2.0 + 0.6 * (4.0 - 8.0))


def test_what_comes_too_late_for_a_group_is_in_the_own_mean_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the codec would have rounded off of it was added once more. fp16 has nothing between 1 and 1.00098."""
    monkeypatch.setattr(grids_module, "EXCHANGE_S", 2.0)
    spec = RunSpec(strategy="moshpit", codec="fp16", moshpit=MoshpitSpec(group_size=2, wait_s=DEADLINE_S))
    with late_for_its_partner(DEADLINE_S) as (owner, late), ThreadPoolExecutor(2) as pool:
        many, vectors = [Grids(peer, spec) for peer in (owner, late)], [torch.ones(4), torch.full((4,), 1.0002)]
        wait_until(lambda: all(p.mesh.ask(on_the_grid) == 2 for p in (owner, late)), DEADLINE_S, "both are shown")
        told = list(pool.map(lambda grid, vector: grid.step(1, vector), many, vectors))
    assert all(dict(averaged.missing) == {late.id: "late"} for averaged in told)
    torch.testing.assert_close(vectors[1], torch.full((4,), 1.0001), rtol=0, atol=2e-6)


def test_who_loses_its_partner_in_the_midst_takes_the_step_of_the_pair_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each chunk is of both, or of itself alone, which is the step over one: of those that its partner was to reduce,
    nothing came; of its own it had what the partner gave."""
    monkeypatch.setattr(mesh_module, "usual_chunk_elems", lambda *of: 2)
    gossip = GossipSpec("random-pairs", "noloco", wait_s=DEADLINE_S)
    spec = RunSpec(strategy="gossip", codec="fp32", gossip=gossip)
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        stays, dies = peers
        many, phis = [Pairs(peer, spec) for peer in peers], [torch.arange(8.0), 10 + torch.arange(8.0)]
        learned = [torch.full((8,), 1.0), torch.full((8,), 3.0)]
        for pair, phi in zip(many, phis, strict=True):
            pair.begin(phi)
        pulled = threading.Event()

        def watched(mesh: Mesh, now: float) -> None:
            """It gives its own vector, and no mean."""
            pull = mesh.parcels.receive_pull

            def receive(sender: Voter, m: meshmessages.Pull) -> None:
                if m.key.part != RESULT:
                    pull(sender, m)
                    pulled.set()

            monkeypatch.setattr(mesh.parcels, "receive_pull", receive)

        dies.mesh.ask(watched)
        vectors = [phi + d for phi, d in zip(phis, learned, strict=True)]
        both = [pool.submit(pair.step, 1, vector) for pair, vector in zip(many, vectors, strict=True)]
        assert pulled.wait(DEADLINE_S)
        (group,) = stays.mesh.ask(lambda mesh, now: list(mesh._groups.values()))
        wait_until(lambda: group.outcome.reduced == 4, DEADLINE_S, "its half is reduced")
        dies.leave()
        averaged = both[0].result(DEADLINE_S)
    assert averaged.partners == (dies.id,) and set(averaged.missing) == {dies.id}
    lr, pull = spec.gossip.outer_lr, spec.gossip.pull
    alone = lr * learned[0]
    moves = {
        "neither": alone,
        "what was learned": lr * 2.0 + torch.zeros(8),
        "the weights": alone + pull * 5.0,
        "both": lr * 2.0 + pull * (phis[1] - phis[0]) / 2,
    }
    moved = vectors[0] - phis[0]
    which = [[name for name, move in moves.items() if abs(float(moved[i] - move[i])) < 1e-5] for i in range(8)]
    assert all(len(names) == 1 for names in which), which
    assert {name for (name,) in which} not in ({"neither"}, {"both"}), "some chunks are of both, some are not"


@pytest.mark.parametrize("alone", [True, False])
def test_a_model_that_nobody_else_gave_anything_to_stays_as_it_is_whatever_the_codec_cannot_say_of_it(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """In a group of its own, and where there is no mean."""
    spec = RunSpec(strategy="moshpit", codec="fp16", moshpit=MoshpitSpec(group_size=2, wait_s=0.05))
    with swarm(1, log=False) as (peer,):
        vector, grids = torch.full((4,), 1.0002), Grids(peer, spec)
        if not alone:
            none = _Met(None, torch.zeros(4), frozenset(), "", (), frozenset())
            monkeypatch.setattr(grids._moshpit, "_meet", lambda *args: none)
        averaged = grids.step(1, vector)
    assert averaged.partners == () and torch.equal(vector, torch.full((4,), 1.0002))


def test_who_is_to_stop_tells_nobody_as_missing() -> None:
    """The last line of a training named the others, and this peer itself."""
    spec = RunSpec(strategy="moshpit", codec="fp32", moshpit=MoshpitSpec(group_size=2, wait_s=DEADLINE_S))
    with swarm(2, log=False) as peers:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        one, _ = [Grids(peer, spec, lambda: True) for peer in peers]
        wait_until(lambda: peers[0].mesh.ask(on_the_grid) == 2, DEADLINE_S, "both are on the grid")
        averaged = one.step(1, torch.ones(10))
    assert (averaged.t, averaged.partners, averaged.missing) == (1, (), {})


def test_who_is_to_stop_tells_its_partner_as_missing_no_more_than_a_group() -> None:
    """The last line of a training said that it did not come, though it was not waited for."""
    spec = RunSpec(strategy="gossip", codec="fp32", gossip=GossipSpec("random-pairs", "noloco", wait_s=DEADLINE_S))
    with swarm(2, log=False) as peers:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        one = Pairs(peers[0], spec, lambda: True)
        one.begin(torch.ones(10))
        averaged = one.step(1, torch.ones(10))
    assert (averaged.t, averaged.partners, averaged.missing) == (1, (), {})


def test_members_of_a_group_go_on_from_the_same_number() -> None:
    """Two that came at the same time each counted its own: one stayed an exchange behind the other to the end."""
    spec = RunSpec(strategy="moshpit", codec="fp32", moshpit=MoshpitSpec(group_size=2, wait_s=DEADLINE_S))
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        many = [Grids(peer, spec) for peer in peers]
        for pit in (grid._moshpit for grid in many):
            wait_until(
                lambda p=pit: len(p._mesh.ask(lambda mesh, now: p._members(mesh))) == 2, DEADLINE_S, "it is shown"
            )
        told = list(pool.map(lambda grid, t: grid.step(t, torch.ones(10)), many, (4, 7)))
        assert [(averaged.t, len(averaged.partners)) for averaged in told] == [(7, 1), (7, 1)]
    assert [many[0]._number(word) for word in (b"", b"\xff" * 8, (9).to_bytes(8, "big"))] == [0, 0, 9]
    spec = dataclasses.replace(spec, rounds=8)
    with swarm(1, log=False) as (peer,):
        grids = Grids(peer, spec)
        assert [grids._number(t.to_bytes(8, "big")) for t in (8, 9)] == [8, 0]


def rounds_seen(pair: Pairs) -> list[int]:
    """To which step each of the others comes next, as far as this one has heard."""
    return [place.round for place in pair._places.ask().places.values()]


def taking_turns(peers: list[Peer], spec: RunSpec, turns: int) -> tuple[list[int], list[Averaged]]:
    """Where two stand of whom one trains while the other would exchange, each as often; and its exchanges."""
    many = [Pairs(peer, spec) for peer in peers]
    ts, told, vector = [0, 0], list[Averaged](), torch.ones(10)
    for pair in many:
        pair.begin(vector)
    for turn in range(turns):
        for i, pair in enumerate(many):
            heard = [ts[1 - i] + 1] if turn or i else []
            wait_until(lambda p=pair, h=heard: rounds_seen(p) == h, DEADLINE_S, "it is heard")
            told.append(pair.step(max(ts[i] + 1, ts[1 - i]), vector.clone()))
            ts[i] = told[-1].t
    return ts, told


def test_two_that_never_meet_count_their_own_exchanges_only() -> None:
    """Each counted the other's, too: a run ended after half of its training, and so did its schedule."""
    gossip = GossipSpec("random-pairs", "noloco", wait_s=0.05)
    with swarm(2, log=False) as peers:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 2, DEADLINE_S, "both are up")
        ts, told = taking_turns(peers, RunSpec(strategy="gossip", codec="fp32", gossip=gossip), 5)
        assert not any(averaged.partners for averaged in told) and max(ts) <= 6


def alone(place: Place, rounds: int = 0) -> Pairs:
    """One of two; the other one shows this place."""
    members = [
        SimpleNamespace(id=peer, me=peer == "me", alive=True, left=False, role=TRAINER) for peer in ("me", "other")
    ]
    reached = SimpleNamespace(ground=SimpleNamespace(apart=list))
    mesh = SimpleNamespace(ask=lambda fn: fn(reached, 100.0))
    peer = SimpleNamespace(id="me", mesh=mesh, members=lambda: members)
    spec = RunSpec(strategy="gossip", gossip=GossipSpec("random-pairs", "noloco"), rounds=rounds)
    pair = Pairs(cast(Peer, peer), spec)
    pair._places.ask = lambda: Seen({"other": place})  # type: ignore[method-assign]
    pair._places._show = lambda *_: None  # type: ignore[method-assign]
    pair.begin(torch.ones(10))
    return pair


def test_nobody_waits_for_an_exchange_beyond_the_end_of_the_run() -> None:
    assert not alone(Place(9, False, False, 1.0, 0.0), rounds=8)._turn(8, 1.0).others, "the other has ended"
    assert alone(Place(8, False, False, 1.0, 0.0), rounds=8)._turn(8, 1.0).others == {"other"}


def test_what_was_waited_in_a_step_that_the_partner_has_passed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now, passed = [100.0], iter([True, False])
    monkeypatch.setattr(noloco, "clock", lambda: now[0])
    pair = alone(Place(1, False, False, 1.0, 0.0))

    class Waits:
        """In place of a group: three seconds, until the partner is seen elsewhere; then one."""

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def all_reduce(self, both: Tensor, **options: Any) -> GroupReport:
            error = RoundTimeout("nobody came")
            if next(passed):
                error.__cause__ = GoneOn()
            now[0] += 3.0 if error.__cause__ else 1.0
            raise error

    monkeypatch.setattr(noloco, "Group", Waits)
    averaged = pair.step(1, torch.ones(10))
    assert (averaged.seconds, averaged.waiting_s) == (4.0, 4.0)


def test_who_goes_on_to_ever_later_steps_of_the_others_does_not_follow_them_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For twice as long as it would wait in one."""
    now, patience = [100.0], list[float]()
    monkeypatch.setattr(noloco, "clock", lambda: now[0])
    pair = alone(Place(1, False, False, 1.0, 0.0))

    class Passed:
        """In place of a group whose partner is seen elsewhere after three seconds."""

        def __init__(self, *args: Any, matchmaking_s: float, **options: Any) -> None:
            patience.append(matchmaking_s)
            assert len(patience) < 10

        def all_reduce(self, both: Tensor, **options: Any) -> GroupReport:
            now[0] += 3.0
            error = RoundTimeout("nobody came")
            error.__cause__ = GoneOn()
            raise error

    monkeypatch.setattr(noloco, "Group", Passed)
    averaged = pair.step(1, torch.ones(10))
    assert patience == [2.0, 1.0] and "for long enough" in averaged.missing["other"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SwarmClosed])
def test_an_exchange_that_is_interrupted_is_given_up(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    """Its partner waited for it, and the next of that step was refused: it averaged under that key already."""
    pair, cancelled = alone(Place(1, False, False, 1.0, 0.0)), list[object]()

    class Interrupted:
        """In place of a group and its call."""

        def __init__(self, *args: Any, **options: Any) -> None: ...

        def all_reduce(self, both: Tensor, **options: Any) -> Interrupted:
            return self

        def wait(self) -> GroupReport:
            raise raised

        def cancel(self) -> None:
            cancelled.append(self)

    monkeypatch.setattr(noloco, "Group", Interrupted)
    with pytest.raises(raised):
        pair.step(1, torch.ones(10))
    assert len(cancelled) == (raised is KeyboardInterrupt), "what is closed is over"


def test_a_partner_that_no_vector_reaches_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair met by way of the third peer, and each waited for the other's half in vain."""
    spec = RunSpec(strategy="gossip", codec="fp32", gossip=GossipSpec("random-pairs", "noloco", wait_s=DEADLINE_S))
    with swarm(3, log=False) as peers, ThreadPoolExecutor(2) as pool:
        for peer in peers:
            wait_until(lambda p=peer: sum(m.alive for m in p.members()) == 3, DEADLINE_S, "all are up")
        a, b, relay = sorted(peers, key=lambda peer: peer.id)
        for one, other in ((a, b), (b, a)):
            way = {other.id: relay.id}
            monkeypatch.setattr(one._node.members, "relay_for", way.get)
        two = [Pairs(peer, spec) for peer in (a, b)]
        vectors = [torch.ones(4), torch.ones(4)]
        for pair in two:
            pair.begin(torch.zeros(4))
        t = next(t for t in range(1, 100) if pairs(3, t, spec.seed)[0] == 1)
        told = list(pool.map(lambda pair, vector: pair.step(t, vector), two, vectors))
        assert all((averaged.t, averaged.partners, dict(averaged.missing)) == (t, (), {}) for averaged in told)
        assert all(float(vector[0]) == pytest.approx(0.7) for vector in vectors)
