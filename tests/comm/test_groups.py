"""Groups on a virtual clock: the mean is that of whom the report names, whoever dies when; nobody waits for ever."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlc.comm import groupowner
from dlc.comm import mesh as mesh_module
from dlc.comm.calls import Call, GroupDone, GroupFailed, GroupFormed, MeetingFailed, Outcome
from dlc.comm.crowd import ANSWER_S, GATHER_SHOWN_MAX, NOT_COME
from dlc.comm.effects import Send
from dlc.comm.grid import Grid
from dlc.comm.groupowner import CONTRIBUTION, NOBODY, RESULT
from dlc.comm.groups import DONE_AGAIN_S, Reduction
from dlc.comm.holdings import Tally
from dlc.comm.meetings import WITHDRAWN_S
from dlc.comm.mesh import OLD_GROUPS_MAX
from dlc.comm.meshmessages import Begin, Done, Invite, LeftOut, NoParcel, Parcel, Seat
from dlc.comm.messages import GridSpec
from dlc.comm.parcels import LATE, WHY_CHARS_MAX
from dlc.comm.reducer import NOT_FINITE
from dlc.comm.seating import GROUP_MAX
from dlc.sim.meshnet import Host, MeshNet

NUMEL, CHUNK = 1000, 32
INVITED: dict[str, Any] = {"gather": bytes(GATHER_SHOWN_MAX + 1)}
"""Of callers whose group forms by invitations: so much is not shown with a wish."""


def vector(i: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(i))


class Caller:
    """One peer's call, and what came of it."""

    def __init__(self, net: MeshNet, host: Host, i: int, key: str = "k", **options: Any) -> None:
        self.net, self.host, self.given = net, host, vector(i)
        codec = options.pop("codec", "fp32")
        contributes, receives = options.pop("contributes", True), options.pop("receives", True)
        self.out = torch.full((NUMEL,), float("nan"))
        self.weight = options.get("weight", 1.0)
        grid, given, out = Grid(NUMEL, CHUNK, codec), self.given if contributes else None, self.out
        self.call = call = Call(key, grid, given, out if receives else None, **options)
        self.first = len(host.told)
        net.act(host, lambda mesh, now: mesh.meet(call, now))

    @property
    def end(self) -> Any:
        ends = [e for e in self.host.told[self.first :] if isinstance(e, GroupDone | GroupFailed | MeetingFailed)]
        return next((e for e in ends if e.call is self.call), None)

    @property
    def outcome(self) -> Outcome:
        assert isinstance(self.end, GroupDone), self.end
        return self.end.outcome


def calls(net: MeshNet, hosts: list[Host], **options: Any) -> list[Caller]:
    return [Caller(net, host, i, **options) for i, host in enumerate(hosts)]


def ended(callers: list[Caller]) -> bool:
    return all(c.end is not None or c.host.dead for c in callers)


def check_means(callers: list[Caller], tolerance: float = 1e-6) -> None:
    """Every chunk at every peer is the weighted mean of exactly those that its report counts."""
    for caller in callers:
        outcome = caller.outcome
        seats = {seat.voter.peer: seat for seat in outcome.seats}
        whole = [c for c in callers if outcome.included.get(c.host.name) == NUMEL]
        partly = [p for p, n in outcome.included.items() if n < NUMEL]
        assert set(outcome.missing) >= set(partly)
        if not partly:
            weights = [seats[c.host.name].weight for c in whole]
            mean = sum(w * c.given.double() for w, c in zip(weights, whole, strict=True)) / sum(weights)
            torch.testing.assert_close(caller.out.double(), mean, rtol=tolerance, atol=tolerance)
        assert not caller.out.isnan().any()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", [0.0, 0.1])
@pytest.mark.parametrize("how", [{}, INVITED], ids=["crowd", "invited"])
@pytest.mark.parametrize("ordered", [True, False])
def test_all_who_show_up_get_the_weighted_mean(n: int, loss: float, how: dict[str, Any], ordered: bool) -> None:
    net = MeshNet(n, loss=loss, duplicates=loss, ordered=ordered)
    hosts = net.add(n)
    callers = [Caller(net, host, i, weight=i + 1.0, **how) for i, host in enumerate(hosts)]
    net.until(lambda: ended(callers))
    assert all(not c.outcome.missing and len(c.outcome.included) == n for c in callers)
    check_means(callers)
    assert all(torch.equal(callers[0].out, c.out) for c in callers)
    net.run(61.0 if loss else 2.0)  # who has not heard that all are done keeps its vector for the group's time
    assert all(not h.mesh._groups and not h.mesh.parcels._intakes for h in hosts)
    assert all(not h.mesh.parcels.holdings._held for h in hosts)


def test_bytes_are_those_of_a_butterfly_and_the_time_is_that_of_the_links() -> None:
    net = MeshNet(latency_s=(0.001, 0.002))
    hosts = net.add(4, up_Bps=1e4)
    callers = calls(net, hosts, codec="fp16")
    seconds = net.until(lambda: ended(callers))
    vector_bytes = 2 * NUMEL
    assert all(c.outcome.bytes_received == pytest.approx(2 * 3 / 4 * vector_bytes, rel=0.1) for c in callers)
    headers = 1 + 100 / (2 * CHUNK)
    assert seconds < 2.0 * (2 * 3 / 4 * vector_bytes * headers / 1e4)


