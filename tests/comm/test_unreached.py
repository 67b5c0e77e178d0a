"""Who is shunned as the owner of spans, by what each helper tells of the trainers that it does not reach."""

from __future__ import annotations

from types import SimpleNamespace

from dlc.comm.ids import Voter
from dlc.comm.unreached import APART_S, Unreached

HELPERS = ("h0", "h1", "h2")


class Host(SimpleNamespace):
    """Stands in for `SpanServer`: h0, which reaches some trainers by a relay."""

    def __init__(self, *trainers: str) -> None:
        self.now, self.relays, self.me = 0.0, dict[str, str | None](), Voter("h0", 1)
        self.alive = {"helper": list(HELPERS), "trainer": list(trainers)}
        self.silent: set[str] = set()
        """Not heard of for a moment."""
        self.members = SimpleNamespace(relay_for=self.relays.get)

    def living(self, *roles: str) -> list[Voter]:
        return [voter for voter in self.voters(*roles) if voter.peer not in self.silent]

    def voters(self, *roles: str) -> list[Voter]:
        return [Voter(name, 1) for role in roles for name in self.alive[role]]

    def away(self, voter: Voter) -> bool:
        return False


def test_what_lasts_for_a_while_is_told_once_and_taken_back_as_slowly() -> None:
    host = Host("t0", "t1")
    mine = Unreached(host)
    assert not mine.look() and mine.mine == ()
    host.relays["t1"] = "t0"
    assert not mine.look()
    host.now = APART_S - 0.1
    assert not mine.look() and mine.mine == ()
    host.now = APART_S
    assert mine.look() and mine.mine == ("t1",) and not mine.look()
    del host.relays["t1"]
    assert not mine.look()
    host.now += APART_S - 0.1
    assert not mine.look() and mine.mine == ("t1",)
    host.now += 0.1
    assert mine.look() and mine.mine == ()


def test_what_does_not_last_is_not_told() -> None:
    host = Host("t0", "t1")
    mine = Unreached(host)
    for _ in range(5):
        host.relays["t1"] = "t0"
        assert not mine.look()
        host.now += APART_S - 0.1
        assert not mine.look()
        del host.relays["t1"]
        assert not mine.look()
        host.now += 0.1
    assert mine.mine == ()


def test_a_trainer_that_died_counts_no_more() -> None:
    host = Host("t0", "t1")
    mine = Unreached(host)
    mine.told("h1", ("t0",))
    assert mine.shunned(HELPERS) == {"h1"}
    host.relays["t1"] = "t0"
    mine.look()
    host.now = APART_S
    assert mine.look() and mine.shunned(HELPERS) == {"h0", "h1"}
    host.alive["trainer"] = ["t1"]
    assert mine.shunned(HELPERS) == {"h0"}
    host.alive["trainer"] = []
    assert mine.look() and mine.mine == () and mine.shunned(HELPERS) == frozenset()


def test_a_trainer_that_is_silent_for_a_moment_counts_as_before() -> None:
    """Its spans went to the helper that does not reach it, and came back a while after it had."""
    host = Host("t0", "t1")
    mine = Unreached(host)
    mine.told("h1", ("t0",))
    host.relays["t1"] = "t0"
    mine.look()
    host.now = APART_S
    assert mine.look() and mine.mine == ("t1",)
    host.silent, host.relays["t1"] = {"t0", "t1"}, None
    for host.now in (APART_S + 1.0, 3 * APART_S):
        assert not mine.look() and mine.mine == ("t1",) and mine.shunned(HELPERS) == {"h0", "h1"}
    host.silent.clear()
    assert not mine.look(), "whether it is reached is seen from now on"
    host.now += APART_S
    assert mine.look() and mine.mine == ()


def test_those_are_shunned_that_reach_fewer_than_another() -> None:
    mine = Unreached(Host("t0", "t1"))
    mine.told("h1", ("t0",))
    mine.told("h2", ("t0", "t1"))
    assert mine.shunned(HELPERS) == {"h1", "h2"}
    assert mine.shunned(("h1", "h2")) == {"h2"}
    mine.told("h2", ("t1",))
    assert mine.shunned(("h1", "h2")) == frozenset(), "neither is better"
    assert mine.shunned(()) == frozenset()


def test_what_a_helper_told_that_is_gone_is_forgotten() -> None:
    host = Host("t0")
    mine = Unreached(host)
    mine.told("h1", ("t0",))
    host.alive["helper"] = ["h0", "h2"]
    assert mine.shunned(("h0", "h2")) == frozenset()
    host.alive["helper"] = list(HELPERS)
    assert mine.shunned(HELPERS) == frozenset(), "until it tells again"


def test_what_an_older_process_of_this_helper_told_is_not_taken_for_its_own_word() -> None:
    mine = Unreached(Host("t0"))
    mine.told("h0", ("t0",))
    assert mine.shunned(HELPERS) == frozenset()
