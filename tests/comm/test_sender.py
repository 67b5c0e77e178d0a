"""What one peer sends under a plan, with owners that answer as the test says."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch

from dlc.comm.codecs import get_codec
from dlc.comm.context import Context
from dlc.comm.entries import EMPTY, Part
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import Bulk, ChunkHeader, Contrib, GridSpec, Piece, Plan, Ready, Result
from dlc.comm.offered import Offered
from dlc.comm.outbox import Outbox
from dlc.comm.sender import WINDOW_BYTES, WINDOW_CHUNKS_MIN, Sender, in_order, window_chunks
from tests.comm.test_exchange import FIRST, ME, OTHER, Everybody, plan

torch.set_num_threads(1)

NUMEL, CHUNK = 40, 4
GRID = Grid(NUMEL, CHUNK, "fp32")
SPEC = GridSpec(NUMEL, CHUNK, "fp32")
N_CHUNKS = GRID.n_chunks
BASE = b"b" * 32
THIRD = Voter("third", 1)


@pytest.fixture
def sender() -> Sender:
    return Sender(Context(ME, cast(Any, Everybody())), Outbox())


def planned(owners: str = "o" * N_CHUNKS, fill_s: float = 0.0) -> Plan:
    """Each chunk belongs to ME, OTHER or THIRD, as a letter of `owners` says; "-": it has a result already."""
    assignment = tuple(-1 if o == "-" else "mot".index(o) for o in owners)
    return dataclasses.replace(plan(grid=SPEC), owners=(ME, OTHER, THIRD), assignment=assignment, fill_s=fill_s)


def offered(weight: float = 1.0, filling: Filling | None = None) -> Offered:
    """Ones in chunk 0, twos in chunk 1, and so on."""
    ready = Ready(EMPTY, "a", BASE, SPEC, weight, 0, b"", 1.0, False, 0)
    vector = torch.arange(N_CHUNKS).repeat_interleave(CHUNK) + 1.0
    return Offered(ready, vector, None, 0.0, filling=filling)


def taken(sender: Sender, mine: Offered | None, peer: str = OTHER.peer, n_open: int = 0) -> list[Bulk]:
    """All that goes to `peer` now."""
    return list(iter(lambda: sender.next_bulk(peer, mine, n_open), None))


def chunks(messages: list[Bulk]) -> list[int]:
    """Of contributions, each of which has the values of its chunk."""
    assert all(isinstance(m, Contrib) and (m.channel, m.base) == ("a", BASE) for m in messages)
    parts = [m for m in messages if isinstance(m, Contrib)]
    for m in parts:
        assert torch.equal(get_codec("fp32").decode(m.payload, CHUNK), torch.full((CHUNK,), m.chunk + 1.0))
    return [m.chunk for m in parts]


def kinds(messages: list[Bulk]) -> str:
    return "".join("C" if isinstance(m, Contrib) else "R" for m in messages)


def result(chunk: int) -> Result:
    return Result(ChunkHeader(BASE, chunk, EMPTY, FIRST, ME, (), ()), b"")


# ------------------------------------------------------------------ queues and windows


def test_each_owner_gets_its_chunks_and_nobody_those_that_are_mine_or_have_a_result(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned("mot-motoot"), BASE, GRID, mine, [3, 8])
    assert sender.pending(mine) == {OTHER.peer, THIRD.peer} and not sender.idle(mine)
    assert chunks(taken(sender, mine)) == [1, 5, 7], "8 came with the plan's results"
    assert chunks(taken(sender, mine, THIRD.peer)) == [2, 6, 9]
    assert sender.pending(mine) == set() and sender.idle(mine)
    assert taken(sender, mine, "nobody") == []


def test_no_more_is_on_its_way_to_an_owner_than_fits_its_window(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 0)
    mine = offered()
    sender.begin(planned("o" * 8 + "tt"), BASE, GRID, mine, ())
    assert chunks(taken(sender, mine)) == list(range(WINDOW_CHUNKS_MIN))
    assert sender.pending(mine) == {THIRD.peer}, "the window of one is not that of another"
    sender.done(1)
    assert sender.pending(mine) == {OTHER.peer, THIRD.peer}
    assert chunks(taken(sender, mine)) == [WINDOW_CHUNKS_MIN]
    assert chunks(taken(sender, mine, THIRD.peer)) == [8, 9]


def test_a_window_is_some_bytes_and_at_least_some_chunks() -> None:
    small, large = Grid(1 << 24, 1 << 18, "fp32"), Grid(1 << 25, 1 << 21, "fp32")
    assert window_chunks(small) * small.wire_bytes(0) == WINDOW_BYTES
    assert window_chunks(large) == WINDOW_CHUNKS_MIN


def test_a_chunk_whose_result_came_first_is_not_sent(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned(), BASE, GRID, mine, ())
    for chunk in (0, 4, 9):
        sender.done(chunk)
    assert chunks(taken(sender, mine)) == [1, 2, 3, 5, 6, 7, 8]


def test_what_was_lost_is_sent_once_more_and_only_what_was_sent(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 0)
    mine = offered()
    sender.begin(planned(), BASE, GRID, mine, ())
    assert chunks(taken(sender, mine)) == [0, 1, 2, 3]
    sender.done(3)
    for chunk in (1, 3, 5):  # on its way, over, not sent yet
        sender.send_again(chunk)
    monkeypatch.setattr(sender, "_window", N_CHUNKS)
    assert chunks(taken(sender, mine)) == [4, 5, 6, 7, 8, 9, 1]
    sender.send_again(1)
    assert sender.idle(mine)
    sender.begin(planned(), BASE, GRID, mine, ())
    assert len(taken(sender, mine)) == WINDOW_CHUNKS_MIN, "of a new plan nothing was sent"
    sender.send_again(1)
    monkeypatch.setattr(sender, "_window", N_CHUNKS)
    assert chunks(taken(sender, mine)) == [4, 5, 6, 7, 8, 9, 1]


def test_what_was_on_its_way_when_a_connection_ended_goes_first_and_as_often_as_one_ends(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner waited for it until it took this peer for late, while the window stayed shut."""
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 0)
    mine = offered()
    sender.begin(planned("ooooootttt"), BASE, GRID, mine, ())
    assert chunks(taken(sender, mine)) == [0, 1, 2, 3]
    assert chunks(taken(sender, mine, THIRD.peer)) == [6, 7, 8, 9]
    sender.done(1)
    for _ in range(2):
        sender.broken(OTHER.peer)
        sender.broken("nobody")
        assert sender.pending(mine) == {OTHER.peer}, "what went to another is not touched"
        sender.done(3)  # it had come through
        assert chunks(taken(sender, mine)) == [0, 2, 4, 5]


