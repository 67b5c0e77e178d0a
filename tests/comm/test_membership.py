"""Transcripts of membership machines on a virtual network: what is promised, under each fault by itself."""

from __future__ import annotations

import random

import pytest

from dlc.comm import detector
from dlc.comm.effects import Dial, Notify, Send
from dlc.comm.events import SeenAt
from dlc.comm.membership import Membership
from dlc.comm.messages import Ack, Gossip, Hello, IndirectAck, Ping, Rumour, Welcome
from dlc.comm.timeouts import Timeouts
from tests.comm.swim_net import Net, record_of, signed, swarm, verify

# ---------------------------------------------------------------------- joining


@pytest.mark.parametrize("seed", range(3))
def test_five_peers_that_know_one_converge_within_seconds(seed: int) -> None:
    net = Net(seed)
    net.start("a")
    for name in "bcde":
        net.start(name, "a")
    assert net.run_until(lambda: net.all_alive("abcde"), 10) < 2.0
    assert not net.said("MemberDown") and not net.said("MemberSuspect")


def test_a_newcomer_needs_no_more_than_one_that_lives() -> None:
    net = swarm("abc")
    net.crash("a")
    net.run_until(lambda: net.all_alive("bc"), 10)
    net.start("n", "b")
    assert net.run_until(lambda: net.all_alive("bcn"), 10) < 2.0


def test_a_bootstrap_peer_that_starts_last_is_found() -> None:
    net = Net()
    net.start("b", "a")
    net.start("c", "a")
    net.run(60)
    assert net.alive("b") == ""
    net.start("a")
    assert net.run_until(lambda: net.all_alive("abc"), 30) < 5.0


def test_an_address_is_dialled_until_it_has_answered_and_again_when_its_peer_is_dead() -> None:
    net = Net()
    net.start("a", "b", "a")
    net.start("b")
    net.run_until(lambda: net.all_alive("ab"), 5)
    net.run(2)
    net.sent.clear()
    net.run(20)
    assert net.sent.get("Hello", 0) == 0
    net.crash("b")
    net.run(20)
    assert net.sent["Hello"] >= 5


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("seed", range(4))
def test_a_crash_is_detected_by_all_within_t_dead_and_nobody_else_is_accused(seed: int) -> None:
    net = swarm("abcde", seed)
    t_dead_s = net.timeouts.t_dead_s(5, 1)
    net.run(seed * 0.37)
    net.crash("c")
    took_s = net.run_until(lambda: net.all_alive("abde"), 30)
    assert took_s <= t_dead_s + 0.25
    net.run(10)
    assert net.said("MemberDown") == {(at, "c") for at in "abde"}
    assert net.said("MemberSuspect") == {(at, "c") for at in "abde"}
    assert all(host.machine.health == 1 for host in net.hosts.values())  # the dead one does not make others slow


@pytest.mark.parametrize("seed", range(8))
def test_a_silent_death_is_known_to_all_soon_after_the_first(seed: int) -> None:
    """A frozen peer: who finds it tells the others, who have missed probes of their own and need no more of them."""
    net = swarm("abcd", seed)
    net.run(seed * 0.31)
    net.freeze("d")
    net.run_until(lambda: len(net.said("MemberDown")) == 3, 10)
    times = sorted(at for at, _, what, _ in net.log if what == "MemberDown")
    assert len(times) == 3 and times[-1] - times[0] <= 0.35


def test_one_that_misses_a_probe_is_asked_again_and_again() -> None:
    net = swarm("abcdefgh")
    net.crash("c")
    net.tap = []
    net.run(net.timeouts.t_dead_s(8, 1))
    pings = [to for at, to, message in net.tap if at == "a" and to == "c" and isinstance(message, Ping)]
    assert len(pings) >= 12


def test_a_crash_of_one_of_two_is_detected_as_fast() -> None:
    net = swarm("ab")
    net.crash("b")
    assert net.run_until(lambda: net.alive("a") == "", 30) <= net.timeouts.t_dead_s(2, 1) + 0.1


