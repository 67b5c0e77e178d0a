"""What membership machines say of themselves and of others: how far it gets, how large it becomes, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlc.comm import piggyback, probing, records
from dlc.comm.effects import Send
from dlc.comm.ids import Voter
from dlc.comm.messages import Ack, Gossip, Leave, Ping, Rumour
from dlc.comm.records import Standing
from dlc.comm.wire import HEADER_BYTES_MAX, pack
from tests.comm.swim_net import Net, record_of, signed, swarm, verify


def test_news_of_a_record_reach_all_within_about_a_probe_period_each() -> None:
    net = swarm("abcde")
    net.hosts["a"].machine.update_own(head=b"new", depth=7)

    def seen(name: str) -> bool:
        record = net.hosts[name].machine.record("a")
        return record is not None and record.depth == 7

    assert net.run_until(lambda: all(map(seen, "bcde")), 10) <= 1.5


def test_news_reach_one_that_cannot_be_reached_directly() -> None:
    net = swarm("abcd")
    net.part("a", "d")
    net.hosts["a"].machine.update_own(depth=7)
    assert net.run_until(lambda: net.hosts["d"].machine.record("a").depth == 7, 10) < 3.0  # type: ignore[union-attr]


def test_a_record_is_signed_once_per_change_that_is_sent() -> None:
    net = swarm("abcd")
    host = net.hosts["a"]
    before = host.signed
    net.run(20)
    assert host.signed == before
    for depth in range(100):
        host.machine.update_own(depth=depth)
    host.machine.update_own(depth=99)
    net.run(20)
    assert host.signed == before + 1
    assert host.machine.own.seq == 99  # depth was 0 already


def test_in_calm_pings_carry_next_to_nothing() -> None:
    """News stop being passed on; what stays is the one record that each ping carries."""
    net = swarm("abcdef")
    net.run(30)
    net.tap = []
    net.run(5)
    pings = [message for _, _, message in net.tap if isinstance(message, Ping)]
    assert len(pings) > 50
    assert max(len(ping.gossip.records) for ping in pings) <= 1
    assert not any(ping.gossip.rumours for ping in pings)
    told = {record.voter.peer for ping in pings for record in ping.gossip.records}
    assert told == set("abcdef")  # what was lost as news gets round in time


@pytest.mark.parametrize(
    "bad",
    [
        {"signature": b"forged"},
        {"tokens": float("nan")},
        {"status": b"x" * (records.STATUS_BYTES_MAX + 1)},
        {"control": ("x:1",) * (records.ADDRESSES_MAX + 1)},
        {"seq": 1 << 63},
        {"depth": -1},
        {"up_Bps": float("nan")},
        {"up_Bps": float("inf")},
        {"down_Bps": -1.0},
        {"down_Bps": 2 * records.RATE_MAX_Bps},
    ],
)
def test_a_record_that_no_correct_peer_makes_is_dropped(bad: dict[str, object]) -> None:
    host = Net().start("a")
    record = signed(record_of("b"), **bad)
    host.machine.learn(replace(record, **bad), 1001.0)
    assert host.machine.record("b") is None
    host.machine.learn(signed(record_of("b")), 1001.0)
    assert host.machine.record("b") is not None


def test_a_record_with_a_greater_seq_and_a_wrong_signature_does_not_replace_the_right_one() -> None:
    host = Net().start("a")
    host.machine.learn(signed(record_of("b")), 1001.0)
    host.machine.learn(replace(signed(record_of("b")), seq=5, head=b"forged"), 1001.0)
    host.machine.receive(Voter("x", 1), Leave(replace(signed(record_of("b")), left=True, seq=9)), 1001.0)
    assert host.machine.record("b") == signed(record_of("b"))
    assert not host.machine.gone(Voter("b", 1 << 32))


def test_the_table_is_bounded_and_those_who_proved_to_live_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    net = swarm("abc")
    monkeypatch.setattr(records, "RECORDS_MAX", 10)
    machine = net.hosts["a"].machine
    for k in range(50):
        machine.learn(signed(record_of(f"stranger{k}")), net.now + k * 1e-3)
    known = {record.voter.peer for record in machine.records()}
    assert len(known) == 11 and known >= {"a", "b", "c", "stranger49"}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many of the dead are kept."""
    monkeypatch.setattr(records, "DEAD_MAX", 8)
    return 8


def after_many_crashes(net: Net, cut_off: str = "") -> None:
    """One after the other came to "a", and died without a word; then a while passes. None met those who are cut off."""
    for guest in (f"guest{k}" for k in range(40)):
        net.cut |= {way for name in cut_off for way in ((guest, name), (name, guest))}
        net.start(guest, "a")
        net.run(1)
        net.crash(guest)
    net.run(200)


def test_of_all_who_ever_died_the_last_are_kept_and_nobody_brings_the_others_back(few: int) -> None:
    net = swarm("abc")
    after_many_crashes(net)
    tables = [net.hosts[name].machine for name in "abc"]
    known = [{r.voter.peer for r in machine.records()} for machine in tables]
    assert all(peers == {"a", "b", "c"} | {f"guest{k}" for k in range(40 - few, 40)} for peers in known)
    net.start("n", "a")
    assert net.run_until(lambda: net.all_alive("abcn"), 10) < 2.0
    net.run(300)
    assert all(len(machine.records()) == 4 + few for machine in (*tables, net.hosts["n"].machine))
    first = Voter("guest0", 1 << 32)
    assert tables[0].unseen_s(first) > 500 and not tables[0].gone(first)


