"""Groups that form by themselves: as soon as all wait for the same peers, and whole, whatever is lost on the way."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlc.comm import meetings
from dlc.comm.calls import Call, GroupDone, GroupFailed, GroupFormed, MeetingFailed
from dlc.comm.crowd import ANSWER_S, NOT_COME, Crowd, RollCall, crowd_digest, crowd_nonce
from dlc.comm.effects import Send
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.meetings import BOARD_PREFIX
from dlc.comm.meshmessages import Begin, Decline, Invite, Notices, Seat, Wish
from dlc.comm.messages import GridSpec
from dlc.comm.seating import seats_of, wish_of
from dlc.comm.wire import pack
from dlc.sim.meshnet import Host, MeshNet

NUMEL, CHUNK = 96, 16
KEY = "k"


class Caller:
    """One peer's call: its vector is `i` everywhere."""

    def __init__(self, net: MeshNet, host: Host, i: int, **options: Any) -> None:
        self.host, self.first = host, len(host.told)
        self.out = torch.full((NUMEL,), float("nan"))
        contributes = options.pop("contributes", True)
        receives = options.pop("receives", True)
        given = torch.full((NUMEL,), float(i)) if contributes else None
        self.call = call = Call(KEY, Grid(NUMEL, CHUNK, "fp32"), given, self.out if receives else None, **options)
        net.act(host, lambda mesh, now: mesh.meet(call, now))

    def told(self, *kinds: type) -> list[Any]:
        return [event for event in self.host.told[self.first :] if isinstance(event, kinds)]

    @property
    def end(self) -> Any:
        return next(iter(self.told(GroupDone, GroupFailed, MeetingFailed)), None)

    def has_mean_of(self, *vectors: int) -> bool:
        assert isinstance(self.end, GroupDone), self.end
        return bool(torch.allclose(self.out, torch.full((NUMEL,), sum(vectors) / len(vectors))))


def calls(net: MeshNet, hosts: list[Host], **options: Any) -> list[Caller]:
    return [Caller(net, host, i, **options) for i, host in enumerate(hosts, 1)]


def ended(callers: list[Caller]) -> bool:
    return all(c.end is not None for c in callers)


def steady(latency_s: float) -> tuple[float, float]:
    return latency_s, 1.0001 * latency_s


def shows(m: Any) -> bool:
    """Whether it brings a wish."""
    return isinstance(m, Notices) and any(item.key == BOARD_PREFIX + KEY and not item.gone for item in m.items)


def test_a_group_is_formed_half_a_round_trip_after_the_last_has_come() -> None:
    net = MeshNet(1, latency_s=steady(0.2), ordered=True)
    net.network.weather = replace(net.network.weather, jitter=0.0, spike=0.0)  # which is added to the latency
    hosts = net.add(5)
    callers = calls(net, hosts[:4])
    net.run(1.0)
    assert not any(c.told(GroupFormed) for c in callers), "they wait for the fifth"
    callers.append(Caller(net, hosts[4], 5))
    assert net.until(lambda: all(c.told(GroupFormed) for c in callers)) < 0.21
    assert net.until(lambda: ended(callers)) < 0.21 + 4 * 0.2  # contributions asked for and sent, results sent
    assert all(c.has_mean_of(1, 2, 3, 4, 5) for c in callers)
    assert net.sent["Invite"] == net.sent["Accept"] == net.sent["Begin"] == 0


@pytest.mark.parametrize(("unseen", "blind"), list(itertools.permutations(range(4), 2)))
def test_who_has_not_seen_a_wish_of_somebody_is_told_of_the_group(unseen: int, blind: int) -> None:
    """Whatever each of them does there; its author shows the wish no longer when it is in."""
    net = MeshNet(2, latency_s=steady(0.02))
    hosts = net.add(4)
    lost = (hosts[unseen].name, hosts[blind].name)
    net.tamper = lambda source, target, m: None if (source, target) == lost and shows(m) else m
    callers = [
        Caller(net, hosts[0], 1),
        Caller(net, hosts[1], 2, owns=False),
        Caller(net, hosts[2], 3, receives=False),
        Caller(net, hosts[3], 4, contributes=False, receives=False),
    ]
    took_s = net.until(lambda: ended(callers), 20.0)
    assert took_s < 2.0
    nonces = {c.end.outcome.nonce for c in callers}
    assert len(nonces) == 1 and all(not c.end.outcome.missing for c in callers)
    assert all(c.has_mean_of(1, 2, 3) for c in callers[:2])


