"""Probes of links beside the rounds: what they find, that rounds go first, and what they may cost at most."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

import dlc
import dlc.comm.linkprobe as linkprobe
from dlc.comm.burst import BURST_BYTES_MAX, BURST_S, Burst
from dlc.comm.effects import Send
from dlc.comm.entries import ROUND
from dlc.comm.events import MemberDown
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.linkprobe import ASKS_MAX, GRANT_S, GRANTS_MAX, WAIT_S_MAX, LinkProbes
from dlc.comm.messages import Bulk, Plan
from dlc.comm.partition import Load, Member, counts
from dlc.comm.probemessages import PROBE_MESSAGES, ProbeAnswer, ProbeClose, ProbeCount, ProbeOpen, ProbePush
from dlc.comm.rates import Rates
from dlc.errors import ProtocolError
from dlc.peer import Peer
from dlc.runspec import RunSpec
from dlc.sim.meshnet import HEADER_BYTES, Host, MeshNet
from dlc.sim.network import Weather
from dlc.sim.schedule import Scenario, Start
from dlc.sim.world import Process, World
from tests.helpers import wait_until
from tests.swarm import PATIENT, swarm, together

MBIT = 125_000.0
FOUR_SITES = (935 * MBIT, 127 * MBIT, 450 * MBIT, 935 * MBIT)
PROBES = {kind.__name__ for kind in PROBE_MESSAGES}


class Site:
    """What a host of the net is beside its machine: a way down, and a log that says whether bulk rests."""

    def __init__(self, host: Host, down_Bps: float) -> None:
        self.host, self.down_Bps = host, down_Bps
        self.down_free = 0.0
        self.resting = True
        self.rates = host.mesh.ground.rates

    @property
    def probes(self) -> LinkProbes:
        machine: Any = self.host.mesh
        assert isinstance(machine, LinkProbes)
        return machine


class ProbeNet(MeshNet):
    """Hosts that carry LinkProbes alone, with a way down each; every junk message is noted."""

    def __init__(self, links: Sequence[tuple[float, float]], **options: Any) -> None:
        """links: (up, down) in bytes per second."""
        super().__init__(**options)
        self.sites: dict[PeerId, Site] = {}
        self.carried: Counter[tuple[PeerId, PeerId]] = Counter()
        self.junk: list[tuple[float, str, str, int]] = []
        """(time, source, target, bytes)"""
        for up_Bps, down_Bps in links:
            self.join(up_Bps, down_Bps)

    def join(self, up_Bps: float, down_Bps: float) -> Site:
        host = self.start(f"p{len(self.hosts)}", up_Bps=up_Bps)
        site = self.sites[host.name] = Site(host, down_Bps)

        def told() -> None:
            host.record = replace(host.record, up_Bps=site.rates.told_up_Bps)
            self.version += 1

        ground = Ground(host.voter, host.seen, site.rates, random.Random(f"{self.seed} {host.name}"), told)
        probes: Any = LinkProbes(ground, lambda: self._others(host), lambda: site.resting)
        host.mesh = probes
        return site

    def _others(self, host: Host) -> tuple[Voter, ...]:
        return tuple(other.voter for other in self.hosts.values() if other is not host)

    def _pump(self, host: Host) -> None:
        """Connections have equal parts of the link, as far as they have something to carry."""
        pending = host.mesh.pending_bulk()
        if host.sending or host.dead or not pending:
            return
        peer = min(pending, key=lambda peer: self.carried[host.name, peer])
        message: Any = host.mesh.next_bulk(peer)
        size = len(message.payload) + HEADER_BYTES
        self.carried[host.name, peer] += size
        host.sending = True
        self.clock.at(self.now + size / host.up_Bps, self._left, host, peer, message)

    def _left(self, host: Host, peer: PeerId, message: Bulk) -> None:
        host.sending = False
        assert isinstance(message, ProbePush)
        self.junk.append((self.now, host.name, peer, len(message.payload)))
        target = self.hosts.get(peer)
        if target is not None:
            site = self.sites[peer]
            size = len(message.payload) + HEADER_BYTES
            site.down_free = max(self.now, site.down_free) + size / site.down_Bps
            self.clock.at(site.down_free + self.rtt_s / 2, self._deliver, target, host.voter, message)
        self._pump(host)

    def told(self, name: str) -> float:
        return self.sites[name].rates.told_up_Bps

    def known(self) -> bool:
        return all(site.rates.told_up_Bps for site in self.sites.values())

    def spent(self, name: str) -> int:
        return sum(size for _, source, _, size in self.junk if source == name)


def four(**options: Any) -> ProbeNet:
    return ProbeNet([(rate, rate) for rate in FOUR_SITES], latency_s=(0.005, 0.04), **options)


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("seed", range(5))
def test_every_link_is_known_within_15_percent_though_a_slow_one_receives(seed: int) -> None:
    net = four(seed=seed)
    took_s = net.until(net.known, 20.0)
    assert [net.told(f"p{i}") for i in range(4)] == pytest.approx(list(FOUR_SITES), rel=0.15)
    assert took_s < 12.0
    net.run(60.0)
    assert all(site.probes._asks < 8 for site in net.sites.values())
    assert net.junk[-1][0] < 1012.0, "and then it is over"


def test_no_two_probes_share_a_link() -> None:
    net = four(seed=3)
    net.until(net.known, 20.0)
    spans = {}
    for name in net.sites:
        at = [time for time, source, _, _ in net.junk if source == name]
        spans[name] = (at[0], at[-1])
    ordered = sorted(spans.values())
    assert all(end < begin for (_, end), (begin, _) in zip(ordered, ordered[1:], strict=False))


def test_who_met_only_a_slow_receiver_measures_again_when_others_come() -> None:
    net = ProbeNet([(900 * MBIT, 900 * MBIT), (100 * MBIT, 100 * MBIT)])
    net.until(net.known, 20.0)
    assert net.told("p0") == pytest.approx(100 * MBIT, rel=0.15)
    net.join(500 * MBIT, 500 * MBIT)
    net.join(500 * MBIT, 500 * MBIT)
    net.run(30.0)
    assert net.told("p0") == pytest.approx(900 * MBIT, rel=0.15)
    assert net.told("p1") == pytest.approx(100 * MBIT, rel=0.15)


def test_who_has_met_enough_does_not_measure_again_when_others_come() -> None:
    net = ProbeNet([(100 * MBIT, 100 * MBIT)] * (linkprobe.ENOUGH + 1))
    net.until(net.known, 30.0)
    net.run(30.0)
    before = {name: net.spent(name) for name in net.sites}
    newcomer = net.join(100 * MBIT, 100 * MBIT)
    net.until(lambda: bool(newcomer.rates.told_up_Bps), 30.0)
    net.run(30.0)
    assert {name: net.spent(name) for name in before} == before


def test_those_who_come_all_the_time_put_no_probe_off_for_ever() -> None:
    net = ProbeNet([(100 * MBIT, 100 * MBIT)] * 2)
    came_s = 0.0
    while came_s < linkprobe.SETTLE_S_MAX + 2 * linkprobe.SETTLE_S:
        net.run(linkprobe.SETTLE_S / 2)
        net.join(100 * MBIT, 100 * MBIT)
        came_s += linkprobe.SETTLE_S / 2
    assert net.told("p0") == pytest.approx(100 * MBIT, rel=0.15)


def test_who_sends_by_more_connections_measures_again() -> None:
    """Buffers of one connection for half of what the link carries: the first round would be planned for that half."""
    net = ProbeNet([(50 * MBIT, 900 * MBIT)] + [(900 * MBIT, 900 * MBIT)] * 4)
    net.until(net.known, 30.0)
    assert net.told("p0") == pytest.approx(50 * MBIT, rel=0.15)
    net.hosts["p0"].up_Bps = 100 * MBIT
    net.run(30.0)
    assert net.told("p0") == pytest.approx(50 * MBIT, rel=0.15), "nobody has told it"
    net.sites["p0"].probes.begin_anew()
    net.run(30.0)
    assert net.told("p0") == pytest.approx(100 * MBIT, rel=0.15)


def test_a_slow_link_is_told_too() -> None:
    net = ProbeNet([(0.4 * MBIT, 0.4 * MBIT), (100 * MBIT, 100 * MBIT), (100 * MBIT, 100 * MBIT)])
    net.until(net.known, 30.0)
    assert net.told("p0") == pytest.approx(0.4 * MBIT, rel=0.15)


def test_what_the_kernel_says_counts_before_what_receivers_say() -> None:
    net = four()
    net.until(lambda: any(site.probes._burst is not None for site in net.sites.values()), 20.0)
    site = next(site for site in net.sites.values() if site.probes._burst is not None)
    start = net.now
    while site.probes._burst is not None:
        site.rates._acked_bytes = round(2e6 * (net.now - start))
        site.probes.sampled(net.now)
        net.run(0.1)
    assert site.rates.told_up_Bps == pytest.approx(2e6, rel=0.05)


def test_where_enough_have_time_nobody_waits_for_one_that_is_busy() -> None:
    net = ProbeNet([(100 * MBIT, 100 * MBIT)] * (linkprobe.ENOUGH + 2))
    net.sites["p0"].resting = False
    others = [site for name, site in net.sites.items() if name != "p0"]
    net.until(lambda: all(site.rates.told_up_Bps for site in others), 60.0)
    assert not any(target == "p0" for _, _, target, _ in net.junk)


def test_junk_goes_to_so_many_at_once_and_no_more() -> None:
    net = ProbeNet([(100 * MBIT, 100 * MBIT)] * (linkprobe.RECEIVERS_MAX + 3))
    probes = [site.probes for site in net.sites.values()]
    net.until(lambda: any(one._burst is not None for one in probes), 20.0)
    assert [len(one._burst.asked) for one in probes if one._burst is not None] == [linkprobe.RECEIVERS_MAX]


def test_one_without_a_bulk_address_gets_no_junk() -> None:
    net = four()
    net.hosts["p0"].record = replace(net.hosts["p0"].record, bulk=())
    net.version += 1
    others = [site for name, site in net.sites.items() if name != "p0"]
    net.until(lambda: all(site.rates.told_up_Bps for site in others), 60.0)
    assert not any(target == "p0" for _, _, target, _ in net.junk)


def test_known_rates_are_not_measured_and_nothing_is_asked() -> None:
    net = four()
    for site in net.sites.values():
        site.rates.up.Bps = 1e6
    net.run(60.0)
    assert not net.junk and not PROBES & net.sent.keys()


def test_peers_of_one_host_have_no_link() -> None:
    net = four()
    for site in net.sites.values():
        site.host.record = replace(site.host.record, bulk=("127.0.0.1:7001",))
    net.run(60.0)
    assert not PROBES & net.sent.keys()


# ---------------------------------------------------------------- rounds go first


def sending(net: ProbeNet) -> Site | None:
    return next((s for s in net.sites.values() if s.probes._burst is not None and s.probes._burst.sending), None)


def test_a_round_that_takes_long_costs_no_attempt() -> None:
    net = four()
    for site in net.sites.values():
        site.resting = False
    net.run(2.0 * ASKS_MAX)
    assert not PROBES & net.sent.keys()
    for site in net.sites.values():
        site.resting = True
    net.until(net.known, 20.0)


def test_no_junk_leaves_once_a_round_has_begun_here() -> None:
    net = four(seed=1)
    net.until(lambda: len(net.junk) > 20, 20.0)
    site = sending(net)
    assert site is not None
    for each in net.sites.values():
        each.resting = False
    assert not list(site.probes.pending_bulk()) and all(site.probes.next_bulk(peer) is None for peer in net.hosts)
    sent = len(net.junk)
    net.run(30.0)
    assert len(net.junk) <= sent + 1, "but for what was leaving"
    assert not any(s.rates.told_up_Bps for s in net.sites.values()), "what was cut short tells nothing"
    for each in net.sites.values():
        each.resting = True
    net.until(net.known, 90.0)


def test_a_round_at_a_receiver_ends_it_within_a_round_trip() -> None:
    net = four(seed=1)
    net.until(lambda: len(net.junk) > 20, 20.0)
    site = sending(net)
    assert site is not None
    other = next(s for s in net.sites.values() if s is not site)
    other.resting = False
    took_s = net.until(lambda: site.probes._burst is None, 5.0)
    assert took_s < 2 * net.rtt_s and not site.rates.told_up_Bps
    asked = net.sent["ProbeOpen"]
    net.run(10.0)
    assert net.sent["ProbeOpen"] > asked and not net.known(), "asked again, and refused"


def test_nothing_begins_while_a_group_is_measured() -> None:
    net = four()
    for site in net.sites.values():
        site.rates.begin(net.now, Load(0.0, 0.0))
    net.run(30.0)
    assert not net.junk


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_a_receiver_that_dies_or_never_answers_holds_nobody_up(loss: float) -> None:
    net = ProbeNet([(100 * MBIT, 100 * MBIT)] * 5, seed=2, loss=loss)
    net.tamper = lambda source, target, m: None if source == "p4" and type(m).__name__ in PROBES else m
    net.until(lambda: len(net.junk) > 20, 20.0)
    site = sending(net)
    assert site is not None
    victim = next(name for name in ("p1", "p2", "p3") if name != site.host.name)
    net.kill(net.hosts[victim])
    left = [name for name in ("p0", "p1", "p2", "p3") if name != victim]
    net.until(lambda: all(net.told(name) for name in left), 120.0)
    assert [net.told(name) for name in left] == pytest.approx([100 * MBIT] * 3, rel=0.15)
    net.run(5.0)
    spent = len(net.junk)
    net.run(120.0)
    assert len(net.junk) == spent, "those that are silent are not asked for ever"


# ---------------------------------------------------------------- what it costs


def test_a_burst_is_bounded_in_time_and_bytes() -> None:
    net = four(seed=4)
    net.until(net.known, 20.0)
    for name in net.sites:
        at = [time for time, source, _, _ in net.junk if source == name]
        assert at[-1] - at[0] < BURST_S + 0.1 and net.spent(name) <= BURST_BYTES_MAX
    assert net.spent("p0") > BURST_BYTES_MAX / 2 > net.spent("p1")


def test_what_comes_in_bunches_does_not_make_a_link_faster() -> None:
    """The largest rate over a seventh of a probe told 138 Mbit/s of a link of 127."""
    burst = Burst(1, [(YOU, 0.1)], 0.0)
    burst.receivers[YOU.peer].free = True
    burst.begin(0.0, b"")
    for tick in range(16):
        late_bytes = 0.1e6 if tick % 5 < 2 else 0.0  # acknowledged with what follows it
        burst.acked(tick * 0.1, round(tick * 0.5e6 - late_bytes))
    assert 5e6 <= burst.rate_Bps(1.5) < 5.3e6


def test_a_link_of_a_data_centre_is_through_in_a_moment() -> None:
    net = ProbeNet([(4e9, 4e9)] * 3, latency_s=(1e-4, 2e-4))
    net.until(net.known, 20.0)
    for name in net.sites:
        at = [time for time, source, _, _ in net.junk if source == name]
        assert net.told(name) > 300e6 and at[-1] - at[0] < 0.3
    net.run(30.0)
    assert sum(net.spent(name) for name in net.sites) <= 3 * BURST_BYTES_MAX, "once each"


def test_probes_that_come_to_nothing_are_not_repeated_for_ever() -> None:
    net = four()
    net.tamper = lambda source, target, m: None if isinstance(m, ProbeCount) else m
    net.run(3600.0)
    assert all(site.probes._asks <= ASKS_MAX and not site.rates.told_up_Bps for site in net.sites.values())
    assert sum(size for *_, size in net.junk) < 4 * ASKS_MAX * (64 << 10) * 2, "a window each"


def test_after_a_probe_that_told_something_the_waits_grow_anew() -> None:
    """One burst that came to nothing was followed by a minute without, as long before as the others had been."""
    net = ProbeNet([(50 * MBIT, 50 * MBIT)] * 2)
    lost = {ProbeCount}
    net.tamper = lambda source, target, m: None if type(m) in lost else m
    net.run(60.0)
    assert not net.known()
    lost.clear()
    net.until(net.known, 120.0)
    probes = net.sites["p0"].probes
    probes.begin_anew()
    lost.add(ProbeCount)
    asks = probes._asks
    net.run(15.0)
    assert probes._asks >= asks + 2


# ---------------------------------------------------------------- strangers and liars


ME, YOU, THIRD = Voter("me", 1), Voter("you", 1), Voter("third", 1)


class Known:
    """Members that are all up."""

    me = ME
    t_dead_s = 3.0

    def alive(self, voter: Voter) -> bool:
        return True

    up = alive

    def gone(self, voter: Voter) -> bool:
        return False

    def record(self, peer: PeerId) -> Any:
        known = {v.peer: v for v in (ME, YOU, THIRD)}
        return Host(MeshNet(), peer, 1, 1.0).record if peer in known else None

    def records(self) -> list[Any]:
        return [self.record(v.peer) for v in (ME, YOU, THIRD)]

    def rtt_s(self, peer: PeerId) -> float:
        return 0.05


def machine() -> LinkProbes:
    return LinkProbes(Ground(ME, Known(), Rates(), random.Random(1)), lambda: (YOU, THIRD), lambda: True)


def answers(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def test_junk_that_was_not_agreed_to_is_dropped() -> None:
    probes = machine()
    assert not probes.receive(YOU, ProbePush(7, b"x" * 1000), 1.0)
    (yes,) = answers(probes.receive(YOU, ProbeOpen(7), 1.0), ProbeAnswer)
    assert yes == ProbeAnswer(7, 0.0)
    assert not probes.receive(YOU, ProbePush(8, b"x" * 1000), 1.1), "another session"
    assert not probes.receive(THIRD, ProbePush(7, b"x" * 1000), 1.1), "another sender"
    assert probes.ground.dropped == Counter(
        {("you", "junk that was not agreed to"): 2, ("third", "junk that was not agreed to"): 1}
    )
    (count,) = answers(probes.receive(YOU, ProbePush(7, b"x" * 1000), 1.2), ProbeCount)
    assert count == ProbeCount(7, 1000)
    assert not probes.receive(Voter("nobody", 1), ProbeOpen(9), 1.2), "whose record is not known"


def test_more_junk_than_a_probe_may_have_is_refused() -> None:
    probes = machine()
    probes.receive(YOU, ProbeOpen(7), 1.0)
    block = bytes(1 << 20)
    for _ in range(BURST_BYTES_MAX >> 20):
        probes.receive(YOU, ProbePush(7, block), 1.0)
    with pytest.raises(ProtocolError, match="more than"):
        probes.receive(YOU, ProbePush(7, b"x"), 1.0)


def test_a_receiver_is_for_one_at_a_time_and_not_for_ever() -> None:
    probes = machine()
    probes.receive(YOU, ProbeOpen(7), 1.0)
    (no,) = answers(probes.receive(THIRD, ProbeOpen(8), 1.1), ProbeAnswer)
    assert 0 < no.wait_s < GRANT_S
    probes.receive(THIRD, ProbeClose(7), 1.2)
    assert answers(probes.receive(THIRD, ProbeOpen(8), 1.2), ProbeAnswer)[0].wait_s, "not its own to close"
    probes.tick(1.0 + GRANT_S)
    assert answers(probes.receive(THIRD, ProbeOpen(9), 1.0 + GRANT_S), ProbeAnswer) == [ProbeAnswer(9, 0.0)]
    probes.receive(THIRD, ProbeClose(9), 4.0)
    assert answers(probes.receive(YOU, ProbeOpen(10), 4.1), ProbeAnswer) == [ProbeAnswer(10, 0.0)]


def test_who_dies_in_its_probe_keeps_no_receiver() -> None:
    probes = machine()
    probes.receive(YOU, ProbeOpen(7), 1.0)
    probes.member(MemberDown(YOU._replace(inc=2)), 1.1)
    assert answers(probes.receive(THIRD, ProbeOpen(8), 1.1), ProbeAnswer)[0].wait_s, "another process of that peer"
    probes.member(MemberDown(YOU), 1.2)
    assert answers(probes.receive(THIRD, ProbeOpen(8), 1.2), ProbeAnswer) == [ProbeAnswer(8, 0.0)]


def test_a_peer_that_asks_again_and_again_is_refused_in_the_end() -> None:
    probes = machine()
    waits = [answers(probes.receive(YOU, ProbeOpen(i), float(i)), ProbeAnswer)[0].wait_s for i in range(GRANTS_MAX + 5)]
    assert waits == [0.0] * GRANTS_MAX + [WAIT_S_MAX] * 5
    probes.tick(1e3)
    assert answers(probes.receive(THIRD, ProbeOpen(1), 1e3), ProbeAnswer) == [ProbeAnswer(1, 0.0)]


def test_what_no_correct_receiver_says_is_an_error_and_changes_nothing() -> None:
    probes = machine()
    now, asked = 0.0, list[ProbeOpen]()
    while not asked:
        now += 0.1
        asked = answers(probes.tick(now), ProbeOpen)
    session = asked[0].session
    for wait_s in (math.nan, math.inf, -1.0, 2 * WAIT_S_MAX):
        with pytest.raises(ProtocolError):
            probes.receive(YOU, ProbeAnswer(session, wait_s), now)
    probes.receive(YOU, ProbeAnswer(session + 1, 5.0), now)
    probes.receive(YOU, ProbeAnswer(session, 0.0), now)
    probes.receive(THIRD, ProbeAnswer(session, 0.0), now)
    assert probes.pending_bulk() == ["third", "you"]
    sent = probes.next_bulk("you")
    assert isinstance(sent, ProbePush)
    for total in (-1, BURST_BYTES_MAX + 1, 1 << 62):
        with pytest.raises(ProtocolError, match="counts"):
            probes.receive(YOU, ProbeCount(session, total), now)
    probes.receive(YOU, ProbeCount(session, 2 * len(sent.payload)), now)  # cannot be: what was sent has come
    probes.receive(YOU, ProbeCount(session, 1), now + 0.1)  # an older one, overtaken
    assert probes._burst is not None and probes._burst.receivers["you"].counted_bytes == len(sent.payload)


def test_a_burst_goes_on_where_somebody_dies_who_receives_none_of_it() -> None:
    """It was given up, as if a receiver had died, and the next one came later by that."""
    probes = machine()
    now, asked = 0.0, list[ProbeOpen]()
    while not asked:
        now += 0.1
        asked = answers(probes.tick(now), ProbeOpen)
    probes.receive(YOU, ProbeAnswer(asked[0].session, 0.0), now)
    probes.tick(probes.next_deadline())  # THIRD has not answered
    burst = probes._burst
    assert burst is not None and burst.sending and list(burst.receivers) == ["you"]
    probes.member(MemberDown(THIRD), now + 1.0)
    assert probes._burst is burst
    probes.member(MemberDown(YOU._replace(inc=2)), now + 1.0)
    assert probes._burst is burst, "another process of that peer"
    probes.member(MemberDown(YOU), now + 1.0)
    assert probes._burst is None


def test_without_counts_no_more_than_a_window_leaves() -> None:
    probes = machine()
    now, asked = 0.0, list[ProbeOpen]()
    while not asked:
        now += 0.1
        asked = answers(probes.tick(now), ProbeOpen)
    for voter in (YOU, THIRD):
        probes.receive(voter, ProbeAnswer(asked[0].session, 0.0), now)
    total = 0
    while peers := probes.pending_bulk():
        message = probes.next_bulk(peers[0])
        assert isinstance(message, ProbePush)
        total += len(message.payload)
    assert total == 64 << 10


# ---------------------------------------------------------------- whole nodes


UPLINKS = (60e3, 200e3, 1e6, 400e3)
N_CHUNKS = 48


class Stage:
    """Nodes on the simulator's clock, with uplinks of their own, that probe, and whose first round is `inner_s` off."""

    def __init__(self, inner_s: float, probes: bool = True, seed: int = 1) -> None:
        starts = (Start(0.0, ()), *(Start(0.2 * i, (0,)) for i in range(1, len(UPLINKS))))
        plan = Scenario(
            seed, starts, (), Weather(latency_max_s=0.05), inner_s=inner_s, n_chunks=N_CHUNKS, chunk_elems=512,
            probes=probes,
        )  # fmt: skip
        self.world = World(plan)
        self.world.run_until(1.0)
        for host, up_Bps in zip(self.world.hosts.values(), UPLINKS, strict=True):
            host.uplink_Bps = up_Bps

    def until(self, condition: Any, limit_s: float = 60.0) -> None:
        end = self.world.now + limit_s
        while not condition():
            assert self.world.clock.step() and self.world.now < end, "not reached"

    def first_plan(self) -> Plan:
        def plans() -> list[Plan]:
            found = [p.node.slot.plan for p in self.world.running()]
            return [plan for plan in found if plan is not None and plan.entry.kind == ROUND]

        self.until(plans)
        return plans()[0]

    def round_s(self) -> float:
        """How long the first round takes from its plan on."""
        self.first_plan()
        begin = self.world.now
        self.until(lambda: all(p.node.log.state.round_of("train") > 0 for p in self.world.running()))
        return self.world.now - begin


