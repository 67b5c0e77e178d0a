"""The taking side of parcels on a virtual clock: how long a holder may be silent follows from its pace alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dlc.comm.effects import Effect
from dlc.comm.grid import Grid
from dlc.comm.holdings import ASKED_MAX, CHANNEL_CHARS_MAX, EARLY_MAX, EARLY_S, RELEASED_MAX, Holding
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Key, Parcel, Pull
from dlc.comm.messages import GridSpec
from dlc.comm.parcels import ASKS_MAX, DEAD, LATE, SILENCE_S_MIN, WRONG_SIZE, Intake
from dlc.errors import ProtocolError
from dlc.sim.meshnet import Host, MeshNet

GRID = Grid(1000, 32, "fp32")
KEY = Key("k", 0, 0)
SPEC = GridSpec(GRID.numel, GRID.chunk_elems, GRID.codec)


class Taker:
    """One peer that pulls what another holds."""

    def __init__(self, net: MeshNet, host: Host, holder: Host, key: Key = KEY) -> None:
        self.net, self.host = net, host
        self.taken, self.failed = list[int](), list[str]()
        self.intake = Intake(
            key, holder.voter, GRID, 1e9, 1, lambda parcel: self.taken.append(parcel.chunk), self.failed.append
        )

    def want(self, chunks: Iterable[int]) -> None:
        def act(mesh: Mesh, now: float) -> list[Effect]:
            mesh.ground.wake(now)
            mesh.parcels.want(self.intake, chunks)
            return mesh.ground.drain()

        self.net.act(self.host, act)


def hold(mesh: Mesh, now: float, *keys: Key) -> list[Effect]:
    mesh.ground.wake(now)
    for key in keys or (KEY,):
        mesh.parcels.holdings.hold(key, Holding(GRID, 1e9, vector=torch.zeros(GRID.numel)))
    return mesh.ground.drain()


def test_time_in_which_nothing_was_wanted_is_no_pause_of_the_holder() -> None:
    """Wanted anew after a long rest: rate and patience are those of the time in which something was in the air."""
    net = MeshNet(1)
    holder, host = net.add(2)
    net.act(holder, hold)
    taker = Taker(net, host, holder)
    for part in range(3):
        taker.want(range(4 * part, 4 * part + 4))
        assert net.until(lambda n=4 * part + 4: len(taker.taken) == n) < 1.0
        net.run(30.0)
    assert taker.intake.active_s < 3.0 and taker.intake.gap_s < 1.0

    def lose(source: str, target: str, m: Any) -> Any:
        return None if isinstance(m, Parcel) else m

    net.tamper = lose
    taker.want(range(12, 16))
    asked_s = (ASKS_MAX + 1) * SILENCE_S_MIN
    assert asked_s <= net.until(lambda: taker.failed) < asked_s + 2.0
    assert taker.failed == [LATE]


def test_what_waits_behind_other_parcels_of_its_holder_is_not_asked_for_again_nor_given_up() -> None:
    """Results behind contributions came twice in groups of eight, a quarter of all bytes; and behind more, late."""
    net, other = MeshNet(1), Key("k", 1, 0)
    (holder,), (host,) = net.add(1, up_Bps=500.0), net.add(1)
    net.act(holder, lambda mesh, now: hold(mesh, now, KEY, other))
    first, second = Taker(net, host, holder), Taker(net, host, holder, other)
    first.want(range(GRID.n_chunks))
    net.until(lambda: first.taken)
    second.want(range(4))
    took_s = net.until(lambda: len(second.taken) == 4 or second.failed, 60.0)
    assert not (first.failed or second.failed) and took_s > (ASKS_MAX + 1) * SILENCE_S_MIN
    assert (net.sent["Pull"], net.sent["Parcel"]) == (2, 4 + GRID.n_chunks)


def test_what_was_lost_is_asked_for_again_though_its_holder_goes_on_with_what_was_asked_for_later() -> None:
    """The later goes on for as long as its owner likes, and an owner's contributors have half of a group's time."""
    net, later = MeshNet(1), Key("k", 1, 0)
    holder, host = net.add(2)
    net.act(holder, lambda mesh, now: hold(mesh, now, KEY, later))
    lost, other = Taker(net, host, holder), Taker(net, host, holder, later)
    net.tamper = lambda source, target, m: None if isinstance(m, Pull) else m
    lost.want(range(4))
    net.tamper = lambda source, target, m: m
    for chunk in range(20):
        other.want([chunk])
        net.run(SILENCE_S_MIN / 2)
        assert len(other.taken) == chunk + 1
    assert sorted(lost.taken) == list(range(4)) and not lost.failed


def test_a_holder_that_has_one_thing_not_yet_is_asked_again_for_another_that_was_lost() -> None:
    """Results that wait for somebody's contribution are asked for again and again: `Coming` is all that is heard. What
    had pauses of its own has a longer patience, which did not end before the group's time for contributions did."""
    net, other = MeshNet(1), Key("k", 1, 0)
    holder, host = net.add(2)

    def offer(mesh: Mesh, now: float) -> list[Effect]:
        mesh.ground.wake(now)
        mesh.parcels.holdings.hold(other, Holding(GRID, 1e9))
        return [*mesh.ground.drain(), *hold(mesh, now)]

    net.act(holder, offer)
    lost, coming = Taker(net, host, holder), Taker(net, host, holder, other)
    lost.want(range(4))
    net.until(lambda: len(lost.taken) == 4)
    lost.intake.gap_s = 1.0
    net.tamper = lambda source, target, m: None if isinstance(m, Parcel) else m
    lost.want(range(4, 8))
    coming.want(range(4))
    net.run(SILENCE_S_MIN / 2)
    net.tamper = lambda source, target, m: m
    net.until(lambda: len(lost.taken) == 8 or lost.failed, 30.0)
    assert not (lost.failed or coming.failed)


