"""Transcripts of those who wait: what they are told, that they go on as soon as they can, and that nobody founds a run
unasked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlc.comm.effects import Effect, Send
from dlc.comm.entries import EMPTY
from dlc.comm.events import Waiting
from dlc.comm.messages import Ping
from dlc.comm.straggler import NEVER_S
from dlc.comm.waiting import AGAIN_S, CONTACT_S, OPENING_S
from dlc.errors import CheckpointError
from dlc.report import waiting_text
from dlc.sim.network import Weather
from dlc.sim.schedule import SECOND, TRAIN, Scenario, Start
from dlc.sim.toy import ToyState
from dlc.sim.world import Process, World

torch.set_num_threads(1)

OUT_OF_REACH = "no member of the run is in reach"


class Stay(World):
    """A swarm whose founder is p0, and that notes who is told that it waits; `bare`: (host, channel) not attached."""

    def __init__(self, *roles: str, bare: tuple[tuple[str, str], ...] = (), **more: Any) -> None:
        self.told: list[tuple[float, str, Waiting]] = []
        self.bare = set(bare)
        starts = (Start(0.0, ()), *(Start(0.1 * i, (0,), role) for i, role in enumerate(roles, 1)))
        super().__init__(Scenario(0, starts, (), Weather(latency_max_s=0.05, spike=0.0), inner_s=1.0, **more))

    def _attach(self, process: Process, channel: str, disk: Any) -> None:
        if (process.host.name, channel) not in self.bare:
            super()._attach(process, channel, disk)
        else:
            self.act(process, process.node.tick)

    def _notify(self, process: Process, event: object) -> None:
        if isinstance(event, Waiting):
            self.told.append((self.now, process.host.name, event))
        super()._notify(process, event)

    def __getitem__(self, name: str) -> Process:
        process = self.hosts[name].process
        assert process is not None
        return process

    def newcomer(self, *listed: str) -> Process:
        return self.start(self.new_host(), tuple(f"sim:{name}" for name in listed))

    def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        end = self.now + limit_s
        while not condition():
            assert self.clock.step() and self.now < end, "the transcript does not reach its point"

    def said(self, process: Process, reason: str) -> list[tuple[float, Waiting]]:
        name = process.host.name
        return [(at, w) for at, who, w in self.told if who == name and w.reason.startswith(reason)]


def votes(process: Process) -> bool:
    return process.voter in process.node.log.state.electorate


# ------------------------------------------------------------------ the only contact is lost


@pytest.mark.parametrize("how", ["leave", "crash"])
def test_a_newcomer_whose_only_contact_is_lost_says_so_and_founds_nothing(how: str) -> None:
    """The contact was the whole run. What it knew is lost to the newcomer, which tells so, again and again."""
    world = Stay()
    world.run_until(12.0)
    contact, newcomer = world["p0"], world.newcomer("p0")
    world.until(lambda: newcomer.node.slot.answers, 2.0)
    getattr(world, how)(contact)
    lost = world.now
    world.run_until(lost + 130.0)
    assert newcomer.node.log.head == EMPTY and not votes(newcomer), "it founded a run that nobody asked for"
    told = world.said(newcomer, OUT_OF_REACH)
    t_dead_s = newcomer.node.members.timeouts.t_dead_s(2, 1.0)
    assert lost < told[0][0] <= lost + CONTACT_S + t_dead_s + 1.0
    assert [w.waited_s for _, w in told] == [0.0, AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S]
    for at, waiting in told:
        assert waiting.peers == ("sim:p0",) and waiting.waited_s <= at - lost + 1.0
        text = waiting_text(waiting.reason, waiting.peers, waiting.left_s, waiting.waited_s, waiting.advice)
        assert "sim:p0" in text and "another member (--peers)" in text
        assert f"cannot dial {newcomer.host.address}:" in text and "firewall" in text  # it may be its own fault
    assert newcomer.node.waits.now == told[-1][1], "it can be asked, too"

    again = world.start(world.hosts["p0"], (), founder=True)  # somebody begins a run at that address
    world.until(lambda: votes(newcomer) and newcomer.node.log.head == again.node.log.head)
    assert newcomer.node.waits.now is None


@pytest.mark.parametrize("how", ["leave", "crash"])
def test_a_newcomer_that_finds_observers_only_is_told_so_and_founds_nothing(how: str) -> None:
    """The contact answers and lives, but whoever had the run is gone."""
    world = Stay("observer")
    world.run_until(12.0)
    getattr(world, how)(world["p0"])
    world.run_until(100.0)
    newcomer = world.newcomer("p1")
    world.run_until(world.now + CONTACT_S + 5.0)
    assert newcomer.node.log.head == EMPTY and not votes(newcomer)
    ((_, waiting), *_) = world.said(newcomer, OUT_OF_REACH)
    assert waiting.peers == ("sim:p1",) and "but observers" in waiting.reason and "start these anew" in waiting.advice


@pytest.mark.parametrize("how", ["leave", "crash"])
def test_a_newcomer_whose_only_contact_is_lost_goes_on_with_whom_it_heard_of(how: str) -> None:
    world = Stay("trainer", "trainer")
    world.run_until(12.0)
    contact, newcomer = world["p0"], world.newcomer("p0")
    world.until(lambda: newcomer.node.slot.answers, 2.0)
    getattr(world, how)(contact)
    world.until(lambda: votes(newcomer) and newcomer.node.log.attached[TRAIN].synced, 20.0)
    assert not world.said(newcomer, OUT_OF_REACH)


def test_newcomers_that_wait_for_one_that_waits_itself_are_told() -> None:
    """p1 was given p0, and p0 somebody who never comes: each of them says for whom it waits."""
    world = Stay()
    world.run_until(1.0)
    world.end(world["p0"])
    first = world.start(world.hosts["p0"], ("sim:nobody",))
    second = world.newcomer("p0")
    world.run_until(40.0)
    assert first.node.log.head == second.node.log.head == EMPTY
    assert world.said(first, "founding needs every listed address")[0][1].peers == ("sim:nobody",)
    ((at, waiting), *_) = world.said(second, "nobody here can found the run")
    assert waiting.peers == ("p0",) and at <= 1.0 + 2 * CONTACT_S


def test_an_ordinary_start_tells_nothing_of_the_kind() -> None:
    world = Stay("trainer", "helper", "observer")
    world.run_until(60.0)
    assert {w.reason for _, _, w in world.told} <= {"founding needs every listed address"}
    assert all(at < 1.0 for at, _, _ in world.told)


# ------------------------------------------------------------------ a channel that does not open

CANNOT_OPEN = f"training cannot begin (channel {TRAIN!r})"


def test_a_trainer_opens_a_channel_beside_helpers_that_have_no_use_for_it() -> None:
    """Two votes of three hold no state: they vote all the same, and rounds go on."""
    world = Stay("helper", "helper", bare=tuple((name, TRAIN) for name in ("p0", "p1", "p2")))
    world.run_until(10.0)
    trainer = world["p0"]
    assert len(trainer.node.log.state.electorate) == 3
    world.bare.clear()
    world._attach(trainer, TRAIN, None)
    world.until(lambda: trainer.node.log.state.round_of(TRAIN) >= 5)
    assert len(trainer.node.log.state.electorate) == 3 and not world.said(trainer, CANNOT_OPEN)
    late = world.newcomer("p1")
    world.until(lambda: late.voter in trainer.node.log.state.trainers and late.node.log.attached[TRAIN].synced)
    world.until(lambda: late.trainer.rounds >= 2)
    assert late.node.log.digest(TRAIN) == trainer.node.log.digest(TRAIN) or late.node.log.head != trainer.node.log.head


def test_a_channel_that_most_voters_do_not_open_is_told_with_their_names_until_they_do() -> None:
    world = Stay("trainer", "trainer", bare=(("p0", TRAIN), ("p1", TRAIN)))
    world.run_until(100.0)
    wisher = world["p2"]
    assert votes(wisher) and not wisher.node.log.is_open(TRAIN)
    ((at, first), (_, later), *_) = world.said(wisher, CANNOT_OPEN)
    assert OPENING_S <= at <= OPENING_S + 5.0 and set(first.peers) == {"p0", "p1"}
    assert first.reason.endswith("half of the peers with a vote or more are not ready") and later.waited_s == AGAIN_S
    assert "build their model or read their data" in first.advice and "observer" in first.advice
    assert not world.said(world["p0"], CANNOT_OPEN), "it wishes nothing"
    world.bare.discard(("p0", TRAIN))
    world._attach(world["p0"], TRAIN, None)
    world.until(lambda: wisher.node.log.is_open(TRAIN), 10.0)
    world.until(lambda: wisher.node.waits.now is None, 2.0)


def test_an_opening_is_not_put_off_by_rounds_that_are_shorter_than_its_patience() -> None:
    """Two of three wish a second channel; rounds of the first make each slot shorter than the wait for the third."""
    names = ("p0", "p1", "p2")
    world = Stay("trainer", "trainer", bare=tuple((name, SECOND) for name in names), channels=(TRAIN, SECOND))
    world.run_until(10.0)
    assert all(votes(world[name]) for name in names)
    before = world["p0"].node.log.state.round_of(TRAIN)
    world.bare.clear()
    for name in names[:2]:
        world._attach(world[name], SECOND, None)
    world.until(lambda: world["p0"].node.log.is_open(SECOND), 30.0)
    assert world["p0"].node.log.state.round_of(TRAIN) >= before + 3, "rounds went on meanwhile"


def test_a_second_channel_with_leases_is_told_why_it_does_not_open() -> None:
    """It was wished for before the other one was open here, or else it would have been refused."""
    names = ("p0", "p1")
    world = Stay("trainer", bare=tuple((name, SECOND) for name in names), channels=(TRAIN, SECOND))
    world.run_until(10.0)
    process, grid = world["p0"], world.grids[SECOND]
    node = process.node
    world.act(process, lambda now: node.attach(SECOND, ToyState(grid.numel, 0), grid, 0, now))
    node.slot.wishes[SECOND] = dataclasses.replace(node.slot.wishes[SECOND], lease_len=5)
    world.run_until(10.0 + OPENING_S + 5.0)
    reason = f"channel {SECOND!r} cannot open: it asks for leases, and those of this run go to {TRAIN!r}"
    assert world.said(process, reason) and not node.log.is_open(SECOND)


class Kind(ToyState):
    """Of a kind of its own."""

    def restore(self, image: memoryview) -> None:
        raise CheckpointError("another outer optimizer")


@pytest.mark.parametrize("seeds", [(0, 1), (1, 0)], ids=["one", "or the other"])
def test_an_opening_that_one_of_two_has_no_use_for_holds_up_nothing(seeds: tuple[int, int]) -> None:
    """Both open a channel, with states of two kinds. Who had the casting vote could never give it: neither the channel
    was opened, nor was there another round of anything."""
    world = Stay("trainer", bare=(("p0", SECOND), ("p1", SECOND)), channels=(TRAIN, SECOND))
    world.run_until(10.0)
    assert all(votes(p) for p in world.running()) and world["p0"].node.log.state.round_of(TRAIN) > 2
    grid = world.grids[SECOND]
    for process, seed in zip((world["p0"], world["p1"]), seeds, strict=True):
        node, state = process.node, Kind(grid.numel, seed)
        world.act(process, lambda now, node=node, state=state: node.attach(SECOND, state, grid, 0, now))  # type: ignore[misc]
    world.until(lambda: all(p.node.log.is_open(SECOND) for p in world.running()), 20.0)
    (bad,) = (p for p in world.running() if p.node.log.attached[SECOND].misfit)
    assert not bad.node.log.synced, "somebody waits for it yet"
    bad.node.log.attached[SECOND].abandoned = True
    assert bad.node.log.synced
    rounds = bad.node.log.state.round_of(TRAIN)
    world.until(lambda: bad.node.log.state.round_of(TRAIN) >= rounds + 5)
    (other,) = (p for p in world.running() if p is not bad)
    world.leave(other)
    rounds = bad.node.log.state.round_of(TRAIN)
    world.until(lambda: bad.node.log.state.round_of(TRAIN) >= rounds + 2)
    assert not world.said(bad, "the run's state is held by nobody")


def test_who_asks_why_is_told_how_far_the_slot_is() -> None:
    world = Stay("trainer")
    world.until(lambda: "p1" in world.hosts and world["p1"].node.log.state.electorate)
    newcomer, founder = world["p1"], world["p0"]
    waiting = newcomer.node.waits.why()
    assert not votes(newcomer) and waiting is not None
    stranger = world.newcomer("p0")
    world.until(lambda: stranger.node.slot.answers, 2.0)
    waiting_there = stranger.node.waits.why()
    assert waiting_there is not None and waiting_there.reason == "it has not heard yet how far the run is"
    assert waiting_there.peers in (("p0",), ("sim:p0",))
    assert waiting.reason.startswith("it has no vote yet") and waiting.peers == ("p0",)
    world.until(lambda: votes(newcomer) and founder.node.slot.plan is not None)
    waiting = founder.node.waits.why()
    assert waiting is not None and "is under way" in waiting.reason and set(waiting.peers) <= {"p1"}


def test_a_wish_that_was_given_up_is_no_reason_to_wait() -> None:
    world = Stay("trainer", "trainer", bare=(("p0", TRAIN), ("p1", TRAIN)))
    world.run_until(OPENING_S + 10.0)
    wisher = world["p2"].node
    assert wisher.waits.now is not None and wisher.waits.now.reason.startswith(CANNOT_OPEN)
    wisher.log.attached[TRAIN].abandoned = True
    world.until(lambda: wisher.waits.now is None, 2.0)


def test_a_state_that_only_a_helper_without_it_could_give_is_told_as_held_by_nobody() -> None:
    world = Stay("helper", bare=(("p1", TRAIN),))
    world.until(lambda: "p1" in world.hosts and world["p0"].node.log.state.round_of(TRAIN) >= 3)
    world.leave(world["p0"])
    late = world.newcomer("p1")
    world.until(lambda: world.said(late, "the run's state is held by nobody who is here"), 30.0)
    assert not late.node.log.attached[TRAIN].synced


def test_who_has_just_learned_of_others_entries_counts_down_from_then_on() -> None:
    """They were alive when they decided them, however long ago it saw them: it said that it was about to go on."""
    world = Stay("trainer", "trainer")
    world.until(lambda: len(world.running()) == 3 and all(votes(p) for p in world.running()))
    last = world["p2"]
    world.crash(world["p0"])
    world.crash(world["p1"])
    world.until(lambda: world.said(last, "no quorum"))
    world.run_until(world.now + 10.0)
    at, t_evict_s = world.now, last.node.members.t_evict_s
    last.node.log.learned_run = last.node.ctx.running_s
    world.until(lambda: world.said(last, "no quorum")[-1][0] > at, 10.0)
    assert (world.said(last, "no quorum")[-1][1].left_s or 0.0) > t_evict_s - 10.0
    world.until(lambda: last.node.log.state.electorate == (last.voter,), 2 * t_evict_s)
    assert world.now - at >= t_evict_s


# ------------------------------------------------------------------ who trains again


def test_that_it_trains_again_is_told_to_all_voters_at_once() -> None:
    world = Stay("trainer", "trainer")
    world.run_until(10.0)
    again, others = world["p0"], {"p1", "p2"}
    assert all(votes(p) for p in world.running())
    effects = again.node.describe(again.host.clock_s(world.now), eta_s=NEVER_S)
    assert not told_of(effects, again), "the next probes tell it"
    effects = again.node.describe(again.host.clock_s(world.now), eta_s=-1.0)
    assert told_of(effects, again) == dict.fromkeys(others, -1.0)
    assert not told_of(again.node.describe(again.host.clock_s(world.now), eta_s=5.0), again)


def told_of(effects: list[Effect], process: Process) -> dict[str, float]:
    """Who is sent its record, and what that says of its next contribution."""
    pings = [(e.to, e.message.gossip.records) for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)]
    return {to: r.eta_s for to, records in pings for r in records if r.voter == process.voter}