def test_the_first_plan_is_cut_by_what_the_probes_found() -> None:
    stage = Stage(inner_s=30.0)
    stage.world.run_until(18.0)
    for process in stage.world.running():
        told = {r.voter.peer: r.up_Bps for r in process.node.members.records()}
        assert [told[f"p{i}"] for i in range(4)] == pytest.approx(list(UPLINKS), rel=0.15), "everybody knows"
        assert process.trainer.rounds == 0
    plan = stage.first_plan()
    owned = Counter(plan.owners[index].peer for index in plan.assignment)
    best = counts(N_CHUNKS, [Member(rate, rate) for rate in UPLINKS])
    assert [owned[f"p{i}"] for i in range(4)] == pytest.approx(best, abs=3)
    assert owned["p2"] > 2 * N_CHUNKS / 4 > 4 * owned["p0"], best


def test_the_first_round_is_quicker_than_without() -> None:
    assert Stage(30.0).round_s() < 0.75 * Stage(30.0, probes=False).round_s()


@pytest.mark.parametrize("inner_s", [3.0, 4.5, 5.5, 6.5, 8.0])
def test_nobody_waits_for_a_probe(inner_s: float) -> None:
    """Rounds begin before, in the middle of and between probes; the checker sees that no junk leaves in a round."""
    begun = []
    for probes in (True, False):
        stage = Stage(inner_s, probes=probes)
        begun.append(0.0)
        stage.first_plan()
        begun[-1] = stage.world.now
        stage.until(lambda world=stage.world: world.checker.rounds > 3, 120.0)
    assert begun[0] < begun[1] + 0.3