def test_nobody_sees_anything_of_one_and_all_are_in_one_group() -> None:
    net = MeshNet(3, latency_s=steady(0.02))
    hosts = net.add(4)
    mute = hosts[1].name
    net.tamper = lambda source, target, m: None if source == mute and shows(m) else m
    callers = calls(net, hosts)
    assert net.until(lambda: ended(callers), 20.0) < 2.0
    assert all(c.has_mean_of(1, 2, 3, 4) for c in callers)


def test_members_that_disagree_on_who_owns_a_chunk_have_the_mean_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares are made of floating point: hosts may round them differently."""
    net = MeshNet(11, latency_s=steady(0.02))
    hosts, formed = net.add(3), list[tuple[Seat, ...]]()

    def rounded(*args: Any) -> tuple[Seat, ...]:
        first, second, third = seats_of(*args)
        if not formed:
            first, second = replace(first, chunks=first.chunks - 1), replace(second, chunks=second.chunks + 1)
        formed.append((first, second, third))
        return formed[-1]

    monkeypatch.setattr(meetings, "seats_of", rounded)
    callers = calls(net, hosts)
    assert net.until(lambda: ended(callers), 20.0) < 1.0
    assert len(formed) == 3 and formed[0] != formed[1] == formed[2]
    assert all(c.has_mean_of(1, 2, 3) and not c.end.outcome.missing for c in callers)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_who_gives_up_after_it_was_seen_is_left_out_and_counts_for_nobody_s_least(least: int) -> None:
    net = MeshNet(4, latency_s=steady(0.3))
    hosts = net.add(3)
    out = Caller(net, hosts[2], 3)
    net.run(1.0)
    callers = calls(net, hosts[:2], least=least)
    net.run(0.1)
    net.act(hosts[2], lambda mesh, now: mesh.give_up(out.call, now))
    assert net.until(lambda: ended(callers)) < 0.3 + ANSWER_S + 12 * 0.3 + 2.0
    assert out.end is None and out.out.isnan().all()
    for caller in callers:
        if least < 3:
            assert caller.has_mean_of(1, 2) and caller.end.outcome.missing == {hosts[2].name: NOT_COME}
        else:
            assert isinstance(caller.end, GroupFailed) and caller.end.why == "2 of at least 3 came"
    net.run(2.0)
    assert all(not host.mesh._groups and not host.mesh.parcels.holdings._held for host in hosts[:2])


def test_who_has_given_up_before_the_others_form_a_group_is_in_none_and_not_waited_for() -> None:
    net = MeshNet(12, latency_s=steady(0.1), ordered=True)
    hosts = net.add(3)
    out = Caller(net, hosts[2], 3)
    net.run(1.0)
    first = Caller(net, hosts[0], 1, patience_s=3.0)
    net.act(hosts[2], lambda mesh, now: mesh.give_up(out.call, now))
    net.run(1.0)
    callers = [first, Caller(net, hosts[1], 2, patience_s=3.0)]
    net.until(lambda: ended(callers))
    assert all(c.has_mean_of(1, 2) and len(c.end.outcome.seats) == 2 for c in callers)


def test_a_call_that_is_given_up_again_ends_no_other_of_its_key() -> None:
    """Neither while that waits nor while it averages: the one that began after it ended with it."""
    net = MeshNet(12, latency_s=steady(0.1), ordered=True)
    hosts = net.add(2)
    over = Caller(net, hosts[0], 3)
    net.act(hosts[0], lambda mesh, now: mesh.give_up(over.call, now))
    anew = Caller(net, hosts[0], 1)
    net.act(hosts[0], lambda mesh, now: mesh.give_up(over.call, now))
    assert list(hosts[0].mesh._meetings) == [KEY]
    other = Caller(net, hosts[1], 2)
    net.until(lambda: anew.told(GroupFormed))
    assert anew.end is None
    net.act(hosts[0], lambda mesh, now: mesh.give_up(over.call, now))
    net.until(lambda: ended([anew, other]))
    assert anew.has_mean_of(1, 2) and other.has_mean_of(1, 2) and over.out.isnan().all()


@pytest.mark.parametrize("how", ["dies", "hangs", "leaves"])
def test_one_that_shows_a_wish_and_is_never_heard_of_makes_no_group_of_two(how: str) -> None:
    net = MeshNet(5, latency_s=steady(0.1), detect_s=1.0)
    hosts = net.add(2)
    fault = {"dies": net.kill, "hangs": net.freeze, "leaves": net.leave}[how]
    left = Caller(net, hosts[0], 1, least=2)
    Caller(net, hosts[1], 2, least=2)
    net.clock.at(net.now + 0.05, fault, hosts[1])
    net.until(lambda: left.end is not None)
    assert isinstance(left.end, GroupFailed | MeetingFailed) and "1 of at least 2 came" in left.end.why


def test_where_the_crowds_differ_somebody_invites() -> None:
    net = MeshNet(6)
    hosts = net.add(3)
    names = [host.name for host in hosts]
    callers = [
        Caller(net, host, i, expected=tuple(crowd), least=3, show_to=tuple(names), patience_s=4.0)
        for i, (host, crowd) in enumerate(zip(hosts, (names, names, names[1:]), strict=True), 1)
    ]
    net.until(lambda: ended(callers))
    assert all(c.has_mean_of(1, 2, 3) for c in callers) and net.sent["Begin"] >= 2


@pytest.mark.parametrize("how", ["nonce", "seats", "sender", "wish", "weight", "roles", "few"])
def test_a_group_that_is_not_of_my_wish_does_not_begin_here(how: str) -> None:
    net = MeshNet(7)
    hosts = net.add(4)
    me = Caller(net, hosts[0], 1, least=3)
    mine = wish_of(hosts[0].mesh.board.get(BOARD_PREFIX + KEY)[hosts[0].name].value)
    assert mine is not None
    wishes = {host.voter: replace(mine, nonce=7 + i) for i, host in enumerate(hosts[:3])} | {hosts[0].voter: mine}
    if how == "wish":
        wishes[hosts[0].voter] = replace(mine, nonce=mine.nonce ^ 1)
    if how == "weight":
        wishes[hosts[0].voter] = replace(mine, weight=2.0)
    if how == "roles":
        wishes[hosts[0].voter] = replace(mine, receives=False)
    if how == "few":
        del wishes[hosts[2].voter]
    seats = seats_of(wishes, dict.fromkeys(wishes, b""), Grid(NUMEL, CHUNK, "fp32"))
    nonce = crowd_nonce(KEY, [(voter, wish.nonce) for voter, wish in wishes.items()])
    begin = Begin(KEY, nonce ^ (how == "nonce"), GridSpec(NUMEL, CHUNK, "fp32"), seats, crowd=True)
    if how == "seats":
        begin = replace(begin, seats=tuple(replace(seat, chunks=seat.chunks + 1) for seat in seats))
    net._deliver(hosts[0], hosts[3 if how == "sender" else 1].voter, begin)
    assert not me.told(GroupFormed) and len(hosts[0].bad) == (how in ("nonce", "seats", "sender"))
    assert net.sent["Decline"] == 1, "who told of it is told"
    good = {host.voter: replace(mine, nonce=7 + i) for i, host in enumerate(hosts[:3])} | {hosts[0].voter: mine}
    seats = seats_of(good, dict.fromkeys(good, b""), Grid(NUMEL, CHUNK, "fp32"))
    nonce = crowd_nonce(KEY, [(voter, wish.nonce) for voter, wish in good.items()])
    net._deliver(hosts[0], hosts[1].voter, Begin(KEY, nonce, begin.grid, seats, crowd=True))
    assert me.told(GroupFormed)


@pytest.mark.parametrize("other", [{}, {"weight": 6.0}, {"gather": b"new"}, {"label": "new"}, {"owns": False}], ids=str)
def test_who_waits_anew_with_another_offer_is_in_no_group_of_the_one_before(other: dict[str, Any]) -> None:
    """It counted with the weight, and told the bytes, of the call that it had given up."""
    net = MeshNet(12, latency_s=steady(0.05), ordered=True)
    hosts, offer = net.add(3), {"weight": 5.0, "gather": b"old", "least": 2}
    before = Caller(net, hosts[0], 1, **offer)
    others = [Caller(net, hosts[1], 2)]
    net.run(0.2)
    others.append(Caller(net, hosts[2], 3))
    net.run(0.02)  # its wish, which makes the crowd whole, is on its way
    net.act(hosts[0], lambda mesh, now: mesh.give_up(before.call, now))
    anew = Caller(net, hosts[0], 4, **{**offer, **other})
    net.until(lambda: ended([*others, anew]), 20.0)
    for caller in others:
        included = caller.end.outcome.included.keys()
        assert included == {host.name for host in (hosts[1:] if other else hosts)}
    assert isinstance(anew.end, MeetingFailed if other else GroupDone)


def test_a_late_begin_of_a_group_that_is_over_begins_nothing() -> None:
    """The second call waits under the same key."""
    net = MeshNet(8)
    hosts = net.add(2)
    first = calls(net, hosts)
    groups: list[Begin] = []
    net.until(lambda: bool(hosts[0].mesh._groups))
    groups += [group.begin for group in hosts[0].mesh._groups.values()]
    net.until(lambda: ended(first) and not hosts[0].mesh._groups and not hosts[1].mesh._groups)
    again = Caller(net, hosts[1], 7)
    net._deliver(hosts[1], hosts[0].voter, groups[0])
    net.run(0.5)
    assert not again.told(GroupFormed) and not hosts[1].mesh._groups


def test_one_who_invites_is_told_of_the_group_that_it_is_in() -> None:
    """It has not seen a wish for so long that it would begin another group."""
    net = MeshNet(9, latency_s=steady(0.02))
    hosts = net.add(3)
    lost = (hosts[1].name, hosts[0].name)

    def tamper(source: str, target: str, m: Any) -> Any:
        return None if (source, target) == lost and isinstance(m, Notices | Begin) else m

    net.tamper = tamper
    callers = calls(net, hosts)
    net.until(lambda: bool(hosts[2].mesh._groups))
    meeting = hosts[0].mesh._meetings[KEY]
    (begin,) = [group.begin for group in hosts[2].mesh._groups.values()]
    invited = next(seat.wish for seat in begin.seats if seat.voter == hosts[2].voter)
    net._deliver(hosts[2], hosts[0].voter, Invite(KEY, 99, invited))
    net.until(lambda: meeting.over, 0.1)
    net.until(lambda: ended(callers), 10.0)
    assert all(c.has_mean_of(1, 2, 3) for c in callers)


def test_what_a_crowd_has_seen_counts_until_it_is_given_up() -> None:
    me, other = Voter("a", 1), Voter("b", 1)
    wish = Wish(1, GridSpec(1, 1, "fp32"), 1.0, "", True, True, True, 0, 1, 0.0, 0.0, crowd_digest("ab"), b"")
    crowd = Crowd(me, wish, "ab")
    assert crowd.whole() is None
    crowd.see(Voter("c", 1), wish)
    crowd.see(other, replace(wish, nonce=2, crowd=crowd_digest("abc")))
    assert crowd.whole() is None
    crowd.see(other, replace(wish, nonce=3))
    assert crowd.whole() == {me: wish, other: replace(wish, nonce=3)}
    crowd.give_up(other, 2)
    crowd.give_up(Voter("b", 2), 3)
    assert crowd.whole() is not None
    crowd.give_up(other, 3)
    assert crowd.whole() is None
    crowd.see(other, replace(wish, nonce=3))
    assert crowd.whole() is None, "the board shows it until its withdrawal has come"
    crowd.see(other, replace(wish, nonce=4))
    crowd.see(Voter("b", 2), replace(wish, nonce=5))
    assert crowd.whole() == {me: wish, Voter("b", 2): replace(wish, nonce=5)}, "a new process in its place"
    crowd.see(Voter("b", 2), replace(wish, nonce=6, crowd=b""))
    assert crowd.whole() is None


def test_the_nonce_names_the_wishes_whatever_their_order() -> None:
    wishes = [(Voter("a", 1), 7), (Voter("b", 2), 8), (Voter("c", 1), 9)]
    nonces = {crowd_nonce(KEY, order) for order in itertools.permutations(wishes)}
    others = {
        crowd_nonce("other", wishes),
        crowd_nonce(KEY, wishes[:2]),
        crowd_nonce(KEY, [*wishes[:2], (Voter("c", 1), 10)]),
        crowd_nonce(KEY, [*wishes[:2], (Voter("c", 2), 9)]),
    }
    assert len(nonces) == 1 and len(others) == 4 and not nonces & others


@pytest.mark.parametrize(("field", "value"), [("up_Bps", -1.0), ("down_Bps", float("nan")), ("weight", -1.0)])
def test_a_wish_that_no_correct_peer_shows_is_none(field: str, value: float) -> None:
    wish = Wish(1, GridSpec(1, 1, "fp32"), 1.0, "", True, True, True, 0, 1, 0.0, 0.0, b"", b"")
    assert wish_of(pack(wish)) == wish
    assert wish_of(pack(replace(wish, **{field: value}))) is None


def test_a_decline_of_another_group_or_wish_changes_nothing() -> None:
    net = MeshNet(10, latency_s=steady(0.2))
    hosts = net.add(2)
    callers = calls(net, hosts, least=2)
    net.until(lambda: bool(hosts[0].mesh._groups))
    net._deliver(hosts[0], hosts[1].voter, Decline(KEY, 5, 0))
    net._deliver(hosts[0], hosts[1].voter, Decline(KEY, 0, 12345))
    net.until(lambda: ended(callers))
    assert all(c.has_mean_of(1, 2) for c in callers)


class Rolls:
    """The roll of three others in a group, kept by the first of four."""

    def __init__(self) -> None:
        self.net = MeshNet(11, latency_s=steady(0.05))
        hosts = self.net.add(4)
        self.ground = hosts[0].mesh.ground
        self.others = [host.voter for host in hosts[1:]]
        seats = tuple(Seat(h.voter, i, 1.0, True, True, 1, 0.0, 0.0, b"") for i, h in enumerate(hosts, 1))
        self.begin = Begin(KEY, 77, GridSpec(NUMEL, CHUNK, "fp32"), seats, crowd=True)
        self.ground.drain()
        self.roll = RollCall(self.ground, self.begin, seats[1:])

    def told_after(self, seconds: float) -> list[str]:
        """Who is sent Begin within that time."""
        told = []
        for _ in range(round(seconds / 0.1)):
            self.ground.wake(self.ground.now + 0.1)
            self.roll.tick()
            told += [effect.to for effect in self.ground.drain() if isinstance(effect, Send)]
        return told


def test_who_was_heard_of_is_not_told_again_and_has_come() -> None:
    rolls = Rolls()
    first, *others = rolls.others
    rolls.roll.heard(first)
    assert rolls.told_after(3.0) == [v.peer for v in others] * 3, "after 0.4, 1.2 and 2.8 s"
    assert not rolls.roll.lacks(first) and all(rolls.roll.lacks(v) for v in others)
    rolls.roll.lost(first)
    assert rolls.roll.never == set(), "it had come, whatever became of it"
    assert not rolls.roll.declined(first, Decline(KEY, 77, 0)) and rolls.roll.tick() == []
    for voter in others:
        rolls.roll.lost(voter)
    assert rolls.roll.never == set(others) and not any(map(rolls.roll.lacks, others))
    assert rolls.roll.next_deadline() is None and rolls.told_after(10.0) == []
    rolls.roll.heard(others[0])
    assert rolls.roll.never == set(others), "others may have counted it out"


def test_a_decline_counts_at_once_or_when_its_author_has_had_the_time_to_wait_anew() -> None:
    rolls = Rolls()
    first, second, third = rolls.others
    stranger = Voter("stranger", 1)
    assert not rolls.roll.declined(stranger, Decline(KEY, 77, 0))
    assert not rolls.roll.declined(first, Decline(KEY, 76, 0)), "it is of another group"
    assert rolls.roll.declined(first, Decline(KEY, 77, 0)), "it never had that wish"
    assert not rolls.roll.declined(second, Decline(KEY, 77, 9)), "it gave up a wish that is not in this group"
    assert not rolls.roll.declined(second, Decline(KEY, 77, 3)) and not rolls.roll.declined(third, Decline(KEY, 77, 4))
    rolls.roll.heard(third)
    began = rolls.ground.running_s
    while rolls.roll.tick() == []:
        assert rolls.ground.running_s - began < 2 * ANSWER_S
        rolls.ground.wake(rolls.ground.now + 0.05)
        rolls.ground.drain()
    assert rolls.ground.running_s - began >= ANSWER_S and rolls.roll.tick() == [second], "the third waited anew"


def test_of_a_decline_of_another_wish_and_of_one_who_is_lost_nothing_is_waited_for() -> None:
    rolls = Rolls()
    first, second, third = rolls.others
    rolls.roll.declined(first, Decline(KEY, 77, 9))
    rolls.roll.declined(second, Decline(KEY, 77, 3))
    rolls.roll.lost(second)
    rolls.ground.wake(rolls.ground.now + 1.0)
    rolls.roll.declined(third, Decline(KEY, 77, 4))
    for _ in range(round(ANSWER_S)):
        rolls.ground.wake(rolls.ground.now + 1.0)
    assert rolls.roll.tick() == [] and rolls.roll.never == {second}
    rolls.ground.wake(rolls.ground.now + 1.0)
    assert rolls.roll.tick() == [third]


def test_a_wish_that_was_given_up_before_it_was_seen_is_not_taken_up() -> None:
    one, two, stranger = (Voter(peer, 1) for peer in ("a", "b", "z"))
    wish = Wish(1, GridSpec(1, 1, "fp32"), 1.0, "", True, True, True, 0, 1, 0.0, 0.0, crowd_digest("ab"), b"")
    crowd = Crowd(one, wish, "ab")
    for voter in (two, stranger):
        crowd.give_up(voter, 5)
        crowd.see(voter, replace(wish, nonce=5))
    assert crowd.whole() is None and crowd.seen == set()
    crowd.see(two, replace(wish, nonce=6))
    crowd.see(stranger, replace(wish, nonce=6))
    assert crowd.seen == {two} and set(crowd.whole() or ()) == {one, two}