def test_who_is_left_alone_asks_others_how_they_see_it_and_believes_them_only_then() -> None:
    """Its own address may have changed: what they answer to its pings goes to where it was."""
    net = swarm("ab")
    a, b = net.hosts["a"].machine, net.hosts["b"]
    welcome = Welcome(1, "run", b"", b.machine.own, (), "b:1", "9.9.9.9")

    def told() -> list[object]:
        effects = a.receive(b.voter, welcome, net.now)
        return [e.event for e in effects if isinstance(e, Notify)]

    assert not told()
    net.crash("b")
    net.run_until(lambda: ("a", "b") in net.said("MemberDown"), 10)
    dialled = [e for tick in range(10) for e in a.tick(net.now + 60 * tick) if isinstance(e, Dial)]
    assert {e.address for e in dialled} == {b.machine.own.control[0]} and told() == [SeenAt("9.9.9.9")]
    later = Net()
    newcomer = later.start("n", "b").machine

    def heard() -> list[object]:
        return [e.event for e in newcomer.receive(b.voter, welcome, later.now) if isinstance(e, Notify)]

    assert heard() == heard() == [], "it has just come to know of somebody"
    later.run(30)
    assert heard() == [SeenAt("9.9.9.9")], "who never answered where it said that it was"


def test_what_a_machine_says_is_what_it_answers() -> None:
    net = swarm("abc")
    voter = net.hosts["c"].voter
    net.crash("c")
    net.run_until(lambda: ("a", "c") in net.said("MemberDown"), 10)
    assert not net.hosts["a"].machine.alive(voter) and not net.hosts["a"].machine.gone(voter)
    assert net.hosts["a"].machine.record("c") is not None  # never forgotten
    net.run(100)
    assert net.hosts["a"].machine.unseen_s(voter) == pytest.approx(100, abs=10)


def test_frozen_then_thawed_is_alive_again_and_accuses_nobody() -> None:
    net = swarm("abcde")
    net.freeze("d")
    net.run(30)
    assert net.all_alive("abce")
    ran_s = net.hosts["d"].machine.running_s
    net.log.clear()
    net.thaw("d")
    assert net.hosts["d"].machine.running_s - ran_s <= 2.0  # a freeze ages nobody
    assert net.run_until(lambda: net.all_alive("abcde"), 20) < 5.0
    net.run(20)
    assert not net.said("MemberDown")
    assert net.all_alive("abcde")


@pytest.mark.parametrize("frozen_s", [2.0, 30.0])
def test_the_answers_of_one_that_slept_make_nobody_patient(frozen_s: float) -> None:
    """They come all at once, and each measured the sleep: T_dead grew by them to 40 s, and every death after that took
    so long to be noticed."""
    net = swarm("abcde", latency_s=(0.02, 0.2))
    net.run(30)
    machines = [net.hosts[name].machine for name in "abce"]
    before_s = max(machine.t_dead_s for machine in machines)
    net.freeze("d")
    net.run(frozen_s)
    net.thaw("d")
    net.run(1.0)  # until the quickest of them is there
    most_s = 0.0
    for _ in range(100):
        net.run(0.1)
        most_s = max(most_s, *(machine.t_dead_s for machine in machines))
    assert net.all_alive("abcde")
    assert most_s < 1.5 * before_s


def test_who_slept_measures_no_round_trip_by_its_sleep() -> None:
    net = swarm("ab", latency_s=(0.02, 0.2))
    net.run(30)
    machine = net.hosts["a"].machine
    before_s, effects = machine.rtt_s("b"), machine.begin_refresh(net.now)
    (ping,) = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)]
    net.freeze("a")
    net.run(8.0)
    machine.receive(net.hosts["b"].voter, Ack(ping.nonce, Gossip((), ())), net.now)
    assert machine.refreshed(net.hosts["b"].voter) and machine.rtt_s("b") == before_s


def test_answers_to_pings_of_long_ago_prove_nothing() -> None:
    net = swarm("ab")
    voter = net.hosts["b"].voter
    net.freeze("b")
    net.run(20)
    machine = net.hosts["a"].machine
    (oldest, *_) = machine._prober.pings
    assert not machine.alive(voter)
    effects = machine.receive(voter, Ack(oldest, Gossip((), ())), net.now)
    assert not machine.alive(voter) and machine.unseen_s(voter) > 10
    assert not any(isinstance(effect, Notify) for effect in effects)


