"""Notices that outlive their authors: newcomers see them, whoever went in which order, and no longer than they last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dlc.comm import board as board_module
from dlc.comm.heirs import LOOK_S, TURN_S
from dlc.sim.meshnet import DETECT_S, Host, MeshNet

SOON_S = DETECT_S + TURN_S + 2 * LOOK_S


def lasting(n: int, seed: int = 0) -> tuple[MeshNet, list[Host]]:
    net = MeshNet(seed)
    hosts = net.add(n)
    for host in hosts:
        keep(net, host)
    return net, hosts


def keep(net: MeshNet, host: Host) -> Host:
    net.act(host, lambda mesh, now: [*mesh.outlive("dht/", False, now), *mesh.outlive("hello/", True, now)])
    return host


def post(net: MeshNet, host: Host, key: str, value: bytes, ttl_s: float = 300.0) -> None:
    net.act(host, lambda mesh, now: mesh.post(key, value, ttl_s, now))
    net.run(1.0)


def seen(host: Host, key: str = "dht/k") -> dict[str, bytes]:
    return {peer: posted.value for peer, posted in host.mesh.board.get(key).items()}


def values(host: Host, key: str = "dht/k") -> set[bytes]:
    return set(seen(host, key).values())


@pytest.mark.parametrize("goes", [MeshNet.leave, MeshNet.kill])
def test_a_newcomer_sees_what_one_that_is_gone_has_said_until_it_ends(goes: Callable[[MeshNet, Host], None]) -> None:
    net, (a, *others) = lasting(4)
    post(net, a, "dht/k", b"v", 100.0)
    post(net, a, "other", b"v", 100.0)
    goes(net, a)
    net.run(SOON_S)
    late = keep(net, net.start("zz"))
    net.until(lambda: values(late) == {b"v"}, 10.0)
    assert len(seen(late)) == 1, "one says it for all"
    assert not seen(late, "other"), "that was not to last"
    net.run(100.0)
    assert not any(values(host) for host in (late, *others))


def test_what_is_said_for_another_is_said_on_when_that_one_goes_too() -> None:
    net, (a, *others) = lasting(4)
    post(net, a, "dht/k", b"v")
    net.kill(a)
    net.run(SOON_S)
    for _ in range(2):
        (heir,) = [host for host in others if host.name in seen(others[0]) and not host.dead]
        net.kill(heir)
        others.remove(heir)
        net.run(SOON_S)
    late = keep(net, net.start("zz"))
    net.until(lambda: values(late) == {b"v"}, 10.0)


@pytest.mark.parametrize("seed", range(4))
def test_where_the_next_in_order_came_too_late_to_know_another_says_it(seed: int) -> None:
    net, (a, b) = lasting(2, seed)
    post(net, a, "dht/k", b"v")
    net.kill(a)
    ignorant = [keep(net, net.start(f"z{seed}{i}")) for i in range(4)]
    net.run(SOON_S + 5 * TURN_S)
    assert all(values(host) == {b"v"} for host in (b, *ignorant))


def test_who_comes_again_shows_its_own_and_what_was_said_for_it_is_withdrawn() -> None:
    net, (a, b, c) = lasting(3)
    post(net, a, "dht/k", b"v")
    post(net, a, "dht/own", b"v")
    net.freeze(a)
    net.run(SOON_S)
    assert {len(seen(b, key)) for key in ("dht/k", "dht/own")} == {2}
    heir = b if b.name in seen(c, "dht/own") else c
    post(net, heir, "dht/own", b"mine")
    net.thaw(a)
    net.run(2 * LOOK_S)
    assert seen(b) == seen(c) == {a.name: b"v"}
    assert seen(b, "dht/own") == {a.name: b"v", heir.name: b"mine"}, "what it says for itself stays"


def test_what_one_said_before_it_was_started_again_is_said_on_and_it_sees_it_too() -> None:
    net, (a, b, c) = lasting(3)
    post(net, a, "dht/k", b"v")
    net.kill(a)
    again = keep(net, net.start(a.name, inc=2))
    net.until(lambda: values(again) == {b"v"}, SOON_S + TURN_S)
    post(net, again, "dht/k", b"new")
    net.run(SOON_S)
    assert values(b) == values(c) == {b"v", b"new"}


def test_under_a_key_of_its_own_nobody_speaks_for_another_and_of_two_each_is_said_on() -> None:
    net, (a, b, c, d, e) = lasting(5)
    for host in (a, b, c):
        post(net, host, "dht/k", host.name.encode())
    net.kill(a)
    net.kill(b)
    net.run(SOON_S + TURN_S)
    late = keep(net, net.start("zz"))
    net.run(SOON_S + 4 * TURN_S)
    assert seen(late)[c.name] == c.name.encode(), "it has a value of its own there"
    assert values(late) == {a.name.encode(), b.name.encode(), c.name.encode()}
    assert seen(late).keys() == {c.name, d.name, e.name}


def test_no_more_is_said_for_others_than_leaves_half_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "NOTICES_MAX", 4)
    net, (a, b) = lasting(2)
    for i in range(4):
        post(net, a, f"dht/{i}", b"v")
    net.kill(a)
    net.run(SOON_S)
    assert [len(seen(b, f"dht/{i}")) for i in range(4)] == [2, 2, 1, 1]
    for i in range(2):
        post(net, b, f"own{i}", b"")


def test_nothing_is_said_for_who_is_up_nor_of_what_is_for_some_only() -> None:
    net, (a, b, c) = lasting(3)
    net.act(a, lambda mesh, now: mesh.post("dht/near", b"v", 300.0, now, [b.name]))
    post(net, a, "dht/k", b"v")
    net.run(10 * TURN_S)
    assert seen(b) == seen(c) == {a.name: b"v"}
    net.freeze(a)
    net.run(DETECT_S + TURN_S - 0.5)
    assert seen(b) == seen(c) == {a.name: b"v"}, "who is away for a moment says it itself"
    net.thaw(a)
    net.run(TURN_S)
    net.kill(a)
    net.run(SOON_S + 3 * TURN_S)
    assert seen(b, "dht/near") == {a.name: b"v"} and not seen(c, "dht/near")


def test_what_tells_of_a_peer_is_said_on_for_as_long_as_that_one_is_known() -> None:
    net, (killed, left, c, d) = lasting(4)
    for host in (killed, left):
        post(net, host, f"hello/{host.name}", b"")
    net.kill(killed)
    net.leave(left)
    net.run(SOON_S + TURN_S)
    about = {host: f"hello/{host.name}" for host in (killed, left)}
    assert seen(c, about[left]).keys() == {left.name} and len(seen(c, about[killed])) == 2
    net.leave(killed)
    net.run(2 * LOOK_S)
    assert seen(c, about[killed]).keys() == seen(d, about[killed]).keys() == {killed.name}
