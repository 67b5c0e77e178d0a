"""The taking side of parcels on a virtual clock: how long a holder may be silent follows from its pace alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dlc.comm.effects import Effect
from dlc.comm.grid import Grid
from dlc.comm.holdings import ASKED_MAX, CHANNEL_CHARS_MAX, RELEASED_MAX, Holding
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Key, Parcel, Pull
from dlc.comm.messages import GridSpec
from dlc.comm.parcels import ASKS_MAX, LATE, SILENCE_S_MIN, Intake
from dlc.sim.meshnet import Host, MeshNet

GRID = Grid(1000, 32, "fp32")
KEY = Key("k", 0, 0)


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