def test_one_that_is_heard_again_is_asked_for_a_proof_at_once() -> None:
    net = swarm("abc")
    for host in net.hosts.values():
        host.machine.watch([])
    net.freeze("c")
    net.run(20)
    machine, voter = net.hosts["a"].machine, net.hosts["c"].voter
    effects = machine.receive(voter, Ping(1, Gossip((), ())), net.now)
    assert not machine.alive(voter)  # to hear it is not enough
    assert [type(e.message) for e in effects if isinstance(e, Send) and e.to == "c"] == [Ack, Ping]


def test_a_one_way_cut_leaves_both_alive_and_names_the_relay() -> None:
    net = swarm("abcd")
    net.cut.add(("a", "b"))
    net.run(30)
    assert net.all_alive("abcd")
    assert not net.said("MemberDown")
    a, b = net.hosts["a"].machine, net.hosts["b"].machine
    assert a.relay_for("b") in {"c", "d"}
    assert b.relay_for("a") in {"c", "d"}  # its pings arrive, their answers do not
    assert a.relay_for("c") is None and a.relay_for("unknown") is None
    assert net.said("Apart") == {("a", "b"), ("b", "a")}
    net.cut.clear()
    net.run(10)
    assert a.relay_for("b") is None


def test_a_direct_answer_that_comes_after_later_ones_takes_nothing_back() -> None:
    """By its own time the direct way was closed: messages would go by the relay again."""
    net = swarm("abcd")
    net.cut.add(("a", "b"))
    net.run(30)
    net.cut.clear()
    net.run(10)
    a, b = net.hosts["a"].machine, net.hosts["b"].voter
    late = next(nonce for nonce, ping in a._prober.pings.items() if ping.peer == "b")
    assert a.receive(b, Ack(late, Gossip((), ())), net.now) == [] and late not in a._prober.pings
    assert a.relay_for("b") is None


def test_of_a_cut_of_a_second_nothing_is_said() -> None:
    net = swarm("abcd")
    net.cut.add(("a", "b"))
    net.run(1.5)
    net.cut.clear()
    net.run(20)
    assert not net.said("Apart")


