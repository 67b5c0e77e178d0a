"""The lobby as transcripts: who asks whom, when it is done, and with which RunSpec."""

from __future__ import annotations

import dataclasses

import pytest

from dlc.comm.effects import Answer, Dial
from dlc.comm.ids import Voter
from dlc.comm.lobby import ASKED_MAX, FORGET_S, RECALL_S, Desk, Lobby
from dlc.comm.messages import PROTOCOL_VERSION, Hello, Record, Welcome

ME, OTHER = Voter("me", 1), Voter("other", 1)
RECORD = Record(ME, b"", ("a:1",), ("a:2",), "trainer", bytes(32), 0.0, 0, False, False, 0.0, -1.0, 0, False)
THEIRS = dataclasses.replace(RECORD, voter=OTHER)


def welcome(address: str, spec: bytes = b"", record: Record = THEIRS, waiting: bool = False) -> Welcome:
    return Welcome(PROTOCOL_VERSION, "dlc", spec, record, (), address, "", waiting)


def said(lobby: Lobby, address: str = "a:1") -> Welcome:
    """What it answers to a hello."""
    (effect,) = lobby.receive(OTHER, Hello(PROTOCOL_VERSION, "dlc", b"", THEIRS, address), 0.0)
    assert isinstance(effect, Answer) and isinstance(effect.message, Welcome)
    return effect.message


def test_nobody_listed_is_done_at_once() -> None:
    assert Lobby(RECORD, "dlc", b"mine", b"h", ()).done


def test_the_first_runspec_that_comes_is_taken_without_waiting_for_the_rest() -> None:
    lobby = Lobby(RECORD, "dlc", b"", b"", ("x:1", "y:1"))
    assert [e.address for e in lobby.tick(0.0) if isinstance(e, Dial)] == ["x:1", "y:1"]
    lobby.receive(OTHER, welcome("x:1", b"spec"), 0.1)
    assert lobby.done and lobby.found is not None and lobby.found.spec == b"spec"


def test_all_answered_and_nobody_knows_is_done_and_one_silent_address_is_waited_for() -> None:
    lobby = Lobby(RECORD, "dlc", b"", b"", ("x:1", "y:1"))
    lobby.receive(OTHER, welcome("x:1"), 0.1)
    assert not lobby.done and lobby.unheard() == ("y:1",)
    lobby.receive(OTHER, welcome("y:1"), 0.2)
    assert lobby.done and lobby.found is None


def test_who_asks_a_peer_that_is_about_to_join_waits_for_what_that_one_finds() -> None:
    """It began with a RunSpec of its own, and nobody of the run heard it: it waited for ever."""
    middle, last = Lobby(THEIRS, "", b"", b"", ("founder:1",)), Lobby(RECORD, "", b"", b"", ("middle:1",))
    last.receive(OTHER, said(middle, "middle:1"), 0.1)
    assert not last.done and last.unheard() == ("middle:1",)
    assert [e.address for e in last.tick(0.5) if isinstance(e, Dial)] == ["middle:1"]
    founder = dataclasses.replace(RECORD, voter=Voter("founder", 1))
    middle.receive(founder.voter, welcome("founder:1", b"spec", founder), 0.6)
    last.receive(OTHER, said(middle, "middle:1"), 0.7)
    assert middle.done and last.done and last.found is not None and last.found.spec == b"spec"


def test_some_that_list_each_other_and_know_no_runspec_are_all_done_soon_after_the_last_has_come() -> None:
    names = ("a:1", "b:1", "c:1")
    lobbies = {n: Lobby(dataclasses.replace(RECORD, voter=Voter(n, 1)), "", b"", b"", names) for n in names}
    up, now = {"a:1", "b:1"}, 0.0
    while not all(lobby.done for lobby in lobbies.values()):
        now += 0.05
        assert now < 20.0
        up = up if now < 9.0 else set(names)
        for name in up:
            for effect in lobbies[name].tick(now):
                assert isinstance(effect, Dial)
                if effect.address in up:
                    answer = said(lobbies[effect.address], effect.address)
                    lobbies[name].receive(Voter(effect.address, 1), answer, now)
        assert now >= 9.0 or not any(lobby.done for lobby in lobbies.values())
    assert now < 9.0 + 4.0 + 1.0 and not any(lobby.found for lobby in lobbies.values())


