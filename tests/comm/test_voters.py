"""Membership tells processes apart, not only peers: leave, restart, replacement, refresh."""

from __future__ import annotations

from dlc.comm.effects import Answer, Notify, Send
from dlc.comm.events import MemberLeft, SelfReplaced
from dlc.comm.ids import Voter
from dlc.comm.messages import Ack, Gossip, Ping
from tests.comm.swim_net import Net, record_of, signed, swarm


def test_a_leave_is_known_at_once_everywhere() -> None:
    net = swarm("abcde")
    host = net.hosts["c"]
    net.cut.add(("c", "e"))  # e hears it from others
    net.carry_out(host, host.machine.leave(net.now))
    assert host.machine.next_deadline() is None and host.machine.tick(net.now) == []
    net.crash("c")
    gone = lambda name: net.hosts[name].machine.gone(host.voter)  # noqa: E731
    assert net.run_until(lambda: all(map(gone, "abd")), 5) <= 0.06
    assert net.run_until(lambda: gone("e"), 5) < 1.0
    net.run(30)
    assert all(net.hosts[name].machine.record("c") is None for name in "abde")
    assert net.said("MemberLeft") == {(at, "c") for at in "abde"}
    assert not net.said("MemberDown")


def test_an_old_record_does_not_bring_back_one_that_left() -> None:
    net = swarm("abc")
    old = net.hosts["c"].machine.own
    net.carry_out(net.hosts["c"], net.hosts["c"].machine.leave(net.now))
    net.crash("c")
    net.run(30)
    a = net.hosts["a"].machine
    a.learn(signed(old, seq=old.seq), net.now)
    assert a.gone(old.voter) and a.record("c") is None
    ghost = a.receive(net.hosts["b"].voter, Ping(7, Gossip((old,), ())), net.now)
    told = [r for e in ghost if isinstance(e, Send) and isinstance(e.message, Ack) for r in e.message.gossip.records]
    assert any(r.left and r.voter == old.voter for r in told)  # who still has it hears of the leave


def test_who_restarted_and_left_before_that_was_heard_of_has_left_as_the_process_that_was_known() -> None:
    """The leave was told of a process that nobody had met, and the one that all had met stayed."""
    net = swarm("abc")
    machine, known = net.hosts["a"].machine, net.hosts["c"].voter
    left = signed(record_of("c", inc=2), left=True)
    effects = machine.receive(net.hosts["b"].voter, Ping(7, Gossip((left,), ())), net.now)
    assert [e.event for e in effects if isinstance(e, Notify)] == [MemberLeft(known)]
    assert machine.gone(known) and machine.gone(left.voter)


def test_a_restart_is_a_new_voter_and_the_old_one_is_gone() -> None:
    net = swarm("abcd")
    old = net.hosts["c"].voter
    net.crash("c")
    net.run(0.5)
    new = net.start("c", "a", inc=2).voter
    assert net.run_until(lambda: net.all_alive("abcd"), 10) < 2.0
    for name in "abd":
        machine = net.hosts[name].machine
        assert machine.alive(new) and machine.gone(old) and not machine.alive(old) and not machine.gone(new)
    assert net.hosts["c"].machine.gone(old)


def test_a_restart_may_follow_a_leave() -> None:
    net = swarm("abc")
    net.carry_out(net.hosts["c"], net.hosts["c"].machine.leave(net.now))
    net.crash("c")
    net.run(5)
    net.start("c", "b", inc=2)
    assert net.run_until(lambda: net.all_alive("abc"), 10) < 2.0


def test_the_proof_of_an_old_process_is_none_for_the_new_one() -> None:
    net = swarm("ab")
    a = net.hosts["a"].machine
    newer = signed(record_of("b", inc=2))
    a.learn(newer, net.now)
    assert not a.alive(newer.voter) and not a.alive(net.hosts["b"].voter)


def test_a_replaced_process_is_told() -> None:
    """A copied state directory: two processes of one identity; the older one must stop."""
    net = swarm("abc")
    old = net.hosts["c"]
    net.start("c", "a", inc=2)
    net.run(5)
    ping = Ping(1, Gossip((old.machine.own,), ()))
    (answer,) = net.hosts["a"].machine.receive(old.voter, ping, net.now)
    assert isinstance(answer, Answer)  # not Send: that would go to the new process
    events = old.machine.receive(net.hosts["a"].voter, answer.message, net.now)
    assert Notify(SelfReplaced(Voter("c", 2 << 32))) in events
    assert old.machine.gone(old.voter) and not old.machine.alive(old.voter)


def test_my_own_older_record_is_no_news() -> None:
    host = Net().start("a", inc=2)
    assert host.machine.learn(signed(record_of("a", inc=1)), 1001.0) == []
    assert host.machine.alive(host.voter)
    assert host.machine.gone(Voter("a", 1 << 32))


def test_a_refresh_counts_only_answers_to_pings_sent_after_it() -> None:
    net = swarm("abc")
    machine, b, c = net.hosts["a"].machine, net.hosts["b"].voter, net.hosts["c"].voter
    net.freeze("c")
    net.run(1)
    old = [nonce for nonce, ping in machine._prober.pings.items() if ping.peer == "c"]
    assert old
    effects = machine.begin_refresh(net.now)
    assert {e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)} == {"b", "c"}
    for nonce in old:
        machine.receive(c, Ack(nonce, Gossip((), ())), net.now)
    assert machine.alive(c)
    assert not machine.refreshed(b) and not machine.refreshed(c)
    net.carry_out(net.hosts["a"], effects)
    net.run(1)
    assert machine.refreshed(b) and not machine.refreshed(c) and machine.refreshed(machine.me)
    net.thaw("c")
    net.run(1)
    assert machine.refreshed(c)


def test_an_answer_proves_nothing_of_another_peer_or_process() -> None:
    net = swarm("abc")
    machine = net.hosts["a"].machine
    net.crash("c")
    net.run(10)
    c, b = Voter("c", 1 << 32), net.hosts["b"].voter
    effects = machine.begin_refresh(net.now)
    nonces = {e.to: e.message.nonce for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)}
    machine.receive(b, Ack(nonces["c"], Gossip((), ())), net.now)
    machine.receive(Voter("c", 9 << 32), Ack(nonces["c"], Gossip((), ())), net.now)
    machine.receive(c, Ack(nonces["b"], Gossip((), ())), net.now)
    machine.receive(c, Ack(12345, Gossip((), ())), net.now)
    assert not machine.alive(c) and not machine.refreshed(c)
    machine.receive(c, Ack(nonces["c"], Gossip((), ())), net.now)
    assert machine.alive(c) and machine.refreshed(c)
