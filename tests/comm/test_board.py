"""Notices: everybody has them, the newest counts, they expire, and nobody can fill another's memory."""

from __future__ import annotations

import pytest

from dlc.comm import board as module
from dlc.comm.board import Board
from dlc.comm.effects import Send
from dlc.comm.ids import Voter
from dlc.comm.meshmessages import Notice, Notices
from dlc.errors import ProtocolError, UsageError
from dlc.sim.meshnet import Host, MeshNet


def board(host: Host) -> Board:
    return host.mesh.board


def seen(host: Host, key: str) -> dict[str, bytes]:
    host.mesh.ground.wake(max(host.mesh.ground.now, 0.0))
    return {peer: posted.value for peer, posted in board(host).get(key).items()}


@pytest.mark.parametrize(("n", "loss"), [(5, 0.0), (5, 0.3), (100, 0.05)])
def test_everybody_has_a_notice_and_whoever_comes_later_too(n: int, loss: float) -> None:
    net = MeshNet(n, loss=loss)
    hosts = net.add(n)
    net.run(1.0)
    net.act(hosts[0], lambda mesh, now: mesh.post("k", b"old", 900.0, now))
    net.act(hosts[1], lambda mesh, now: mesh.post("k", b"other", 900.0, now))
    net.act(hosts[0], lambda mesh, now: mesh.post("k", b"new", 900.0, now))
    told = {hosts[0].name: b"new", hosts[1].name: b"other"}
    net.until(lambda: all(seen(h, "k") == told for h in hosts), 150.0)
    newcomer = net.start("zz")
    net.until(lambda: seen(newcomer, "k") == told, 150.0)
    net.act(hosts[0], lambda mesh, now: mesh.withdraw("k", now))
    net.until(lambda: all(hosts[0].name not in seen(h, "k") for h in [*hosts, newcomer]), 150.0)
    net.run(910.0)
    assert all(not board(h)._by_key and not board(h)._sizes and not board(h)._repeats for h in hosts)


def test_a_restarted_author_counts_for_more_and_what_a_dead_one_said_stays_until_it_expires() -> None:
    net = MeshNet(2)
    a, b, c = net.add(3)
    net.act(a, lambda mesh, now: mesh.post("k", b"first", 50.0, now))
    net.run(1.0)
    net.kill(a)
    net.run(20.0)
    assert seen(b, "k") == {a.name: b"first"} == seen(c, "k")
    again = net.start(a.name, inc=2)
    net.act(again, lambda mesh, now: mesh.post("k", b"second", 50.0, now))
    net.until(lambda: seen(b, "k") == {a.name: b"second"} == seen(c, "k"), 10.0)
    net.run(60.0)
    assert not seen(b, "k")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTICES_MAX", 3)
    net = MeshNet(3)
    a, b, x = net.add(3)
    for value, ttl_s in ((b"x" * (module.VALUE_BYTES_MAX + 1), 1.0), (b"", 0.0), (b"", 1e9)):
        with pytest.raises(UsageError):
            a.mesh.post("k", value, ttl_s, net.now)
    for i in range(3):
        a.mesh.post(f"k{i}", b"", 9.0, net.now)
    with pytest.raises(UsageError, match="one peer may have"):
        a.mesh.post("k3", b"", 9.0, net.now)
    flood = Notices(tuple(Notice(x.voter, f"k{i}", i + 1, 9.0, False, False, b"") for i in range(9)))
    b.mesh.receive(x.voter, flood, net.now)
    assert sum(x.name in seen(b, f"k{i}") for i in range(9)) == 3
    assert b.mesh.ground.dropped[x.name, "too many notices"] == 6
    stranger = Voter("stranger", 1)
    b.mesh.receive(x.voter, Notices((Notice(stranger, "k", 1, 9.0, False, False, b""),)), net.now)
    b.mesh.receive(stranger, Notices((Notice(x.voter, "k", 99, 9.0, False, False, b""),)), net.now)
    assert not seen(b, "k")
    with pytest.raises(ProtocolError):
        b.mesh.receive(x.voter, Notices((Notice(x.voter, "k", 1, -1.0, False, False, b""),)), net.now)


def test_an_author_with_as_many_bytes_as_it_may_have_replaces_one_of_its_notices_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AUTHOR_BYTES_MAX", 100)
    net = MeshNet(6)
    a, b = net.add(2)
    for key in ("k0", "k1"):
        net.act(a, lambda mesh, now, key=key: mesh.post(key, b"x" * 50, 60.0, now))  # type: ignore[misc]
    net.until(lambda: seen(b, "k0") and seen(b, "k1"), 10.0)
    net.act(a, lambda mesh, now: mesh.post("k0", b"y" * 50, 60.0, now))
    net.until(lambda: seen(b, "k0") == {a.name: b"y" * 50}, 10.0)
    flood = Notices((Notice(a.voter, "k0", 99, 9.0, False, False, b"z" * 51),))
    b.mesh.receive(a.voter, flood, net.now)
    assert seen(b, "k0") == {a.name: b"y" * 50} and b.mesh.ground.dropped[a.name, "too many notices"] == 1


def test_what_others_say_in_my_name_is_not_believed() -> None:
    net = MeshNet(4)
    a, b = net.add(2)
    b.mesh.receive(a.voter, Notices((Notice(b.voter, "k", 99, 9.0, False, False, b"lie"),)), net.now)
    assert not seen(b, "k")