def test_what_will_not_be_held_is_told_to_who_asks_and_of_so_many_keys_as_can_be_asked_for() -> None:
    net, other = MeshNet(1), Key("other", 0, 0)
    holder, host = net.add(2)
    holdings = holder.mesh.parcels.holdings
    takers = [Taker(net, host, holder, key) for key in (KEY, other)]
    for taker in takers:
        taker.want([0])
    net.run(0.5)
    assert not any(taker.failed for taker in takers)

    def never(mesh: Mesh, now: float) -> list[Effect]:
        mesh.ground.wake(now)
        mesh.parcels.holdings.never(KEY, "did not come")
        return mesh.ground.drain()

    net.act(holder, never)
    net.run(0.5)
    assert takers[0].failed == ["did not come"] and not takers[1].failed
    takers.append(Taker(net, host, holder))
    takers[2].want([0])
    net.run(0.5)
    assert takers[2].failed == ["did not come"] and not holdings.was_held(KEY)
    for step in range(1, RELEASED_MAX + 1):
        holdings.never(Key("k", step, 0), "")
    holdings.never(Key("k" * (CHANNEL_CHARS_MAX + 1), 0, 0), "")
    assert len(holdings._never) == RELEASED_MAX and KEY not in holdings._never


def test_of_too_much_that_is_asked_for_as_much_as_there_is_room_for_is_sent() -> None:
    """Several vectors may be pulled by one peer at once."""
    net = MeshNet(1)
    holder, host = net.add(2)
    grid = Grid(ASKED_MAX, 1, "fp32")
    spec = GridSpec(grid.numel, grid.chunk_elems, grid.codec)
    keys = [Key("k", step, 0) for step in range(2)]
    holdings = holder.mesh.parcels.holdings
    for key in keys:
        holdings.hold(key, Holding(grid, 1e9, vector=torch.zeros(grid.numel)))
        holdings.asked(host.voter, Pull(key, spec, tuple(range(ASKED_MAX - 100))))
    sent = [parcel.key for parcel in iter(lambda: holdings.next_bulk(host.name), None)]
    assert sent == [keys[0]] * (ASKED_MAX - 100) + [keys[1]] * 100
    assert holder.mesh.ground.dropped == {(host.name, "asks for too much"): 1}


def test_whose_chunks_wait_to_be_sent_is_told_that_they_are_held_no_longer() -> None:
    """It waited for as long as the silence of its holder could be explained."""
    net, why = MeshNet(1), "a newer one is shown"
    (holder,), (host,) = net.add(1, up_Bps=50.0), net.add(1)
    net.act(holder, hold)
    taker = Taker(net, host, holder)
    taker.want(range(4))
    net.until(lambda: len(taker.taken) == 1)

    def release(mesh: Mesh, now: float) -> list[Effect]:
        mesh.ground.wake(now)
        mesh.parcels.holdings.release(KEY, why)
        return mesh.ground.drain()

    net.act(holder, release)
    assert not holder.mesh.pending_bulk()
    assert net.until(lambda: taker.failed) < SILENCE_S_MIN and taker.failed == [why]