def test_peers_that_carry_no_probes_are_left_out() -> None:
    """As those of an older version, or that were told not to."""
    stage = Stage(inner_s=30.0)
    mute: Process = stage.world.hosts["p3"].process  # type: ignore[assignment]
    assert mute.node.probes is not None
    mute.node.services.remove(mute.node.probes)
    stage.world.run_until(20.0)
    told = [p.node.exchange.rates.told_up_Bps for p in stage.world.running()]
    assert told[:3] == pytest.approx(UPLINKS[:3], rel=0.15) and told[3] == 0
    assert all(p.node.probes is not None and p.node.probes._asks < 5 for p in stage.world.running()), "and not again"
    stage.round_s()


def test_a_newcomer_measures_its_link_while_the_others_train() -> None:
    """They know theirs, and rounds go on: it finds a moment between two of them."""
    stage = Stage(inner_s=12.0)
    stage.until(lambda: stage.world.checker.rounds > 2, 120.0)
    world, before = stage.world, stage.world.checker.rounds
    newcomer = world.new_host()
    newcomer.uplink_Bps = 300e3
    node = world.start(newcomer, ("sim:p0",)).node
    stage.until(lambda: node.exchange.rates.told_up_Bps, 60.0)
    assert node.exchange.rates.up.probed and not node.slot.plan
    assert node.exchange.rates.told_up_Bps == pytest.approx(300e3, rel=0.15)
    stage.until(lambda: world.checker.rounds > before + 4, 60.0)