def test_a_notice_for_some_goes_to_them_alone_and_to_whoever_shows_one_of_its_kind() -> None:
    net = MeshNet(5)
    hosts = net.add(70)
    a, b, c, d = hosts[:4]
    net.act(a, lambda mesh, now: mesh.post("k", b"a", 60.0, now, [b.name]))
    net.run(20.0)
    assert [h.name for h in hosts if seen(h, "k")] == [a.name, b.name]
    net.act(c, lambda mesh, now: mesh.post("k", b"c", 60.0, now, [a.name]))
    net.until(lambda: set(seen(a, "k")) == set(seen(c, "k")) == {a.name, c.name}, 20.0)
    assert not seen(d, "k")
    newcomer = net.start("zz")
    net.run(20.0)
    assert not seen(newcomer, "k")


def test_a_notice_ends_before_anybody_looks_and_one_that_has_ended_hides_nothing() -> None:
    net = MeshNet(10)
    a, b = net.add(2)
    for seq, left_s in ((1, 60.0), (2, 0.0)):
        b.mesh.receive(a.voter, Notices((Notice(a.voter, "k", seq, left_s, False, False, b"v"),)), net.now)
    assert seen(b, "k") == {a.name: b"v"}
    b.mesh.ground.wake(net.now + 61.0)
    assert not seen(b, "k") and not board(b).keys("k")


def test_an_author_is_shown_what_hides_its_word() -> None:
    net = MeshNet(11)
    a, b, liar = net.add(70)[:3]
    lie, word = (Notice(a.voter, "k", seq, 60.0, False, False, value) for seq, value in ((9, b"lie"), (1, b"true")))
    b.mesh.receive(liar.voter, Notices((lie,)), net.now)
    effects = b.mesh.receive(a.voter, Notices((word,)), net.now)
    assert [(e.to, e.message) for e in effects if isinstance(e, Send)] == [(a.name, Notices((lie,)))]


def test_in_a_small_swarm_nobody_is_heard_in_anothers_name() -> None:
    """Whoever said it with a greater number hid what its author showed, for as long as seven days."""
    net = MeshNet(6)
    a, b, liar = net.add(3)
    b.mesh.receive(liar.voter, Notices((Notice(a.voter, "k", 99, module.TTL_S_MAX, True, False, b""),)), net.now)
    net.act(a, lambda mesh, now: mesh.post("k", b"true", 60.0, now))
    net.until(lambda: seen(b, "k") == {a.name: b"true"}, 10.0)


def test_in_a_large_swarm_an_author_hears_what_is_said_in_its_name_and_says_its_own_again() -> None:
    net = MeshNet(7)
    hosts = net.add(70)
    a, b, liar = hosts[:3]

    def say(author: Voter, key: str, seq: int) -> None:
        lie = Notices((Notice(author, key, seq, module.TTL_S_MAX, True, False, b""),))
        net.act(b, lambda mesh, now: mesh.receive(liar.voter, lie, now))

    def everybody_sees(value: bytes) -> bool:
        return all(seen(h, "k") == {a.name: value} for h in hosts)

    net.act(a, lambda mesh, now: mesh.post("k", b"true", 900.0, now))
    net.until(lambda: everybody_sees(b"true"))
    say(Voter(a.name, a.voter.inc + 1), "k", 1)
    say(a.voter, "k", module.PASSED_ON_SEQ_MAX)
    assert everybody_sees(b"true"), "of a process that nobody knows, or with a number above which there is nothing"
    say(a.voter, "k", module.PASSED_ON_SEQ_MAX - 1)
    assert not seen(b, "k")
    net.until(lambda: everybody_sees(b"true"), 150.0)
    net.act(a, lambda mesh, now: mesh.post("k", b"new", 900.0, now))
    net.until(lambda: everybody_sees(b"new"), 150.0)
    assert not any(h.bad for h in hosts)


def test_what_others_say_in_an_authors_name_leaves_room_for_what_it_says_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them could fill all that an author may have, and nothing of it was heard until that ended."""
    monkeypatch.setattr(module, "NOTICES_MAX", 3)
    net = MeshNet(9)
    a, b, liar = net.add(70)[:3]

    def say(sender: Host, key: str, value: bytes = b"", seq: int = 1) -> None:
        said = Notices((Notice(a.voter, key, seq, 60.0, False, False, value),))
        net.act(b, lambda mesh, now: mesh.receive(sender.voter, said, now))

    def kept() -> list[str]:
        return [key for key in ("k0", "k1", "k2", "lie0", "lie1", "lie2") if seen(b, key)]

    for i in range(3):
        say(liar, f"lie{i}")
    say(liar, "k0", b"true")
    assert kept() == ["lie0", "lie1", "lie2"] and b.mesh.ground.dropped[a.name, "too many notices"] == 1
    say(a, "k0", b"true")
    assert kept() == ["k0", "lie1", "lie2"] and seen(b, "k0") == {a.name: b"true"}
    sent = net.sent["Notices"]
    say(a, "lie1")  # it is none
    assert net.sent["Notices"] == sent, "no news, to be handed on"
    say(a, "k1")
    assert kept() == ["k0", "k1", "lie1"]
    say(a, "k2")
    assert kept() == ["k0", "k1", "lie1"], "its own are as many as it may have"
    assert b.mesh.ground.dropped[a.name, "too many notices"] == 2
    net.run(70.0)
    assert not board(b)._by_key and not board(b)._sizes


def test_of_a_message_in_a_large_swarm_only_what_is_news_is_handed_on() -> None:
    """What another author shows under the same key went round again."""
    net = MeshNet(8)
    a, b, c = net.add(70)[:3]
    items = [Notice(voter, "k", 1, 60.0, False, False, b"") for voter in (a.voter, c.voter)]
    b.mesh.receive(a.voter, Notices((items[0],)), net.now)
    effects = b.mesh.receive(c.voter, Notices(tuple(items)), net.now)
    told = [e.message for e in effects if isinstance(e, Send)]
    assert told == [Notices((items[1],))] * module.FANOUT