def test_what_another_failure_has_stopped_does_not_fail() -> None:
    """Both were wanted of one peer, and who wanted them had no use for the second without the first."""
    net, other = MeshNet(1), Key("k", 1, 0)
    holder, host = net.add(2)
    takers = [Taker(net, host, holder, key) for key in (KEY, other)]
    for taker, left in zip(takers, takers[::-1], strict=True):

        def failed(why: str, taker: Taker = taker, left: Taker = left) -> None:
            taker.failed.append(why)
            host.mesh.parcels.stop(left.intake)

        taker.intake.failed = failed
        taker.want(range(4))
    net.kill(holder)
    net.until(lambda: any(taker.failed for taker in takers))
    assert [taker.failed for taker in takers] == [[DEAD], []]


def test_a_parcel_that_nobody_asked_for_or_that_came_before_is_dropped_and_counted() -> None:
    net = MeshNet(1)
    holder, host = net.add(2)
    net.act(holder, hold)
    taker = Taker(net, host, holder)
    came = list[Parcel]()
    net.tamper = lambda source, target, m: (came.append(m), m)[1] if isinstance(m, Parcel) else m
    taker.want(range(2))
    net.until(lambda: len(taker.taken) == 2)
    taker.want([2])
    for parcel in (came[0], dataclasses.replace(came[0], chunk=7), dataclasses.replace(came[0], key=Key("k", 1, 0))):
        host.mesh.receive(holder.voter, parcel, net.now)
    assert host.mesh.ground.dropped == {(holder.name, "not asked for"): 3}
    net.until(lambda: len(taker.taken) == 3)
    assert taker.taken == [0, 1, 2] and not taker.failed


def test_a_parcel_of_a_wrong_size_ends_what_is_wanted_of_its_holder() -> None:
    net = MeshNet(1)
    holder, host = net.add(2)
    net.act(holder, hold)
    taker = Taker(net, host, holder)
    net.tamper = lambda source, target, m: (
        dataclasses.replace(m, payload=bytes(m.payload)[:-4]) if isinstance(m, Parcel) else m
    )
    taker.want(range(4))
    net.until(lambda: host.bad)
    assert taker.failed == [WRONG_SIZE] and not taker.taken and not host.mesh.parcels._intakes


@pytest.mark.parametrize(
    "pull", [Pull(KEY, SPEC, (0,) * (ASKED_MAX + 1)), Pull(Key("k" * (CHANNEL_CHARS_MAX + 1), 0, 0), SPEC, (0,))]
)
def test_a_request_out_of_bounds_is_refused(pull: Pull) -> None:
    net = MeshNet(1)
    holder, host = net.add(2)
    with pytest.raises(ProtocolError):
        holder.mesh.receive(host.voter, pull, net.now)
    assert not holder.mesh.parcels.holdings._early


def test_of_chunks_that_there_are_not_nothing_is_kept() -> None:
    net = MeshNet(1)
    holder, host = net.add(2)
    net.act(holder, hold)
    holder.mesh.receive(host.voter, Pull(KEY, SPEC, (-1, GRID.n_chunks, 1 << 62)), net.now)
    assert not holder.mesh.pending_bulk() and not holder.mesh.parcels.holdings._waiting[KEY]


@pytest.mark.parametrize("grid", [Grid(1000, 32, "bf16"), Grid(1000, 16, "fp16"), Grid(999, 32, "fp16")])
def test_who_asks_for_another_vector_than_is_held_gets_nothing_of_it(grid: Grid) -> None:
    """Its parts may be as long: read in another codec, or put elsewhere, they would be numbers of nobody."""
    net = MeshNet(1)
    holder, host = net.add(2)

    def halves(mesh: Mesh, now: float) -> list[Effect]:
        mesh.ground.wake(now)
        held = Holding(Grid(1000, 32, "fp16"), 1e9, vector=torch.ones(1000))
        mesh.parcels.holdings.hold(KEY, held)
        return mesh.ground.drain()

    net.act(holder, halves)
    taker = Taker(net, host, holder)
    taker.intake.grid, taker.intake.spec = grid, GridSpec(grid.numel, grid.chunk_elems, grid.codec)
    taker.want([0])
    net.until(lambda: taker.failed)
    assert not taker.taken and taker.failed[0].startswith("1000 elements in fp16 are held, and ")
    assert net.sent["Parcel"] == 0