@pytest.mark.parametrize("sides", [("ab", "c"), ("ab", "cd")])
def test_who_was_cut_off_while_many_died_is_found_again(few: int, sides: tuple[str, str]) -> None:
    net = swarm("".join(sides))
    for host in net.hosts.values():
        host.machine.watch([])
    net.part(*sides)
    net.run(30)
    after_many_crashes(net, cut_off=sides[1])
    assert net.hosts["a"].machine.record("c") is None and net.hosts["c"].machine.record("a") is not None
    net.cut.clear()
    assert net.run_until(lambda: net.all_alive("".join(sides)), 60) < 15.0


def test_what_is_kept_of_who_left_or_was_forgotten_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in (("TOMBSTONES_MAX", 3), ("FORGOTTEN_MAX", 3), ("DEAD_MAX", 0)):
        monkeypatch.setattr(records, limit, most)
    table = records.RecordTable(record_of("a"), signed, verify)
    names = [f"g{k}" for k in range(8)]
    for name in names:
        table.merge(signed(record_of(name)), 0.0)
        table.forget(list(table.members.values()), 1.0)
    assert list(table.forgotten) == names[-3:] and not table.members
    for name in names:
        table.merge(signed(record_of(name), left=True, seq=9), 0.0)
    assert list(table.tombstones) == names[-3:] and not table.forgotten


def test_pings_without_an_answer_are_remembered_for_a_while_and_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    net = swarm("ab")
    net.crash("b")
    net.run(3 * probing.PING_KEEP_S)
    machine = net.hosts["a"].machine
    pings = machine._prober.pings
    assert pings and all(ping.sent_run > machine.running_s - probing.PING_KEEP_S - 1.0 for ping in pings.values())
    monkeypatch.setattr(probing, "PINGS_MAX", most := len(pings))
    for _ in range(20):
        machine.begin_refresh(net.now)
    assert len(pings) == most and [ping.generation for ping in pings.values()][-1] == 20


def test_whoever_votes_is_not_forgotten_and_is_heard_of_again_where_it_was(few: int) -> None:
    net = swarm("abc")
    c = net.hosts["c"].voter
    a = net.hosts["a"].machine
    a.watch([a.me, c])
    net.hosts["b"].machine.watch([])
    net.crash("c")
    net.run(30)
    after_many_crashes(net)
    assert a.record("c") is not None and net.hosts["b"].machine.record("c") is None
    net.hosts["b"].machine.watch([c])
    net.run_until(lambda: net.hosts["b"].machine.record("c") is not None, 60)
    assert net.hosts["b"].machine.record("c") == a.record("c")


def test_a_message_stays_small_in_a_large_swarm() -> None:
    machine = Net().start("a").machine
    status, addresses = b"x" * records.STATUS_BYTES_MAX, ("h" * 250 + ":1",) * records.ADDRESSES_MAX
    for k in range(300):
        machine.learn(signed(record_of(f"p{k}"), status=status, control=addresses, bulk=()), 1000.0)
    stranger = signed(record_of("z"))
    effects = machine.receive(stranger.voter, Ping(1, Gossip((stranger,), ())), 1000.0)
    (ack,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ack)]
    assert len(ack.gossip.records) <= piggyback.TABLE_RECORDS_MAX + 2
    assert len(pack(ack)) < HEADER_BYTES_MAX / 8


def test_a_ping_of_a_stranger_is_answered_and_tells_it_the_table() -> None:
    net = swarm("abc")
    net.run(30)  # no news under way
    machine = net.hosts["a"].machine
    stranger = signed(record_of("z"))
    (answer, *_) = machine.receive(stranger.voter, Ping(5, Gossip((), ())), net.now)
    assert isinstance(answer, Send) and answer.to == "z"
    assert answer.message == Ack(5, Gossip((machine.own,), ()))
    effects = machine.receive(stranger.voter, Ping(6, Gossip((stranger,), ())), net.now)
    (ack,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ack)]
    assert {record.voter.peer for record in ack.gossip.records} == {"a", "b", "c"}


def test_who_has_left_is_told_to_others_by_those_who_heard_it() -> None:
    net = swarm("abc")
    net.run(30)
    machine = net.hosts["a"].machine
    gone = signed(machine._table.members["c"].record, left=True, seq=machine._table.members["c"].record.seq + 1)
    machine.receive(gone.voter, Leave(gone), net.now)
    assert machine._table.members.keys() == {"b"}
    assert gone in machine._news.fill(machine._table.members["b"]).records


def test_who_is_said_to_be_dead_is_told_so_with_each_message_until_it_says_that_it_lives() -> None:
    """However long ago that was passed on to all others."""
    net = swarm("abc")
    machine, said_of = net.hosts["a"].machine, net.hosts["c"].voter
    machine.receive(net.hosts["b"].voter, Ping(1, Gossip((), (Rumour(said_of, Standing.DEAD, 0),))), net.now)
    news, (b, c) = machine._news, (machine._table.members[name] for name in "bc")
    for _ in range(100):
        news.fill(b)
    assert not news.fill(b).rumours
    for _ in range(2):
        assert news.fill(c).rumours == (Rumour(said_of, Standing.DEAD, 0),)
    machine.receive(said_of, Ping(2, Gossip((), (Rumour(said_of, Standing.ALIVE, 1),))), net.now)
    for _ in range(100):
        news.fill(b)
    assert not news.fill(c).rumours


@pytest.mark.parametrize("rumour", [Rumour(Voter("b", 1 << 32), 7, 0), Rumour(Voter("b", 1 << 32), 1, 1 << 63)])
def test_rumours_out_of_range_are_ignored(rumour: Rumour) -> None:
    net = swarm("ab")
    net.hosts["a"].machine.receive(net.hosts["b"].voter, Ping(1, Gossip((), (rumour,))), net.now)
    net.run(2)
    assert not net.log