@pytest.mark.parametrize("goes_on", ["the third comes", "one begins without it"])
def test_who_found_each_other_begin_no_run_without_a_log_before_all_who_are_listed_have_come(goes_on: str) -> None:
    """The first two began, and trained, without the third, and nobody said so. The second knows no RunSpec before."""
    names = ("a:1", "b:1", "c:1")
    records = {n: dataclasses.replace(RECORD, voter=Voter(n, 1)) for n in names}
    specs = dict(zip(names, (b"spec", b"", b"spec"), strict=True))
    lobbies = {
        n: Lobby(records[n], "dlc", specs[n], b"h", names, begins_here=lambda spec: spec == b"spec") for n in names
    }
    up, begun, now = {"a:1", "b:1"}, set[str](), 0.0
    while not all(lobbies[name].done or name in begun for name in up):
        now += 0.05
        assert now < 30.0
        if now >= 20.0 and goes_on == "the third comes":
            up = set(names)
        elif now >= 20.0:
            begun = {"a:1"}
        for name in up - begun:
            for effect in lobbies[name].tick(now):
                assert isinstance(effect, Dial)
                if effect.address in begun:
                    member = dataclasses.replace(records[effect.address], signature=b"signed")
                    lobbies[name].receive(member.voter, welcome(effect.address, b"spec", member), now)
                elif effect.address in up:
                    answer = said(lobbies[effect.address], effect.address)
                    lobbies[name].receive(Voter(effect.address, 1), answer, now)
        if 2.0 < now < 20.0:
            assert not any(lobbies[n].done for n in up) and all(lobbies[n].silent() == ("c:1",) for n in up)
    assert 20.0 <= now < 25.0
    assert all(found is not None and found.spec == b"spec" for found in (lobbies[n].found for n in up - begun))


@pytest.mark.parametrize("without_log", [False, True])
def test_a_runspec_that_is_being_read_is_not_missed_by_who_looks_meanwhile(without_log: bool) -> None:
    """The joiner's own thread took the answer for one without a RunSpec, and began a run of its own."""
    looks: list[bool] = []

    def begins_here(spec: bytes) -> bool:
        looks.append(lobby.done)
        return without_log

    lobby = Lobby(RECORD, "dlc", b"", b"", ("x:1",), begins_here=begins_here)
    lobby.receive(OTHER, welcome("x:1", b"spec"), 0.1)
    assert looks == [False] and lobby.done and lobby.found is not None


def test_another_runspec_than_mine_is_told_at_once_without_a_log_too() -> None:
    lobby = Lobby(RECORD, "dlc", b"mine", b"h", ("x:1", "y:1"), begins_here=lambda spec: True)
    lobby.receive(OTHER, welcome("x:1", b"theirs"), 0.1)
    assert lobby.done and lobby.found is not None


def test_my_own_address_in_the_list_answers_but_tells_nothing() -> None:
    lobby = Lobby(RECORD, "dlc", b"mine", b"h", ("a:1",))
    lobby.receive(ME, welcome("a:1", b"mine", RECORD), 0.1)
    assert lobby.done and lobby.found is None


def test_dialling_backs_off_and_never_ends() -> None:
    lobby = Lobby(RECORD, "dlc", b"", b"", ("x:1",))
    now, times = 0.0, []
    while now < 60:
        times += [now] * len(lobby.tick(now))
        now += 0.05
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert gaps[0] < 0.5 and max(gaps) < 4.5 and gaps[-1] > 3.5


def test_a_waiting_peer_answers_hellos() -> None:
    lobby = Lobby(RECORD, "dlc", b"spec", b"h", ("x:1",))
    (effect,) = lobby.receive(OTHER, Hello(PROTOCOL_VERSION, "dlc", b"", THEIRS, "a:1"), 0.0)
    assert isinstance(effect, Answer) and isinstance(effect.message, Welcome)
    assert effect.message.spec == b"spec" and effect.message.address == "a:1"