def test_what_is_sent_after_the_own_mean_is_in_the_next_report() -> None:
    """The first who has its mean still gives the others theirs; that was in no report."""
    net = MeshNet(9, latency_s=(0.001, 0.05))
    hosts = net.add(4, up_Bps=1e4)

    def outcomes(callers: list[Caller]) -> list[Outcome]:
        net.until(lambda: ended(callers))
        return [c.outcome for c in callers]

    told = [*outcomes(calls(net, hosts, codec="fp16")), *outcomes(calls(net, hosts, codec="fp16"))]
    net.until(lambda: not any(h.mesh._groups for h in hosts))
    alone = outcomes([Caller(net, host, i, key=f"alone {i}", expected=(host.name,)) for i, host in enumerate(hosts)])
    assert any(outcome.bytes_sent for outcome in alone)
    told += alone
    assert sum(o.bytes_sent for o in told) == sum(o.bytes_received for o in told) > 0


def test_sixteen_peers_make_four_groups_of_four() -> None:
    net = MeshNet(3)
    callers = calls(net, net.add(16), target=4, least=4, patience_s=30.0)
    net.until(lambda: ended(callers))
    groups = {frozenset(c.outcome.included) for c in callers}
    assert len(groups) == 4 and all(len(group) == 4 for group in groups)
    check_means(callers)


def test_gathered_bytes_labels_clients_and_auxiliary_members() -> None:
    net = MeshNet(4)
    hosts = net.add(5)
    callers = [
        Caller(net, hosts[0], 0, gather=b"zero"),
        Caller(net, hosts[1], 1, label="same"),
        Caller(net, hosts[2], 2, label="same"),
        Caller(net, hosts[3], 3, owns=False, weight=2.0),
        Caller(net, hosts[4], 4, contributes=False, receives=False, label="same"),
    ]
    net.until(lambda: ended(callers))
    seats = {seat.voter.peer: seat for seat in callers[0].outcome.seats}
    assert [seats[h.name].weight for h in hosts] == [1.0, 0.5, 0.5, 2.0, 0.0]
    assert seats[hosts[3].name].chunks == 0 and seats[hosts[4].name].chunks > 0
    assert all(seat.gather == (b"zero" if peer == hosts[0].name else b"") for peer, seat in seats.items())
    given = [c.given.double() for c in callers]
    mean = (given[0] + 0.5 * given[1] + 0.5 * given[2] + 2 * given[3]) / 4
    for caller in callers[:4]:
        torch.testing.assert_close(caller.out.double(), mean, rtol=1e-6, atol=1e-6)
        assert set(caller.outcome.included) == {h.name for h in hosts[:4]}
    reduced = callers[4].outcome
    assert reduced.reduced == seats[hosts[4].name].chunks and 0 < reduced.known < NUMEL and not reduced.missing
    assert reduced.included == dict.fromkeys((h.name for h in hosts[:4]), reduced.known)


def test_too_few_are_told_so_and_others_with_another_vector_are_named() -> None:
    net = MeshNet(5)
    hosts = net.add(2)
    alone = Caller(net, hosts[0], 0, least=2, patience_s=2.0)
    other = Call("k", Grid(NUMEL + 1, CHUNK, "fp32"), vector(1, NUMEL + 1), torch.zeros(NUMEL + 1), least=2)
    net.act(hosts[1], lambda mesh, now: mesh.meet(other, now))
    net.until(lambda: alone.end is not None)
    assert isinstance(alone.end, MeetingFailed) and "1 of at least 2 came" in alone.end.why
    assert hosts[1].name[:8] in alone.end.why


@pytest.mark.parametrize("key", "abcd")
def test_nobody_is_in_a_group_that_it_finds_too_small_whoever_forms_it(key: str) -> None:
    net = MeshNet(17)
    hosts = net.add(3)

    def meet(key: str, *least: int) -> list[Caller]:
        callers = [Caller(net, hosts[i], i, key=key, least=n) for i, n in enumerate(least)]
        net.until(lambda: ended(callers))
        return callers

    two, five = meet(key, 2, 5)
    assert isinstance(two.end, MeetingFailed) and f"{hosts[1].name[:8]} wants at least 5" in two.end.why
    assert isinstance(five.end, MeetingFailed) and "2 of at least 5 came" in five.end.why
    assert all(len(c.outcome.included) == 3 for c in meet(2 * key, 3, 2, 2))
    first, four, last = meet(3 * key, 2, 4, 1)
    assert isinstance(four.end, MeetingFailed)
    assert all(set(c.outcome.included) == {hosts[0].name, hosts[2].name} for c in (first, last))


def test_who_is_left_alone_by_those_that_it_invited_forms_one_group() -> None:
    net = MeshNet(21, detect_s=0.5)
    hosts = net.add(2)

    def tamper(source: str, target: str, m: Any) -> Any:
        if isinstance(m, Invite):
            net.kill(net.hosts[target])
        return m

    net.tamper = tamper
    callers = calls(net, hosts, **INVITED)
    net.until(lambda: ended(callers))
    (left,) = (c for c in callers if not c.host.dead)
    assert [type(event) for event in left.host.told] == [GroupFormed, GroupDone]


def test_who_wants_more_than_the_target_does_not_count_towards_it() -> None:
    net = MeshNet(16)
    hosts = net.add(4)
    callers = [Caller(net, host, i, least=2, target=3) for i, host in enumerate(hosts[:2])]
    Caller(net, hosts[2], 2, least=4)
    net.run(2.0)
    callers.append(Caller(net, hosts[3], 3, least=2, target=3))
    net.until(lambda: ended(callers))
    assert all(set(c.outcome.included) == {hosts[i].name for i in (0, 1, 3)} for c in callers)


def test_a_group_that_is_begun_with_too_few_is_refused() -> None:
    net = MeshNet(18)
    hosts = net.add(3)

    def tamper(source: str, target: str, m: Any) -> Any:
        if not isinstance(m, Begin):
            return m
        out = next(seat for seat in m.seats if seat.voter.peer not in (source, target))
        first, second = (seat for seat in m.seats if seat is not out)
        return replace(m, seats=(replace(first, chunks=first.chunks + out.chunks), second))

    net.tamper = tamper
    callers = calls(net, hosts, least=3, patience_s=4.0, **INVITED)
    net.until(lambda: sum("begins a group of 2, and I want at least 3" in bad for h in hosts for bad in h.bad) >= 2)
    assert not any(isinstance(c.end, GroupDone) for c in callers)


