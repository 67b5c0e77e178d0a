"""Bytes of one peer fetched by another, and whom a group waits for, on a virtual clock."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from dlc.comm.calls import Call, GroupDone
from dlc.comm.grid import Grid
from dlc.comm.loans import borrow, give_back, lend
from dlc.sim.meshnet import Host, MeshNet


class State(bytearray):
    """As plain ones, but that weak references may lead to it."""


class Borrower:
    def __init__(self, net: MeshNet, host: Host, name: str, holder: str, n_bytes: int, limit_s: float = 60.0) -> None:
        self.out, self.ends = bytearray(n_bytes), list[str]()
        net.act(host, lambda mesh, now: borrow(mesh, name, holder, self.out, limit_s, self.ends.append, now))


@pytest.mark.parametrize("n_bytes", [1, 3, 4, 5, 100_001])
def test_bytes_of_any_length_and_value_arrive_as_they_are(n_bytes: int) -> None:
    net = MeshNet(loss=0.1, duplicates=0.1)
    first, second = net.add(2)
    for round_ in range(2):  # the second under the same name
        data = random.Random(round_).randbytes(n_bytes - 1) + b"\xff"
        net.act(first, lambda mesh, now, data=data: lend(mesh, "state", data, 60.0, now))
        got = Borrower(net, second, "state", first.name, n_bytes)
        net.until(lambda got=got: bool(got.ends))
        assert got.ends == [""] and bytes(got.out) == data
    assert not second.mesh.parcels._intakes
    net.run(61.0)
    assert not first.mesh.parcels.holdings._held, "memory must come back when the time of a loan is over"


def test_what_is_not_there_any_more_is_told_once() -> None:
    net = MeshNet()
    first, second, third = net.add(3)
    net.act(first, lambda mesh, now: lend(mesh, "state", bytes(100_000), 5.0, now))
    net.run(6.0)
    late = Borrower(net, second, "state", first.name, 100_000)
    stranger = Borrower(net, second, "state", "nobody", 10)
    never = Borrower(net, second, "nothing", third.name, 10, limit_s=4.0)
    net.act(third, lambda mesh, now: lend(mesh, "state", bytes(100_000), 60.0, now))
    wrong = Borrower(net, second, "state", third.name, 90_000)
    net.until(lambda: all(b.ends for b in (late, stranger, never, wrong)))
    net.run(10.0)
    assert all(len(b.ends) == 1 and b.ends[0] for b in (late, stranger, never, wrong))


def test_a_borrower_waits_no_longer_than_it_said_though_some_comes_all_the_time() -> None:
    net = MeshNet()
    first, second = net.add(2)
    net.act(first, lambda mesh, now: lend(mesh, "state", bytes(20_000_000), 60.0, now))
    got, began = Borrower(net, second, "state", first.name, 20_000_000, limit_s=5.0), net.now
    net.until(lambda: bool(got.ends))
    assert got.ends == ["late"] and 5.0 <= net.now - began < 6.0


@pytest.mark.parametrize("lent_s", [60.0, 0.0])
def test_what_has_come_or_failed_is_not_left_to_the_garbage_collector(lent_s: float) -> None:
    """It is a whole state, which its caller may have read long before."""
    net = MeshNet()
    first, second = net.add(2)
    net.act(first, lambda mesh, now: lend(mesh, "state", bytes(1000), lent_s, now))
    net.run(1.0)
    gc.collect()
    gc.disable()
    try:
        out, ends = State(1000), list[str]()
        net.act(second, lambda mesh, now, out=out: borrow(mesh, "state", first.name, out, 60.0, ends.append, now))
        net.until(lambda: bool(ends))
        assert (ends == [""]) == bool(lent_s)
        left = weakref.ref(out)
        del out
        assert left() is None
    finally:
        gc.enable()


def test_what_is_lent_anew_meanwhile_is_not_mixed_with_what_was_before() -> None:
    net = MeshNet()
    first, second = net.add(2)
    net.act(first, lambda mesh, now: lend(mesh, "state", bytes(20_000_000), 60.0, now))
    got = Borrower(net, second, "state", first.name, 20_000_000)
    net.run(2.0)
    net.act(first, lambda mesh, now: lend(mesh, "state", b"1" * 20_000_000, 60.0, now))
    net.until(lambda: bool(got.ends))
    assert got.ends == ["it is no longer held"]


def test_what_is_given_back_takes_no_memory_and_who_borrows_it_is_told() -> None:
    net = MeshNet()
    first, second = net.add(2)
    net.act(first, lambda mesh, now: lend(mesh, "state", bytes(20_000_000), 60.0, now))
    got = Borrower(net, second, "state", first.name, 20_000_000)
    net.run(2.0)
    net.act(first, lambda mesh, now: give_back(mesh, "state", now))
    assert not first.mesh.parcels.holdings._held
    net.until(lambda: bool(got.ends))
    assert got.ends == ["it is no longer held"]


def test_a_group_waits_for_whom_a_function_names_as_long_as_it_does() -> None:
    net = MeshNet()
    hosts = net.add(4)
    awaited = {h.name for h in hosts[:3]}

    def call(host: Host, target: int) -> None:
        grid = Grid(8, 8, "fp32")
        net.act(
            host,
            lambda mesh, now: mesh.meet(
                Call("k", grid, torch.ones(8), torch.zeros(8), target=target, expected=lambda: awaited, patience_s=1e3),
                now,
            ),
        )

    def done(host: Host) -> list[GroupDone]:
        return [event for event in host.told if isinstance(event, GroupDone)]

    for host, target in zip(hosts[:2], (0, 4), strict=True):
        call(host, target)
    net.run(30.0)
    assert not any(done(host) for host in hosts)
    awaited.discard(hosts[2].name)
    net.until(lambda: all(done(host) for host in hosts[:2]))
    assert all(len(done(host)[0].outcome.seats) == 2 for host in hosts[:2])