def test_former_peers_are_asked_too_and_an_active_one_of_my_own_run_is_enough() -> None:
    lobby = Lobby(RECORD, "dlc", b"mine", b"h", ("x:1",), known=("x:1", "k:1", "k:2"))
    assert sorted(e.address for e in lobby.tick(0.0) if isinstance(e, Dial)) == ["k:1", "k:2", "x:1"]
    active = dataclasses.replace(THEIRS, active=True)
    lobby.receive(OTHER, welcome("k:1", b"another", active), 0.1)  # the port is another run's by now
    lobby.receive(OTHER, welcome("k:1", b"", active), 0.1)
    lobby.receive(OTHER, welcome("k:1", b"mine"), 0.1)  # it has just started, too, and is of no run yet
    lobby.receive(OTHER, welcome("k:1", b"mine", dataclasses.replace(THEIRS, signature=b"signed")), 0.1)  # nor now
    lobby.receive(ME, welcome("k:2", b"mine", RECORD), 0.1)
    assert not lobby.done and lobby.unheard() == ("x:1",)
    lobby.receive(OTHER, welcome("k:1", b"mine", active), 0.2)
    assert lobby.done and lobby.found is not None and lobby.found.address == "k:1"


def test_of_a_run_without_a_log_a_former_peer_that_takes_part_is_enough() -> None:
    """None is active there: who started again with a list of peers that are gone waited for them for ever."""
    lobby = Lobby(RECORD, "dlc", b"mine", b"h", ("x:1",), known=("k:1",), begins_here=lambda spec: True)
    lobby.receive(OTHER, welcome("k:1", b"mine"), 0.1)  # it has just started, too, and is of no run yet
    lobby.receive(OTHER, welcome("k:1", b"another", dataclasses.replace(THEIRS, signature=b"signed")), 0.1)
    assert not lobby.done
    lobby.receive(OTHER, welcome("k:1", b"mine", dataclasses.replace(THEIRS, signature=b"signed")), 0.2)
    assert lobby.done and lobby.found is not None and lobby.found.address == "k:1"


def test_who_waits_for_all_who_are_listed_goes_on_with_a_former_peer_that_takes_part() -> None:
    lobby = Lobby(RECORD, "dlc", b"mine", b"h", ("x:1", "y:1"), known=("k:1",), begins_here=lambda spec: True)
    lobby.receive(OTHER, welcome("x:1", b"mine"), 0.1)
    assert not lobby.done and lobby.silent() == ("y:1",)
    lobby.receive(OTHER, welcome("k:1", b"mine", dataclasses.replace(THEIRS, signature=b"signed")), 0.2)
    assert lobby.done


def test_who_knows_the_runspec_waits_for_nobody_who_looks_for_one() -> None:
    """It may be looking for me, where I can't be reached."""
    lobby = Lobby(RECORD, "dlc", b"mine", b"h", ("x:1",))
    lobby.receive(OTHER, welcome("x:1", waiting=True), 0.1)
    assert lobby.done and lobby.found is None


def test_who_has_answered_is_no_reason_to_wake_up() -> None:
    """A peer that waited for another kept a processor busy."""
    lobby, now = Lobby(RECORD, "dlc", b"", b"", ("x:1", "y:1")), 5.0
    lobby.tick(0.0)
    lobby.receive(OTHER, welcome("x:1"), 0.1)
    assert [e.address for e in lobby.tick(now) if isinstance(e, Dial)] == ["y:1"]
    due = lobby.next_deadline()
    assert due is not None and due > now


def test_former_peers_are_not_waited_for_and_not_asked_without_a_runspec_or_a_list() -> None:
    silent = Lobby(RECORD, "dlc", b"mine", b"h", ("x:1",), known=("k:1",))
    silent.receive(OTHER, welcome("x:1"), 0.1)
    assert silent.done and silent.found is None
    assert not Lobby(RECORD, "dlc", b"", b"", ("x:1",), known=("k:1",)).known
    assert not Lobby(RECORD, "dlc", b"mine", b"h", (), known=("k:1",)).known


# ------------------------------------------------------------------ an observer that lists nobody


def record(name: str, inc: int = 1, role: str = "trainer", active: bool = False) -> Record:
    return dataclasses.replace(RECORD, voter=Voter(name, inc), control=(f"{name}:1",), role=role, active=active)


def asked(desk: Desk, asker: Record | None, now: float = 1.0) -> Welcome | None:
    """What it answers to a hello of that peer; None: nothing."""
    who = asker.voter if asker is not None else OTHER
    effects = desk.receive(who, Hello(PROTOCOL_VERSION, "", b"", asker, "desk:1"), now)
    return effects[0].message if effects else None  # type: ignore[union-attr, return-value]