def test_where_not_all_are_pinged_all_the_time_an_old_direct_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had once answered by a relay was taken to be reached by one only, until its turn came again."""
    monkeypatch.setattr(detector, "HEARTBEATS_MAX", 2)
    net = swarm("abcdefghijklmnopqrstuvwxyz")
    net.cut.add(("a", "b"))
    net.run(60)
    net.cut.clear()
    a = net.hosts["a"].machine
    a.watch(())
    net.run(60)
    for _ in range(60):
        net.run(0.5)
        assert a.relay_for("b") is None


def test_two_way_cut_between_two_leaves_both_alive_too() -> None:
    net = swarm("abcd")
    net.part("a", "b")
    net.run(60)
    assert net.all_alive("abcd")
    assert not net.said("MemberDown")


@pytest.mark.parametrize("seed", range(3))
def test_ten_percent_loss_kills_nobody(seed: int) -> None:
    net = swarm("abcdefgh", seed, loss=0.1)
    net.run(60)
    assert not net.said("MemberDown")
    assert net.all_alive("abcdefgh")


def test_slow_links_are_not_taken_for_death() -> None:
    """A round trip of 0.8 s is over three probe periods."""
    net = swarm("abc", latency_s=(0.35, 0.4))
    net.run(20)  # round trips are known from here on
    net.log.clear()
    net.run(60)
    assert not net.said("MemberDown") and not net.said("MemberSuspect")
    assert 0.7 < net.hosts["a"].machine.rtt_max_s < 0.9


@pytest.mark.parametrize("watched", [True, False])
def test_a_healed_partition_is_noticed_however_long_it_lasted(watched: bool) -> None:
    net = swarm("abcd")
    if not watched:
        for host in net.hosts.values():
            host.machine.watch([])
    net.part("ab", "cd")
    net.run(600)
    assert net.all_alive("ab", "cd")
    net.cut.clear()
    assert net.run_until(lambda: net.all_alive("abcd"), 60) < 10.0


def test_newcomers_of_both_sides_meet_when_a_partition_heals() -> None:
    net = swarm("abcd")
    net.part("abx", "cdy")
    net.run(60)
    net.start("x", "a")
    net.start("y", "c")
    net.run(60)
    net.cut.clear()
    assert net.run_until(lambda: net.all_alive("abcdxy"), 60) < 15.0


def test_a_refused_connection_shortens_suspicion() -> None:
    net = swarm("abcde")
    net.crash("c")
    host = net.hosts["a"]
    net.carry_out(host, host.machine.refused("c", net.now))
    assert net.run_until(lambda: "c" not in net.alive("a"), 30) <= 2 * net.timeouts.probe_s + 0.01
    assert net.run_until(lambda: net.all_alive("abde"), 30) <= 1.5  # a death rumour makes the others look, too


def test_who_has_just_fallen_silent_may_come_back_until_t_evict_or_until_its_host_says_that_it_ended() -> None:
    net = swarm("abcd")
    host, silent, ended = net.hosts["a"], net.hosts["c"].voter, net.hosts["d"].voter
    assert not host.machine.away(silent)
    net.freeze("c")
    net.crash("d")
    net.carry_out(host, host.machine.refused("d", net.now))
    net.run_until(lambda: net.alive("a") == "b", 30)
    assert host.machine.away(silent) and not host.machine.away(ended)
    assert 0.6 < net.run_until(lambda: not host.machine.away(silent), 300) / host.machine.t_evict_s <= 1.0
    net.thaw("c")
    net.run_until(lambda: net.alive("a") == "bc", 30)
    net.freeze("c")
    net.run_until(lambda: net.alive("a") == "b", 30)
    assert host.machine.away(silent), "it was back"


def test_a_refused_connection_does_not_kill_one_that_answers() -> None:
    net = swarm("abcde")
    for _ in range(20):
        host = net.hosts["a"]
        net.carry_out(host, host.machine.refused("c", net.now))
        net.run(0.4)
        assert net.alive("a") == "bcde"
    net.run(5)
    assert not net.said("MemberDown")


def test_an_answer_that_was_on_its_way_before_the_refusal_does_not_count() -> None:
    net = swarm("ab")
    machine, voter = net.hosts["a"].machine, net.hosts["b"].voter
    (ping,) = [e.message for e in machine.begin_refresh(net.now) if isinstance(e, Send) and e.to == "b"]
    net.crash("b")
    net.now += 0.01
    net.carry_out(net.hosts["a"], machine.refused("b", net.now))
    machine.receive(voter, Ack(ping.nonce, Gossip((), ())), net.now)  # type: ignore[union-attr]
    assert net.run_until(lambda: not machine.alive(voter), 5) <= 0.51


def test_an_indirect_answer_proves_that_process_alone_whose_record_it_carries() -> None:
    """Whoever pinged for me may know another process of that peer than I do."""
    net = swarm("abc")
    machine, target, by = net.hosts["a"].machine, net.hosts["b"].voter, net.hosts["c"].voter
    effects = machine.begin_refresh(net.now)
    (ping,) = [e.message for e in effects if isinstance(e, Send) and e.to == "b" and isinstance(e.message, Ping)]
    machine.receive(by, IndirectAck(ping.nonce, "b", Gossip((), ())), net.now)
    assert not machine.refreshed(target)
    machine.receive(by, IndirectAck(ping.nonce, "b", Gossip((machine.record("b"),), ())), net.now)  # type: ignore[arg-type]
    assert machine.refreshed(target)


def test_a_death_rumour_does_not_overrule_the_living() -> None:
    net = swarm("abc")
    host, target = net.hosts["a"], net.hosts["c"].voter
    rumour = Gossip((), (Rumour(target, 2, 0),))
    net.carry_out(host, host.machine.receive(net.hosts["b"].voter, Ping(1, rumour), net.now))
    net.run(5)
    assert not net.said("MemberDown")
    assert net.all_alive("abc")


def test_a_suspicion_is_refuted_by_its_subject() -> None:
    net = swarm("abcd")
    suspicion = Rumour(net.hosts["c"].voter, 1, 0)
    effects = net.hosts["c"].machine.receive(net.hosts["a"].voter, Ping(1, Gossip((), (suspicion,))), net.now)
    assert net.hosts["c"].machine.health == 2  # who must refute may be slow
    acks = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ack)]
    assert Rumour(net.hosts["c"].voter, 0, 1) in acks[0].gossip.rumours


def test_a_peer_that_is_scheduled_late_doubts_itself() -> None:
    net = swarm("abc")
    machine = net.hosts["a"].machine
    before_s = machine.t_dead_s
    machine.tick(net.now + 0.9)
    assert machine.health == 2 and machine.t_dead_s == pytest.approx(2 * before_s)
    net.run(10)
    assert machine.health == 1


def test_nobody_drops_out_when_local_health_recovers() -> None:
    """T_dead shrinks to an eighth within seconds, so the pings before must not have been rarer."""
    names = "abcdefghijklmnopqrstuvwx"  # so many that the turn of each comes less often than T_dead
    net = swarm(names)
    machine = net.hosts["a"].machine
    for refutation in range(7):
        suspicion = Gossip((), (Rumour(machine.me, 1, refutation),))
        machine.receive(net.hosts["b"].voter, Ping(1, suspicion), net.now)
    assert machine.health == 8
    for _ in range(200):
        net.run(0.1)
        assert net.alive("a") == names[1:]
    assert machine.health == 1


# ---------------------------------------------------------------------- time


def test_nobody_is_pinged_more_often_than_needed() -> None:
    net = swarm("abcdefgh")
    net.run(5)
    net.sent.clear()
    net.run(60)
    pings = net.sent["Ping"] / 8 / 60
    assert 4.0 <= pings <= 9.0, pings  # one each probe period in turn, and seven each T_dead/2
    assert net.sent.get("PingReq", 0) <= 60


def test_the_watched_are_pinged_each_half_t_dead_even_when_dead() -> None:
    net = swarm("abc")
    net.crash("c")
    net.run(10)
    host, pinged = net.hosts["a"], []
    for _ in range(400):
        net.now += 0.05
        pinged += [e for e in host.machine.tick(net.now) if isinstance(e, Send) and e.to == "c"]
    assert len(pinged) >= 20 / (net.timeouts.t_dead_s(3, 1) / 2) * 0.7


def test_one_that_is_dead_when_it_becomes_a_voter_is_pinged_each_half_t_dead_from_then_on() -> None:
    """Where it was just being asked, as the dead are now and then, it was never asked again."""
    net = swarm("abc")
    host, voter = net.hosts["a"], net.hosts["c"].voter
    host.machine.watch([])
    net.crash("c")
    net.run(10)

    def pings() -> int:
        """In the next 50 ms."""
        net.now += 0.05
        return sum(isinstance(e, Send) and e.to == "c" for e in host.machine.tick(net.now))

    assert any(pings() for _ in range(400))
    host.machine.watch([voter])
    assert sum(pings() for _ in range(400)) >= 20 / (net.timeouts.t_dead_s(3, 1) / 2) * 0.7


def test_deadlines_are_absolute_and_a_tick_at_one_moves_it() -> None:
    net = swarm("abc")
    machine = net.hosts["a"].machine
    for _ in range(2000):
        deadline = machine.next_deadline()
        assert deadline is not None
        machine.tick(deadline)
        later = machine.next_deadline()
        assert later is not None and later > deadline


def test_a_machine_alone_is_content() -> None:
    machine = Membership(
        record_of("a"),
        sign=signed,
        verify=verify,
        hello=lambda: Hello(1, "run", b"", None, ""),
        rng=random.Random(0),
        timeouts=Timeouts(),
        bootstrap=["x:1"],
        now=5.0,
    )
    assert [type(effect) for effect in machine.tick(5.0)] == [Dial]
    assert machine.alive(machine.me) and machine.refreshed(machine.me) and machine.unseen_s(machine.me) == 0.0
    assert machine.records() == [machine.own]
    assert machine.running_s == 0.0
    machine.tick(15.0)
    assert machine.running_s == 1.0


def test_the_same_seed_gives_the_same_transcript() -> None:
    def transcript(seed: int) -> tuple[list[tuple[float, str, str, str]], dict[str, int]]:
        net = swarm("abcdef", seed, loss=0.1)
        net.crash("c")
        net.run(5)
        net.part("ab", "def")
        net.run(20)
        net.cut.clear()
        net.run(10)
        return net.log, net.sent

    assert transcript(1) == transcript(1)
    assert transcript(1) != transcript(2)