def test_the_last_window_of_results_goes_once_more_when_a_connection_ends(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lacked them asked for them when nothing moved any more."""
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 0)
    mine, results = offered(), [result(chunk) for chunk in range(WINDOW_CHUNKS_MIN + 2)]
    old = Result(dataclasses.replace(results[0].header, head=b"o" * 32), b"")
    sender.begin(planned("m" * N_CHUNKS), BASE, GRID, mine, ())
    sender.outbox.serve(OTHER.peer, old)
    for one in results[:-1]:
        sender.outbox.tell(one, [OTHER.peer, THIRD.peer])
    assert taken(sender, mine) == [*results[:-1], old]
    sender.outbox.tell(results[-1], [OTHER.peer])
    sender.broken(OTHER.peer)
    again = taken(sender, mine)
    assert again == results[1:], "in their order, before what has not gone yet, and not what is of another slot"
    sender.broken(OTHER.peer)
    assert taken(sender, mine) == results[-WINDOW_CHUNKS_MIN:] and taken(sender, mine, THIRD.peer) == results[:-1]
    sender.outbox.serve(OTHER.peer, results[-1])
    assert taken(sender, mine) == results[-1:], "it was asked for"
    sender.broken(OTHER.peer)
    assert taken(sender, mine) == results[-WINDOW_CHUNKS_MIN:], "each once"
    sender.begin(planned("m" * N_CHUNKS), BASE, GRID, mine, ())
    sender.broken(THIRD.peer)
    assert sender.idle(mine), "they were of another plan"
    sender.outbox.tell(results[0], [OTHER.peer])
    assert taken(sender, mine) == results[:1]
    sender.end()
    sender.broken(OTHER.peer)
    assert sender.idle(mine)


def test_a_new_plan_or_none_ends_what_was_queued(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned(), BASE, GRID, mine, ())
    sender.begin(planned("t" * N_CHUNKS), BASE, GRID, mine, ())
    assert taken(sender, mine) == [] and sender.pending(mine) == {THIRD.peer}
    sender.outbox.serve(OTHER.peer, served := result(0))
    sender.end()
    sender.send_again(0)
    sender.done(0)
    assert sender.pending(mine) == {OTHER.peer} and not sender.idle(mine)
    assert taken(sender, mine, THIRD.peer) == []
    assert taken(sender, mine) == [served], "it is asked for by those who are behind"
    assert sender.idle(mine)


# ------------------------------------------------------------------ the contribution


def test_when_a_contribution_could_be_sent_first_is_noted_once(sender: Sender) -> None:
    mine = offered()
    sender.ctx.now = 3.0
    sender.begin(planned(), BASE, GRID, mine, ())
    sender.ctx.now = 4.0
    sender.begin(planned(), BASE, GRID, mine, ())
    assert mine.started == 3.0


def test_a_contribution_that_is_withdrawn_is_not_sent_and_what_comes_in_its_place_is(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned(), BASE, GRID, mine, ())
    assert sender.next_bulk(OTHER.peer, mine, 0) is not None
    assert taken(sender, None) == []
    assert chunks(taken(sender, offered())) == list(range(1, N_CHUNKS))


@pytest.mark.parametrize("other", [None, {"weight": 2.0}, {"upto": 4}])
def test_what_the_plan_names_and_is_not_there_is_told_to_each_owner_once(
    sender: Sender, other: dict[str, Any] | None
) -> None:
    mine = None
    if other is not None:
        mine = offered()
        mine.ready = dataclasses.replace(mine.ready, **other)
    sender.begin(planned("mmooo-ttoo"), BASE, GRID, mine, ())
    assert sender.pending(mine) == {OTHER.peer, THIRD.peer}
    assert taken(sender, mine) == [Contrib("a", BASE, 2, 1.0, 0)]
    assert taken(sender, mine, THIRD.peer) == [Contrib("a", BASE, 6, 1.0, 0)]
    assert sender.idle(mine) and (mine is None or mine.started is None)
    sender.give_up()
    assert sender.idle(mine), "they know"


def test_an_owner_that_was_not_told_yet_is_told_of_what_the_next_plan_names_too(sender: Sender) -> None:
    """It would wait for that as long as for one that is silent."""
    first = planned()
    roster = (dataclasses.replace(first.entry.roster[0], weight=2.0), *first.entry.roster[1:])
    second = dataclasses.replace(first, entry=dataclasses.replace(first.entry, roster=roster))
    for named in (first, second, second):
        sender.begin(named, BASE, GRID, None, ())
    assert taken(sender, None) == [Contrib("a", BASE, 0, 1.0, 0), Contrib("a", BASE, 0, 2.0, 0)]


def test_what_is_offered_again_is_not_told_to_be_given_up(sender: Sender) -> None:
    """Told after the first parts, which go before results, it made the owner close what was open without more of it."""
    first = planned("mmmmmooooo")
    roster = (dataclasses.replace(first.entry.roster[0], weight=2.0), *first.entry.roster[1:])
    other = dataclasses.replace(first, entry=dataclasses.replace(first.entry, roster=roster))
    mine = offered()
    for named in (first, other):
        sender.begin(named, BASE, GRID, None, ())
    sender.begin(first, BASE, GRID, mine, ())
    for chunk in range(5):
        sender.outbox.tell(result(chunk), [OTHER.peer])
    sent = taken(sender, mine)
    assert [m for m in sent if isinstance(m, Contrib) and not m.payload] == [Contrib("a", BASE, 5, 2.0, 0)]
    assert kinds(sent).count("R") == 5 and len(sent) == 11


def test_of_a_plan_that_does_not_name_me_nothing_is_sent(sender: Sender) -> None:
    roster = (Part(OTHER, 1.0, 0), Part(THIRD, 1.0, 0))
    others = planned()
    others = dataclasses.replace(others, entry=dataclasses.replace(others.entry, roster=roster))
    sender.begin(others, BASE, GRID, offered(), ())
    assert sender.idle(offered()) and taken(sender, offered()) == []


def test_a_contribution_that_is_given_up_is_told_once_and_the_rest_of_it_stays(sender: Sender) -> None:
    mine = offered(filling=Filling(NUMEL, 1.0))
    assert mine.filling is not None
    sender.begin(planned("ototototot", fill_s=1.0), BASE, GRID, mine, ())
    mine.filling.reached(5 * CHUNK)
    assert chunks(taken(sender, mine)) == [8, 6]
    mine.filling.stop()
    assert sender.idle(mine), "9, 7 and 5 are final, but of what has stopped nothing more goes"
    for told in ([Contrib("a", BASE, 0, 1.0, 0)], []):
        sender.give_up()
        assert taken(sender, mine) == told
    assert taken(sender, mine, THIRD.peer) == [Contrib("a", BASE, 1, 1.0, 0)]


def test_what_was_given_up_before_the_plan_is_told_too(sender: Sender) -> None:
    mine = offered(filling=Filling(NUMEL, 1.0))
    assert mine.filling is not None
    mine.filling.stop()
    sender.begin(planned(), BASE, GRID, mine, ())
    assert taken(sender, mine) == [Contrib("a", BASE, 0, 1.0, 0)]


def test_a_chunk_waits_until_it_is_final(sender: Sender) -> None:
    mine = offered(filling=Filling(NUMEL, 1.0))
    assert mine.filling is not None
    sender.begin(planned(fill_s=1.0), BASE, GRID, mine, ())
    assert sender.idle(mine) and taken(sender, mine) == []
    mine.filling.reached(8 * CHUNK - 1)
    assert sender.pending(mine) == {OTHER.peer} and chunks(taken(sender, mine)) == [9, 8]
    assert sender.idle(mine)
    sender.done(7)
    mine.filling.reached(6 * CHUNK)
    assert chunks(taken(sender, mine)) == [6]


def test_a_chunk_that_has_a_result_holds_up_none_that_is_final(sender: Sender) -> None:
    """Forwards, as the plan says: it did not know that this contribution fills."""
    mine = offered(filling=Filling(NUMEL, 1.0))
    assert mine.filling is not None
    sender.begin(planned(), BASE, GRID, mine, ())
    mine.filling.reached(8 * CHUNK)
    assert sender.idle(mine) and taken(sender, mine) == []
    for chunk in range(8):
        sender.done(chunk)
    assert sender.pending(mine) == {OTHER.peer} and chunks(taken(sender, mine)) == [8, 9]


def test_a_chunk_that_was_final_goes_out_though_its_maker_stops_just_then(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own thread, between the look at the front and the encoding; the same for the part that I own."""
    filling = Filling(NUMEL, 1.0)
    mine = offered(filling=filling)
    sender.begin(planned(fill_s=1.0), BASE, GRID, mine, ())
    filling.reached(NUMEL - CHUNK)
    final = mine.final

    def stops_then(start: int) -> bool:
        found = final(start)
        filling.stop()
        return found

    monkeypatch.setattr(mine, "final", stops_then)
    assert chunks(taken(sender, mine)) == [N_CHUNKS - 1]
    assert filling.stopped and sender.idle(mine)


def test_all_send_in_one_order_and_backwards_where_something_fills() -> None:
    owners = "mt-om"
    forward = [(0, 0), (1, 2), (2, -1), (3, 1), (4, 0)]
    assert list(in_order(planned(owners))) == forward
    assert list(in_order(planned(owners, fill_s=1.0))) == forward[::-1]


# ------------------------------------------------------------------ whose turn it is


def test_results_and_contributions_go_by_turns(sender: Sender) -> None:
    """I reduce half of the chunks, and their results are ready before my contribution is sent."""
    mine = offered()
    sender.begin(planned("mmmmmooooo"), BASE, GRID, mine, ())
    for chunk in range(5):
        sender.outbox.tell(result(chunk), [OTHER.peer])
    assert not sender.idle(mine)
    assert kinds(taken(sender, mine)) == "CRCRCRCRCR"


def test_results_that_are_not_ready_yet_count_as_behind(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned("mmmmmooooo"), BASE, GRID, mine, ())
    sender.outbox.tell(result(0), [OTHER.peer])
    assert kinds(taken(sender, mine, n_open=2)) == "CCCRCC", "the results of three of five chunks are left, not of one"


def test_how_much_one_owner_lacks_of_mine_is_no_matter_of_another(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned("mmmmotttto"), BASE, GRID, mine, ())
    for chunk in range(4):
        sender.outbox.tell(result(chunk), [OTHER.peer])
    assert kinds(taken(sender, mine)) == "CRRCRR"


def test_each_thing_that_is_asked_for_is_served_once() -> None:
    header = result(0).header
    changes: list[dict[str, Any]] = [{}, {"head": b"h" * 32}, {"ballot": Ballot(1, ME)}, {"chunk": 1}]
    results = [Result(dataclasses.replace(header, **change), b"") for change in changes]
    contribs = [Contrib(channel, base, chunk, 1.0, 0) for channel in "ab" for base in (BASE, b"") for chunk in (0, 1)]
    pieces = [Piece(channel, digest, n, b"") for channel in "ab" for digest in (b"1", b"2") for n in (0, 1)]
    outbox = Outbox()
    for message in (*results, *contribs, *pieces) * 2:
        outbox.serve(OTHER.peer, message)
    served = list(iter(lambda: outbox.next(OTHER.peer), None))
    assert served == [*results, *contribs, *pieces] and outbox.empty


def test_what_was_asked_for_by_one_that_is_gone_is_dropped() -> None:
    outbox = Outbox()
    outbox.serve(OTHER.peer, result(0))
    outbox.serve(THIRD.peer, result(0))
    outbox.keep(lambda result: False, lambda peer: peer == THIRD.peer)
    assert outbox.peers() == {THIRD.peer}


def test_what_is_taken_back_is_that_part_alone_and_nobody_is_left_with_nothing_to_get() -> None:
    """Whoever is named as pending is polled for without a pause."""
    outbox, told = Outbox(), Contrib("a", BASE, 0, 1.0, 3)
    changes: list[dict[str, Any]] = [{"channel": "b"}, {"base": b""}, {"weight": 2.0}, {"upto": 0}]
    others: list[Bulk] = [*(dataclasses.replace(told, **change) for change in changes), result(0)]
    for message in (told, *others):
        outbox.serve(OTHER.peer, message)
    outbox.serve(THIRD.peer, told)
    outbox.take_back("a", BASE, Part(ME, 1.0, 3))
    assert outbox.peers() == {OTHER.peer}
    assert list(iter(lambda: outbox.next(OTHER.peer), None)) == others
    assert outbox.empty and outbox.peers() == set()


def test_who_has_got_all_results_waits_for_nothing() -> None:
    outbox = Outbox()
    for chunk in (0, 1):
        outbox.tell(result(chunk), [OTHER.peer, THIRD.peer])
    for peer in (OTHER.peer, THIRD.peer):
        assert outbox.peers() >= {peer}
        assert [outbox.next(peer) for _ in range(3)] == [result(0), result(1), None]
    assert outbox.empty and outbox.peers() == set()


def test_no_more_is_served_to_one_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlc.comm.outbox.SERVED_MAX", 2)
    outbox = Outbox()
    for chunk in range(4):
        outbox.serve(OTHER.peer, result(chunk))
    assert [outbox.next(OTHER.peer) for _ in range(3)] == [result(0), result(1), None]


def test_chunks_that_the_plan_fixes_are_not_mine_to_reduce(sender: Sender) -> None:
    mine = offered()
    sender.begin(planned("m----ooooo"), BASE, GRID, mine, ())
    sender.outbox.tell(result(0), [OTHER.peer])
    assert kinds(taken(sender, mine)) == "CRCCCC", "the only one"


def test_where_the_contribution_must_wait_results_go(sender: Sender) -> None:
    mine = offered(filling=Filling(NUMEL, 1.0))
    sender.begin(planned("mmmmmooooo", fill_s=1.0), BASE, GRID, mine, ())
    sender.outbox.tell(result(0), [OTHER.peer])
    assert taken(sender, mine, n_open=4) == [result(0)]