@pytest.mark.parametrize("good", [0, 2])
def test_a_function_of_the_caller_that_raises_ends_its_call_and_nothing_else(good: int) -> None:
    net = MeshNet(19)
    hosts = net.add(2)
    answers = iter([["p0001", "p0009"]] * good)
    bad = Caller(net, hosts[0], 0, least=2, expected=lambda: next(answers))
    net.until(lambda: bad.end is not None)
    assert isinstance(bad.end, MeetingFailed) and "expected() raised StopIteration" in bad.end.why
    assert isinstance(bad.end.cause, StopIteration) and not hosts[0].mesh._meetings
    callers = calls(net, hosts, least=2)
    net.until(lambda: ended(callers))
    assert all(len(c.outcome.included) == 2 for c in callers)


def test_who_is_alone_knows_it_when_its_patience_ends() -> None:
    net = MeshNet(14)
    alone = Caller(net, net.add(3)[0], 0, least=2, patience_s=4.0)
    assert 4.0 < net.until(lambda: alone.end is not None) < 4.8
    assert isinstance(alone.end, MeetingFailed)


@pytest.mark.parametrize("idle", [{"weight": 0.0}, {"contributes": False}], ids=["weight 0", "auxiliary"])
@pytest.mark.parametrize("how", [{}, INVITED], ids=["crowd", "invited"])
def test_where_all_who_are_named_are_there_and_bring_nothing_they_end_at_once(
    idle: dict[str, Any], how: dict[str, Any]
) -> None:
    net = MeshNet(14, loss=0.1)
    hosts = net.add(4)
    names = tuple(host.name for host in hosts[:3])
    waiting = calls(net, hosts[:2], expected=names, patience_s=60.0, **idle, **how)
    net.run(5.0)
    assert not any(caller.end for caller in waiting), "the third may bring something"
    waiting.append(Caller(net, hosts[2], 2, expected=names, patience_s=60.0, **idle, **how))
    assert net.until(lambda: ended(waiting)) < 8.0
    assert all("weight 0" in c.end.why or "nobody came who contributes" in c.end.why for c in waiting)
    unnamed = calls(net, hosts[:3], key="unnamed", target=3, patience_s=20.0, **idle, **how)
    net.run(10.0)
    brings = Caller(net, hosts[3], 3, key="unnamed", target=3, patience_s=20.0, **how)
    assert net.until(lambda: brings.end is not None) < 45.0
    assert isinstance(brings.end, GroupDone), "whoever may come is waited for"
    net.until(lambda: ended(unnamed))


def test_a_helper_is_waited_for_only_where_it_is_named() -> None:
    """It had all wait to the end of their patience; one that comes is in the group."""
    net = MeshNet(14)
    hosts = net.add(3)
    helper = hosts[2]
    helper.record = replace(helper.record, role="helper")
    net.version += 1
    unnamed = calls(net, hosts[:2], patience_s=60.0)
    assert net.until(lambda: ended(unnamed)) < 3.0
    names = tuple(host.name for host in hosts)
    named = calls(net, hosts[:2], key="named", expected=names, patience_s=60.0)
    net.run(10.0)
    assert not any(caller.end for caller in named)
    named.append(Caller(net, helper, 2, key="named", expected=names, contributes=False, patience_s=60.0))
    assert net.until(lambda: ended(named)) < 3.0
    assert all(len(caller.outcome.seats) == 3 for caller in named)


@pytest.mark.parametrize("latency_s", [0.1, 0.3, 0.45])
@pytest.mark.parametrize("gap_s", [0.0, 0.1, 0.2, 0.3, 0.6])
@pytest.mark.parametrize("key", "abcdef")
@pytest.mark.parametrize("how", [{}, INVITED], ids=["crowd", "invited"])
def test_who_gave_a_call_up_and_waits_anew_is_in_the_group_of_those_who_saw_the_first_one(
    key: str, gap_s: float, latency_s: float, how: dict[str, Any]
) -> None:
    """It is named or invited by its first wish, and declines, before its second one is known to those others."""
    net = MeshNet(15, latency_s=(latency_s, latency_s + 0.0001))
    hosts = net.add(3)
    first = Caller(net, hosts[0], 0, key=key, least=2, **how)
    net.run(1.0)
    others = [Caller(net, host, i, key=key, least=2, **how) for i, host in enumerate(hosts[1:], 1)]
    net.run(0.05)
    net.act(hosts[0], lambda mesh, now: mesh.give_up(first.call, now))
    net.run(gap_s)
    again = Caller(net, hosts[0], 0, key=key, least=2, **how)
    net.until(lambda: ended([again, *others]))
    assert first.out.isnan().all() and all(len(c.outcome.included) == 3 for c in (again, *others))


@pytest.mark.parametrize("how", [{}, INVITED], ids=["crowd", "invited"])
def test_who_gives_up_for_good_is_not_waited_for_as_long_as_patience_lasts(how: dict[str, Any]) -> None:
    net = MeshNet(15, latency_s=(0.1, 0.1001))
    hosts = net.add(4)
    out = Caller(net, hosts[0], 0, **how)
    net.run(1.0)
    others = [Caller(net, host, i, patience_s=60.0, **how) for i, host in enumerate(hosts[1:], 1)]
    net.run(0.05)
    net.act(hosts[0], lambda mesh, now: mesh.give_up(out.call, now))
    assert net.until(lambda: ended(others)) < 8.0
    assert all(len(c.outcome.included) == 3 for c in others)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_crowd_that_divides_takes_who_is_in_another_group_for_no_reason_to_begin_anew(seed: int) -> None:
    net = MeshNet(seed, latency_s=(0.05, 0.15))
    formations: set[tuple[str, int]] = set()
    for host in (hosts := net.add(64)):
        send = host.mesh.ground.send

        def noted(to: Any, message: Any, name: str = host.name, send: Any = send) -> None:
            if isinstance(message, Invite):
                formations.add((name, message.nonce))
            send(to, message)

        host.mesh.ground.send = noted  # type: ignore[method-assign]
    callers = calls(net, hosts, target=16)
    assert net.until(lambda: ended(callers)) < 9.0
    assert all(isinstance(c.end, GroupDone) for c in callers) and len(formations) <= 8