# ---------------------------------------------------------------- sockets


def test_peers_on_real_sockets_know_their_links_before_any_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over loopback, taken for a link: a burst ends, its rate is told, and a round finds everything as ever."""
    monkeypatch.setattr(linkprobe, "on_this_host", lambda address: False)

    def told(peer: Peer) -> float:
        return peer._ask(lambda node, now: node.exchange.rates.told_up_Bps)

    with swarm(3) as peers:
        wait_until(lambda: all(told(peer) > 0 for peer in peers), 120, "every peer to know its link")
        asked = peers[0]._ask(lambda node, now: node.probes is not None and node.probes._asks)
        vectors = [torch.full((100_000,), float(i)) for i in range(3)]
        together(peers, lambda peer, i: peer.all_reduce(vectors[i], codec="fp32", timeout_s=240))
        assert all((vector == 1.0).all() for vector in vectors) and asked


def test_peers_without_a_log_know_their_links_before_any_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups were cut into equal parts, and paced by what those had shown: fast links never came to be known."""
    monkeypatch.setattr(linkprobe, "on_this_host", lambda address: False)
    roles = ("trainer", "trainer", "observer", "helper")
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer.join(log=False, role=roles[0], timeouts=PATIENT))]
        for role in roles[1:]:
            joined = Peer.join([peers[0].address], log=False, role=role, timeouts=PATIENT)
            peers.append(stack.enter_context(joined))

        def told(peer: Peer) -> float:
            return peer._ask(lambda node, now: node.exchange.rates.told_up_Bps)

        able = [peer for peer, role in zip(peers, roles, strict=True) if role != "observer"]
        wait_until(lambda: all(told(peer) > 0 for peer in able), 120, "every peer but the observer to know its link")
        asked = [peer._ask(lambda node, now: node.probes._met | node.probes._grants.keys()) for peer in peers]
        assert not asked[2] and peers[2].voter not in set().union(*asked) and told(peers[2]) == 0
        vectors = [torch.full((100_000,), float(i)) for i in range(2)]
        groups = [dlc.Group(peer, "pair", codec="fp32", target_size=2) for peer in peers[:2]]
        together(peers[:2], lambda peer, i: groups[i].all_reduce(vectors[i], timeout_s=240))
        assert all((vector == 0.5).all() for vector in vectors)


def test_who_was_told_not_to_sends_no_junk_and_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linkprobe, "on_this_host", lambda address: False)
    with swarm(2, probe_links=False) as peers:
        assert all(peer._ask(lambda node, now: node.probes) is None for peer in peers)


def test_a_parameter_server_has_no_use_for_rates_and_sends_no_junk() -> None:
    with Peer.join(spec=RunSpec(strategy="parameter-server")) as server, Peer.join(log=False) as group:
        assert server._ask(lambda node, now: node.probes) is None
        assert group._ask(lambda node, now: node.probes) is not None