def test_what_is_asked_for_too_early_is_kept_for_a_while_within_bounds() -> None:
    net = MeshNet(1)
    holder, host, other = net.add(3)
    holdings = holder.mesh.parcels.holdings
    for sender in (host, other):
        for step in range(EARLY_MAX // 2 + 9):
            holder.mesh.receive(sender.voter, Pull(Key("k", step, 0), SPEC, (0,)), net.now)
    assert len(holdings._early) == EARLY_MAX
    net.kill(other)
    net.run(net.detect_s + 0.5)
    assert {sender for _, sender, _ in holdings._early} == {host.voter}, "nothing is sent to the dead"
    net.act(holder, hold)
    net.until(lambda: net.sent["Parcel"] == 1)
    assert len(holdings._early) == EARLY_MAX // 2 + 8, "what is sent is asked for no longer"
    net.run(EARLY_S)
    assert not holdings._early


def test_what_waits_to_be_sent_to_the_dead_waits_no_longer() -> None:
    net = MeshNet(1)
    (holder,), (host, other) = net.add(1, up_Bps=100.0), net.add(2)
    net.act(holder, hold)
    for asker in (host, other):
        holder.mesh.receive(asker.voter, Pull(KEY, SPEC, tuple(range(GRID.n_chunks))), net.now)
    assert set(holder.mesh.pending_bulk()) == {host.voter.peer, other.voter.peer}
    net.kill(other)
    net.run(net.detect_s + 0.5)
    assert set(holder.mesh.pending_bulk()) == {host.voter.peer}


def test_what_comes_to_be_after_its_asker_died_is_sent_to_the_living_alone() -> None:
    net = MeshNet(1)
    (holder,), (host, other) = net.add(1, up_Bps=100.0), net.add(2)
    holdings = holder.mesh.parcels.holdings
    holdings.hold(KEY, Holding(GRID, 1e9))
    for asker in (host, other):
        holder.mesh.receive(asker.voter, Pull(KEY, SPEC, (0,)), net.now)
    net.kill(other)
    net.run(net.detect_s + 0.5)
    holdings.put(KEY, Parcel(KEY, 0, 1.0, (), (), bytes(GRID.wire_bytes(0))))
    assert holdings.pending() == [host.voter.peer]


def test_a_holding_ends_with_its_time_and_who_asks_then_is_told() -> None:
    net = MeshNet(1)
    holder, host = net.add(2)
    holdings = holder.mesh.parcels.holdings
    holdings.hold(KEY, Holding(GRID, holder.mesh.ground.running_s + 5.0, vector=torch.zeros(GRID.numel)))
    net.run(4.0)
    assert holdings.held(KEY) is not None
    net.run(2.0)
    assert holdings.held(KEY) is None and holdings.was_held(KEY) and not holdings.any
    taker = Taker(net, host, holder)
    taker.want([0])
    net.until(lambda: taker.failed)
    assert taker.failed == ["it is no longer held"]


def test_of_the_keys_that_were_released_the_last_are_remembered() -> None:
    net = MeshNet(1)
    (holder,) = net.add(1)
    holdings = holder.mesh.parcels.holdings
    for step in range(RELEASED_MAX + 3):
        holdings.hold(Key("k", step, 0), Holding(GRID, 1e9))
        holdings.release(Key("k", step, 0))
    assert [holdings.was_held(Key("k", step, 0)) for step in (2, 3, RELEASED_MAX + 2)] == [False, True, True]


def test_a_holder_whose_parcels_are_often_lost_is_asked_as_long_as_some_come() -> None:
    """Silences count where they follow each other."""
    net = MeshNet(1)
    holder, host = net.add(2)
    net.act(holder, hold)
    taker = Taker(net, host, holder)
    for n in range(1, 2 * ASKS_MAX):
        net.tamper = lambda source, target, m: None if isinstance(m, Parcel) else m
        taker.want([n])
        net.until(lambda n=n: taker.intake.asks or taker.failed)
        net.tamper = lambda source, target, m: m
        net.until(lambda n=n: len(taker.taken) == n or taker.failed)
        assert not taker.failed and taker.intake.asks == 0


def test_what_is_always_about_to_come_is_waited_for_until_the_time_is_over() -> None:
    net, limit_s = MeshNet(1), 4 * (ASKS_MAX + 1) * SILENCE_S_MIN
    holder, host = net.add(2)
    holder.mesh.parcels.holdings.hold(KEY, Holding(GRID, 1e9))
    taker = Taker(net, host, holder)
    taker.intake.until_run = host.mesh.ground.running_s + limit_s
    taker.want(range(4))
    assert limit_s - 1.0 < net.until(lambda: taker.failed) < limit_s + 1.0
    assert taker.failed == [LATE] and net.sent["Coming"] > ASKS_MAX + 1