def test_who_comes_late_is_waited_for_but_not_beyond_the_patience_of_the_first() -> None:
    net = MeshNet(6)
    hosts = net.add(3)
    early = [Caller(net, h, i, patience_s=10.0) for i, h in enumerate(hosts[:2])]
    net.run(4.0)
    assert not any(c.end for c in early)
    third = Caller(net, hosts[2], 2, patience_s=10.0)
    net.until(lambda: ended([*early, third]))
    assert len(third.outcome.included) == 3
    pair = [Caller(net, h, i, key="k2", patience_s=10.0) for i, h in enumerate(hosts[:2])]
    assert net.until(lambda: ended(pair)) < 12.0
    assert all(set(c.outcome.included) == {hosts[0].name, hosts[1].name} for c in pair)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("how", [{}, INVITED], ids=["crowd", "invited"])
@pytest.mark.parametrize("ordered", [True, False])
def test_whoever_dies_or_freezes_those_left_have_the_mean_of_whom_they_name(
    seed: int, how: dict[str, Any], ordered: bool
) -> None:
    rng = random.Random(seed)
    net = MeshNet(seed, loss=rng.choice([0.0, 0.05]), detect_s=rng.uniform(0.3, 4.0), ordered=ordered)
    n = rng.randint(2, 7)
    hosts = net.add(n, up_Bps=rng.choice([3e3, 2e4]))
    callers = [Caller(net, host, i, weight=rng.uniform(0.5, 3.0), **how) for i, host in enumerate(hosts)]
    victims = rng.sample(hosts, rng.randint(1, n - 1))
    for victim in victims:
        fault = rng.choice([net.kill, net.freeze, net.leave])
        net.clock.at(net.now + rng.uniform(0.0, 3.0), fault, victim)
    net.run(5.0)
    left = [c for c in callers if not c.host.dead and not c.host.frozen]
    net.until(lambda: all(c.end is not None for c in left), 90.0)
    for caller in left:
        outcome = caller.outcome
        assert outcome.included.get(caller.host.name, 0) == NUMEL
        names = set(outcome.included) | set(outcome.missing)
        assert names == {seat.voter.peer for seat in outcome.seats}
    check_included_chunkwise(callers, left)


def check_included_chunkwise(callers: list[Caller], left: list[Caller]) -> None:
    """Where somebody is in only a part of the mean, each chunk is the mean of some set that contains the whole ones."""
    by_name = {c.host.name: c for c in callers}
    for caller in left:
        outcome = caller.outcome
        seats = {seat.voter.peer: seat for seat in outcome.seats}
        counted = dict.fromkeys(outcome.included, 0)
        names = sorted(outcome.included)
        for start in range(0, NUMEL, CHUNK):
            stop = min(start + CHUNK, NUMEL)
            found = next((s for s in subsets(names) if is_mean(caller, by_name, seats, s, start, stop)), None)
            assert found is not None, "a chunk is no mean of anybody"
            for name in found:
                counted[name] += stop - start
        assert counted == outcome.included


def subsets(names: list[str]) -> list[list[str]]:
    return [[n for k, n in enumerate(names) if mask >> k & 1] for mask in range(1, 1 << len(names))]