def test_who_asks_a_desk_first_and_may_vote_is_told_that_it_lives_there_itself_and_all_others_as_well() -> None:
    desk = Desk(record("desk", role="observer"), "")
    for nobody in (None, record("eye", role="observer")):
        answer = asked(desk, nobody)
        assert answer is not None and answer.waiting and answer.record == desk.record
    for name in ("first", "second"):
        answer = asked(desk, record(name))
        assert answer is not None and answer.record is not None and answer.record.voter.peer == "first"
        assert answer.waiting == (name == "second") and not answer.spec
        lobby = Lobby(record(name), "", b"", b"", ("desk:1",))
        lobby.receive(OTHER, answer, 1.0)
        assert lobby.done == (name == "first") and lobby.found is None
    desk.tick(1.0)
    desk.receive(OTHER, welcome("first:1", b"spec", record("first")), 2.0)
    answer = asked(desk, record("second"))
    assert not desk.done and answer is not None and answer.spec == b"spec"  # it has not begun yet
    desk.receive(OTHER, welcome("first:1", b"spec", record("first", active=True)), 3.0)
    assert desk.done and desk.found is not None and desk.found.address == "first:1"


def test_who_was_to_begin_may_start_again_and_another_may_only_when_it_is_long_silent() -> None:
    desk = Desk(record("desk", role="observer"), "")

    def told(asker: Record, now: float) -> Voter:
        answer = asked(desk, asker, now)
        assert answer is not None and answer.record is not None
        return answer.record.voter

    assert told(record("a"), 0.0) == Voter("a", 1) and told(record("b"), 1.0) == Voter("a", 1)
    assert told(record("a", 2), 2.0) == Voter("a", 2)
    desk.receive(OTHER, welcome("a:1", b"", record("a", 2)), 50.0)
    assert told(record("b"), 2.0 + FORGET_S) == Voter("a", 2)
    assert told(record("b"), 50.0 + FORGET_S) == Voter("b", 1) == told(record("a", 3), 51.0 + FORGET_S)


def test_a_desk_looks_for_a_run_that_lives_before_it_lets_anybody_begin() -> None:
    desk = Desk(record("desk", role="observer"), "", ("known:1",))
    assert asked(desk, record("new"), 0.0) is None
    assert [e.address for e in desk.tick(0.0) if isinstance(e, Dial)] == ["known:1"]
    assert asked(desk, record("new"), RECALL_S - 0.1) is None
    asked(desk, record("old", active=True), RECALL_S - 0.1)  # of the run that lists this address
    assert "old:1" in [e.address for e in desk.tick(RECALL_S - 0.1) if isinstance(e, Dial)]
    desk.receive(OTHER, welcome("old:1", b"spec", record("old", active=True)), RECALL_S)
    assert desk.done and desk.first is None
    alone = Desk(record("desk", role="observer"), "", ("known:1",))
    alone.tick(0.0)
    assert asked(alone, record("new"), RECALL_S) is not None


def test_a_desk_does_not_hear_who_tells_no_address_or_a_record_that_no_peer_has() -> None:
    """It dialled the first address of whatever came, and an observer that waited ended on a record without one."""
    desk = Desk(record("desk", role="observer"), "")
    for nobody in (
        dataclasses.replace(record("x"), control=()),
        dataclasses.replace(record("x", active=True), control=()),
        dataclasses.replace(record("x"), control=("x" * 10_000,)),
    ):
        assert asked(desk, nobody) is None
    assert desk.first is None and not desk.known


def test_a_desk_asks_so_many_addresses_and_no_more_whoever_is_to_begin_among_them() -> None:
    desk = Desk(record("desk", role="observer"), "", ("known:1",))
    desk.tick(0.0)
    for number in range(3 * ASKED_MAX):
        assert asked(desk, record(f"p{number}"), RECALL_S) is not None
    dialled = [e.address for e in desk.tick(RECALL_S) if isinstance(e, Dial)]
    assert dialled == ["p0:1", *(f"p{number}:1" for number in range(2 * ASKED_MAX + 1, 3 * ASKED_MAX))]