def is_mean(caller: Caller, by_name: Any, seats: Any, names: list[str], start: int, stop: int) -> bool:
    total = sum(seats[n].weight for n in names)
    mean = sum(seats[n].weight * by_name[n].given[start:stop].double() for n in names) / total
    return bool(torch.allclose(caller.out[start:stop].double(), mean, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("n", [1, 2])
def test_thousands_of_chunks_that_wait_for_nobody(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or left alone in the middle: each chunk closes as soon as it is opened, and a few are open at a time. No
    event does more than those: a peer that is busy with all of them for long would be taken for dead."""
    monkeypatch.setattr(groupowner, "OPEN_BYTES", 0)
    n_chunks = 2 * sys.getrecursionlimit()
    net = MeshNet(12)
    hosts = net.add(n)
    given, out = vector(0, 2 * n_chunks), torch.full((2 * n_chunks,), float("nan"))
    for host in hosts:
        call = Call("k", Grid(2 * n_chunks, 2, "fp32"), given, out if host is hosts[0] else out.clone())
        net.act(host, lambda mesh, now, call=call: mesh.meet(call, now))
    if n > 1:
        net.until(lambda: all(host.mesh._groups for host in hosts))
        net.kill(hosts[1])
    reduced = [0]

    def done() -> bool:
        """Asked after each event."""
        reduced.extend(group.outcome.reduced for group in hosts[0].mesh._groups.values())
        return any(isinstance(e, GroupDone) for e in hosts[0].told)

    net.until(done)
    assert max(b - a for a, b in itertools.pairwise(reduced)) <= 2 * groupowner.OPEN_CHUNKS_MIN
    assert reduced[-1] > n_chunks - 200
    (outcome,) = (e.outcome for e in hosts[0].told if isinstance(e, GroupDone))
    assert outcome.included[hosts[0].name] == 2 * n_chunks and outcome.reduced > n_chunks - 100
    torch.testing.assert_close(out, given, rtol=0, atol=1e-6)


def test_who_is_asked_for_one_chunk_after_the_other_of_a_lost_owner_gives_contributors_time_for_it_once() -> None:
    """Each chunk gave one that trickles half of what was left, until there was none for the results."""
    net = MeshNet(12)
    hosts = net.add(4)
    net.tamper = lambda source, target, m: None if isinstance(m, Parcel) else m
    callers = calls(net, hosts, budget_s=64.0)
    net.until(lambda: all(host.mesh._groups for host in hosts))
    began = net.now
    (group,) = hosts[0].mesh._groups.values()
    intakes = group._owner._contributions.values()

    def time_for_it(lost: int) -> float:
        """After a while, and one more chunk of that owner: when contributors have had their time, since the start."""
        net.run(1.0)
        chunk = next(c for c, owner in enumerate(group._owner_of) if owner == lost and not group._owner.has(c))
        net.act(hosts[0], lambda mesh, now: [group._owner.wanted(chunk), *mesh.tick(now)][1:])
        (until_run,) = {intake.until_run for intake in intakes}
        return until_run - group.ground.running_s + net.now - began

    assert [time_for_it(lost) for lost in (1, 1, 1, 2)] == pytest.approx([32.5, 32.5, 32.5, 34.0], abs=0.1)
    assert not ended(callers)


@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_who_died_or_left_while_it_waited_is_not_taken_for_one_who_has_come(fault: str) -> None:
    """What it showed stays on the board for a minute."""
    net = MeshNet(5)
    hosts = net.add(2)
    Caller(net, hosts[0], 0, patience_s=60.0, target=2)
    net.run(1.0)
    getattr(net, fault)(hosts[0])
    net.run(5.0)
    alone = Caller(net, hosts[1], 1, patience_s=4.0, target=2, least=2)
    assert 4.0 <= net.until(lambda: alone.end is not None) < 5.0
    assert isinstance(alone.end, MeetingFailed) and alone.end.why == "1 of at least 2 came"


def test_who_contributes_with_weight_0_is_neither_asked_for_it_nor_waited_for() -> None:
    net = MeshNet(12)
    hosts = net.add(3)
    still = hosts[2].name
    net.tamper = lambda source, target, m: (
        None if source == still and isinstance(m, Parcel) and m.key.part == CONTRIBUTION else m
    )
    callers = [Caller(net, host, i, weight=2.0 - i) for i, host in enumerate(hosts)]
    assert net.until(lambda: ended(callers)) < 2.0
    assert all(c.outcome.included == {h.name: NUMEL for h in hosts[:2]} for c in callers)
    assert not any(c.outcome.missing for c in callers)
    check_means(callers)


@pytest.mark.parametrize("receives", [True, False])
def test_what_is_collected_beside_a_contributor_that_stands_still_is_bounded_whatever_the_number_of_the_others(
    monkeypatch: pytest.MonkeyPatch, receives: bool
) -> None:
    """One owner of all: of 32 chunks it has as many at a time as it has memory for, from three contributors."""
    n_open = 6
    monkeypatch.setattr(groupowner, "OPEN_BYTES", n_open * 3 * 4 * CHUNK)
    net = MeshNet(12)
    hosts = net.add(4)
    still = hosts[3].name
    net.tamper = lambda source, target, m: None if source == still and isinstance(m, Parcel) else m
    callers = [Caller(net, hosts[0], 0, contributes=False, receives=receives)]
    callers += [Caller(net, host, i, owns=False) for i, host in enumerate(hosts[1:], 1)]
    net.until(lambda: hosts[0].mesh._groups)
    (group,) = hosts[0].mesh._groups.values()
    most = [0, 0]

    def done() -> bool:
        reducers = group._owner._reducers.values()
        most[0], most[1] = max(most[0], len(reducers)), max(most[1], sum(r.held_bytes for r in reducers))
        return ended(callers)

    net.until(done)
    assert most[0] == n_open and most[1] == n_open * 2 * 4 * CHUNK < groupowner.OPEN_BYTES
    assert all(c.outcome.missing == {still: LATE} for c in callers[:3])
    check_means(callers[0 if receives else 1 : 3])


def test_a_slow_contributor_is_left_out_in_time_and_named() -> None:
    net = MeshNet(8)
    hosts = [*net.add(3), *net.add(1, up_Bps=100.0)]
    callers = calls(net, hosts, budget_s=20.0)
    net.until(lambda: ended(callers))
    for caller in callers[:3]:
        assert set(caller.outcome.missing) == {hosts[3].name}
    check_included_chunkwise(callers, callers[:3])


@pytest.mark.parametrize("budget_s", [16.0, 60.0])
def test_who_takes_the_place_of_an_owner_has_time_for_its_chunks(budget_s: float) -> None:
    """An owner gives its contribution, and no results: with the shorter time that is found out in its second half."""
    net = MeshNet(1, latency_s=(0.24, 0.26))
    hosts = net.add(3, up_Bps=1e5)
    silent = hosts[2].name

    def tamper(source: str, target: str, m: Any) -> Any:
        return None if source == silent and isinstance(m, Parcel) and m.key.part == RESULT else m

    net.tamper = tamper
    callers = calls(net, hosts, budget_s=budget_s)
    took_s = net.until(lambda: ended(callers[:2]))
    assert 0.5 * 16.0 < took_s < budget_s
    assert silent in callers[0].outcome.lost or silent in callers[1].outcome.lost
    for caller in callers[:2]:
        assert not caller.outcome.missing
        assert caller.outcome.included == {host.name: NUMEL for host in hosts}
    check_means([*callers[:2], callers[2]])


@pytest.mark.parametrize("how", [{}, INVITED], ids=["at once", "invited"])
@pytest.mark.parametrize("n", [3, 5])
def test_two_that_do_not_reach_each_other_own_nothing_and_are_in_with_all(n: int, how: dict[str, Any]) -> None:
    net = MeshNet(5)
    hosts = net.add(n)
    net.cut(hosts[1], hosts[2], relay=hosts[0])
    callers = calls(net, hosts, budget_s=60.0, **how)
    took_s = net.until(lambda: ended(callers))
    check_means(callers)
    for caller in callers:
        outcome = caller.outcome
        assert not outcome.missing and not outcome.lost
        assert set(outcome.included.values()) == {NUMEL}
        assert [i for i, seat in enumerate(outcome.seats) if not seat.chunks] == [1, 2]
    assert took_s < 5.0, "nobody waits for what cannot come"


def test_a_group_of_two_that_do_not_reach_each_other_owns_what_it_can() -> None:
    net = MeshNet(5)
    a, b, relay = net.add(3)
    net.cut(a, b, relay)
    callers = calls(net, [a, b], expected=(a.name, b.name), budget_s=30.0)
    net.until(lambda: ended(callers))
    assert all([seat.chunks for seat in c.outcome.seats] == [16, 16] for c in callers)


@pytest.mark.parametrize("lost", [1, 1 << 30])
def test_who_receives_nothing_has_not_failed_where_it_is_not_told_that_the_others_are_done(lost: int) -> None:
    net = MeshNet(20)
    hosts = net.add(3)
    left = [lost]

    def tamper(source: str, target: str, m: Any) -> Any:
        if isinstance(m, Done) and (source, target) == (hosts[0].name, hosts[2].name) and left[0]:
            left[0] -= 1
            return None
        return m

    net.tamper = tamper
    callers = [Caller(net, host, i, receives=i != 2, budget_s=20.0) for i, host in enumerate(hosts)]
    took_s = net.until(lambda: ended(callers))
    assert took_s < 2.0 + (DONE_AGAIN_S if lost == 1 else 20.0)
    told = callers[2].outcome
    assert told.included == dict.fromkeys((h.name for h in hosts), told.known) and not told.missing


@pytest.mark.parametrize("loss", [0.0, 0.1])
@pytest.mark.parametrize("contribute", [True, False])
def test_those_who_receive_nothing_do_not_wait_for_each_other(contribute: bool, loss: float) -> None:
    net = MeshNet(4, loss=loss)
    hosts = net.add(4)
    callers = [Caller(net, h, i, receives=i < 2, contributes=i < 2 or contribute) for i, h in enumerate(hosts)]
    net.until(lambda: ended(callers[:2]))
    assert net.until(lambda: ended(callers)) < 1.0 + 5 * DONE_AGAIN_S * (loss > 0)
    given = callers if contribute else callers[:2]
    for caller in callers:
        told = caller.outcome
        assert told.included == {c.host.name: told.known for c in given} and not told.missing
    mean = torch.stack([c.given for c in given]).double().mean(0)
    for caller in callers[:2]:
        torch.testing.assert_close(caller.out.double(), mean, rtol=1e-6, atol=1e-6)
    if not loss:
        net.run(1.0)
        assert all(not h.mesh._groups for h in hosts)


@pytest.mark.parametrize("how", ["gave up", "gave up and waits anew", "has waited too long", "refuses"])
def test_who_is_not_in_its_group_when_it_begins_is_not_waited_for_by_who_receives_nothing(how: str) -> None:
    net = MeshNet(4)
    hosts = net.add(4)
    out = hosts[3]

    def tamper(source: str, target: str, m: Any) -> Any:
        if not isinstance(m, Begin) or target != out.name:
            return m
        if how == "has waited too long":
            net.clock.at(net.now + 3 * ANSWER_S, net._deliver, out, net.hosts[source].voter, m)
            return None
        if how == "refuses":
            return replace(m, seats=tuple(replace(seat, weight=2.0) for seat in m.seats))
        if out.mesh._meetings and not anew:
            net.act(out, lambda mesh, now: mesh.give_up(callers[3].call, now))
            if how == "gave up and waits anew":
                anew.append(Caller(net, out, 3, patience_s=90.0, **INVITED))
        return m

    net.tamper = tamper
    anew: list[Caller] = []
    callers = [Caller(net, host, i, receives=i != 2, patience_s=90.0, **INVITED) for i, host in enumerate(hosts)]
    net.until(lambda: ended(callers[:3]), 3 * ANSWER_S + 2.0 if how == "has waited too long" else 2.0)
    assert callers[3].end is None and ("k" in out.mesh._meetings) == (how != "gave up")
    for caller in callers[:3]:
        assert set(caller.outcome.included) == {h.name for h in hosts[:3]}
        assert caller.outcome.missing == {out.name: NOT_COME}


def test_one_s_done_may_overtake_the_leader_s_begin() -> None:
    net = MeshNet(4)
    hosts = net.add(4)
    out, helper = hosts[3], hosts[2]
    held: list[Begin] = []

    def tamper(source: str, target: str, m: Any) -> Any:
        if isinstance(m, Begin) and target == out.name and out.mesh._meetings:
            net.act(out, lambda mesh, now: mesh.give_up(callers[3].call, now))
        if isinstance(m, Begin) and target == helper.name and not held:
            held.append(m)
            net.clock.at(net.now + 0.6, net._deliver, helper, net.hosts[source].voter, m)
            return None
        return m

    net.tamper = tamper
    callers = [Caller(net, host, i, receives=i != 2, **INVITED) for i, host in enumerate(hosts)]
    net.until(lambda: ended(callers[:3]), 20.0)
    assert held and callers[3].end is None
    assert all(set(c.outcome.included) == {h.name for h in hosts[:3]} for c in callers[:3])


def test_a_begin_is_answered_once_to_each_of_those_it_names_and_only_by_one_of_them() -> None:
    net = MeshNet(21)
    hosts = net.add(3)
    spec = GridSpec(NUMEL, CHUNK, "fp32")
    first, me, third = (Seat(host.voter, 1, 1.0, True, True, 1, 0.0, 0.0, b"") for host in hosts)
    for seats, told in (
        ((first,) * GROUP_MAX, []),
        ((first,) * (GROUP_MAX - 1) + (me,), [hosts[0]]),
        ((third, me, first, third), [hosts[0], hosts[2]]),
    ):
        effects = hosts[1].mesh.receive(hosts[0].voter, Begin("k", 7, spec, seats, False), net.now)
        assert effects == [Send(host.name, Done("k", 7)) for host in told]


def test_nobody_but_the_one_who_invited_says_who_is_in_its_group() -> None:
    net = MeshNet(22)
    hosts = net.add(3)
    forged: list[Begin] = []

    def tamper(source: str, target: str, m: Any) -> Any:
        if isinstance(m, Begin) and not forged:
            forged.append(m)
            other = next(host for host in hosts if host.name not in (source, target))
            assert not any(
                isinstance(effect, Send) and isinstance(effect.message, Done)
                for effect in net.hosts[target].mesh.receive(other.voter, m, net.now)
            )
        return m

    net.tamper = tamper
    callers = calls(net, hosts, **INVITED)
    net.until(lambda: ended(callers))
    assert forged and all(not c.outcome.missing for c in callers)
    check_means(callers)


def test_a_member_that_is_done_tells_who_asks_it_that_nobody_contributes_any_more() -> None:
    net = MeshNet(2, detect_s=0.5)
    hosts = net.add(3)
    net.tamper = lambda source, target, m: (
        None if isinstance(m, Parcel) and m.key.part == RESULT and target == hosts[2].name else m
    )
    callers = [Caller(net, host, i, contributes=i == 0) for i, host in enumerate(hosts)]
    net.until(lambda: callers[1].end is not None)
    net.kill(hosts[0])
    net.until(lambda: callers[2].end is not None, 5.0)
    assert not callers[1].outcome.missing
    assert isinstance(callers[2].end, GroupFailed) and callers[2].end.why == NOBODY


@pytest.mark.parametrize("how", ["short", "nan", "seats", "left out"])
def test_nonsense_of_one_member_is_refused_and_counted_under_its_name(how: str) -> None:
    net = MeshNet(9)
    hosts = net.add(4)
    liar = hosts[2].name

    def tamper(source: str, target: str, m: Any) -> Any:
        if source != liar or not isinstance(m, Parcel):
            return m
        if how == "short":
            return replace(m, payload=m.payload[:-4])
        if how == "nan":
            return replace(m, payload=b"\xff" * len(m.payload))
        if how == "left out":
            return replace(m, left_out=(LeftOut(0, "late"),)) if m.included else m
        return replace(m, included=(0, 9)) if m.included else m

    net.tamper = tamper
    callers = calls(net, hosts)
    net.until(lambda: ended([c for c in callers if c.host.name != liar]))
    honest = [c for c in callers if c.host.name != liar]
    for caller in honest:
        assert (liar in caller.outcome.missing) == (how in ("short", "nan"))
        assert liar in caller.outcome.lost
    check_included_chunkwise(callers, honest)
    assert sum(h.mesh.ground.dropped[liar, reason] for h in hosts for reason in REASONS[how]) > 0 or how == "nan"


REASONS = {"short": ["wrong size"]} | dict.fromkeys(["nan", "seats", "left out"], ["a result that cannot be"])


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_what_is_not_finite_is_told_as_that_by_all_and_to_its_own_peer(codec: str) -> None:
    """Only owners saw why: the others, and who has the NaN and owns nothing, said that it came late."""
    net = MeshNet(12)
    hosts = net.add(4)
    sick = hosts[1]
    callers = [Caller(net, host, i, codec=codec, owns=host is not sick) for i, host in enumerate(hosts)]
    callers[1].given.fill_(float("nan"))
    net.until(lambda: ended(callers))
    assert [c.outcome.missing for c in callers] == [{sick.name: NOT_FINITE}] * 4


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_what_the_codec_rounds_off_stays_with_whoever_wants_it_and_no_nan_gets_into_the_mean(codec: str) -> None:
    net = MeshNet(13)
    hosts = net.add(3)
    callers = [Caller(net, host, i, codec=codec, keeps_unsaid=i > 0) for i, host in enumerate(hosts)]
    plain, keeps, bad = callers
    bad.given[CHUNK + 1] = math.nan  # before anybody has read it
    net.until(lambda: ended(callers))
    grid = plain.call.grid
    for caller in (keeps, bad):
        for chunk in range(grid.n_chunks):
            part = slice(*grid.span(chunk))
            unsaid = grid.unsaid(chunk, caller.given[part]) if caller is keeps or chunk != 1 else torch.zeros(CHUNK)
            assert torch.equal(caller.out[part], plain.out[part] + unsaid), chunk
    assert 1 in bad.outcome.without_mine and plain.out.isfinite().all() and not torch.equal(keeps.out, plain.out)


@pytest.mark.parametrize("why", ["", "x" * 1000])
def test_a_member_that_gives_no_reason_or_a_long_one_costs_its_own_contribution(why: str) -> None:
    """It went on with the results, whose receivers refuse such a reason."""
    net = MeshNet(13)
    hosts = net.add(4)
    mute = hosts[2]
    net.tamper = lambda source, target, m: (
        NoParcel(m.key, why) if isinstance(m, Parcel) and source == mute.name and m.key.part == CONTRIBUTION else m
    )
    callers = [Caller(net, host, i, owns=host is not mute) for i, host in enumerate(hosts)]
    net.until(lambda: ended(callers))
    assert [c.outcome.missing for c in callers] == [{mute.name: why[:WHY_CHARS_MAX] or LATE}] * 4


def test_a_begin_that_cannot_be_starts_nothing() -> None:
    net = MeshNet(10)
    hosts = net.add(3)

    def tamper(source: str, target: str, m: Any) -> Any:
        return replace(m, seats=m.seats[:1]) if isinstance(m, Begin) else m

    net.tamper = tamper
    callers = calls(net, hosts, patience_s=4.0, least=2, budget_s=10.0, **INVITED)
    net.until(lambda: ended(callers), 200.0)
    assert any("cannot be" in bad for h in hosts for bad in h.bad)
    assert not any(isinstance(c.end, GroupDone) and len(c.outcome.included) > 1 for c in callers)


def test_a_group_that_fails_as_it_begins_asks_nobody_for_anything_more() -> None:
    """Its only contributor had left: there was no mean of what this peer owns, and it asked another for the rest."""
    me, other, gone = hosts = MeshNet(23).add(3)
    grid = Grid(NUMEL, CHUNK, "fp32")
    owned = (grid.n_chunks // 2, grid.n_chunks // 2, 0)
    seats = tuple(Seat(h.voter, 1, 1.0, h is gone, True, n, 0.0, 0.0, b"") for h, n in zip(hosts, owned, strict=True))
    me.seen.left.add(gone.voter)
    begin, call = Begin("k", 7, GridSpec(NUMEL, CHUNK, "fp32"), seats, False), Call("k", grid, None, torch.zeros(NUMEL))
    group = Reduction(me.mesh.ground, me.mesh.parcels, other.voter, begin, call, Tally())
    group.start()
    assert group.failed and not me.mesh.parcels._intakes


def test_giving_up_leaves_nothing_behind_and_nothing_is_written_any_more() -> None:
    net = MeshNet(11)
    hosts = net.add(3, up_Bps=2e3)
    callers = calls(net, hosts)
    net.run(1.0)
    net.act(hosts[0], lambda mesh, now: mesh.give_up(callers[0].call, now))
    seen = callers[0].out.clone()
    net.until(lambda: ended(callers))
    assert isinstance(callers[0].end, GroupFailed) and callers[0].end.why == "given up"
    assert torch.equal(seen.isnan(), callers[0].out.isnan())
    assert not hosts[0].mesh.parcels.holdings._held
    check_included_chunkwise(callers, callers[1:])


def test_links_are_opened_to_those_who_wait_for_the_same_group() -> None:
    """Before it begins: its first bytes would wait for the handshakes."""
    net = MeshNet(3)
    hosts = net.add(3)
    callers = calls(net, hosts[:2], patience_s=5.0)
    net.run(1.0)
    assert not any(c.end for c in callers), "they wait for the third"
    assert hosts[0].mesh.bulk_peers() == {hosts[1].name} and hosts[1].mesh.bulk_peers() == {hosts[0].name}
    assert not hosts[2].mesh.bulk_peers()


def test_calls_with_a_key_each_leave_nothing_on_the_board_however_patient_they_are() -> None:
    net = MeshNet(3)
    hosts = net.add(3)
    for step in range(20):
        callers = [Caller(net, h, i, f"k#{step}", least=3, patience_s=3600.0) for i, h in enumerate(hosts)]
        net.until(lambda callers=callers: all(c.end for c in callers), 20.0)  # type: ignore[misc]
        assert all(isinstance(c.end, GroupDone) for c in callers)
    lonely = Caller(net, hosts[0], 0, "nobody else", least=2, patience_s=3600.0)
    net.act(hosts[0], lambda mesh, now: mesh.give_up(lonely.call, now))
    net.run(2 * WITHDRAWN_S)
    assert lonely.end is None and not any(h.mesh.board._by_key for h in hosts)


@pytest.mark.parametrize("names", [OLD_GROUPS_MAX + 2, 1])
def test_a_slow_member_gets_all_of_the_means_of_many_names_and_of_one_name_the_last_ones(names: int) -> None:
    """Of all names together no more than some were kept for it, and it had its own vector in the others' chunks."""
    net = MeshNet(3)
    quick, slow = hosts = net.add(2)
    net.tamper = lambda source, target, m: (
        None if isinstance(m, Parcel) and m.key.part == RESULT and target == slow.name else m
    )
    pairs = list[list[Caller]]()
    for i in range(OLD_GROUPS_MAX + 2):
        pairs.append(calls(net, hosts, key=f"k{i % names}#{i}"))
        net.until(lambda: pairs[-1][0].end, 2.0)
    net.tamper = lambda source, target, m: m
    net.until(lambda: ended([of_slow for _, of_slow in pairs]))
    lacking = [i for i, (_, of_slow) in enumerate(pairs) if set(of_slow.outcome.missing) == {quick.name}]
    assert lacking == ([0, 1] if names == 1 else []), "it is told, too"
    for i, pair in enumerate(pairs):
        if i not in lacking:
            check_means(pair)
    net.until(lambda: not any(host.mesh._groups for host in hosts))


def test_of_all_groups_that_still_serve_others_no_more_than_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers may have a name for each call."""
    monkeypatch.setattr(mesh_module, "ALL_OLD_GROUPS_MAX", 2)
    net = MeshNet(3)
    quick, slow = hosts = net.add(2)
    net.tamper = lambda source, target, m: (
        None if isinstance(m, Parcel) and m.key.part == RESULT and target == slow.name else m
    )
    for i in range(4):
        caller, _ = calls(net, hosts, key=f"k{i}")
        net.until(lambda c=caller: c.end, 2.0)  # type: ignore[misc]
    assert sorted(key for key, _ in quick.mesh._groups) == ["k2", "k3"]
