"""What a coordinator proposes, and whom it waits for; who votes next."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from dlc.comm import agenda as agenda_module
from dlc.comm import entries
from dlc.comm import messages as msg
from dlc.comm.agenda import (
    DISSENT_PATIENCE_S,
    MUTE_S,
    MUTE_S_MAX,
    NEWCOMER_LAG_MAX,
    NEWCOMER_LAG_S,
    OPEN_PATIENCE_S,
    Agenda,
    Draft,
    next_electorate,
)
from dlc.comm.entries import CHANNELS_MAX, CONFIG, OPEN, ROUND, Part
from dlc.comm.filling import FILL_S_MAX
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.roles import HELPER, OBSERVER
from dlc.comm.shapes import LEASE_LEN_MAX
from dlc.comm.straggler import NEVER_S
from dlc.sim.schedule import TRAIN
from tests.comm.stage import Stage

torch.set_num_threads(1)

A, B = b"a" * 32, b"b" * 32


class Desk:
    """The agenda of the first of n voters, between two rounds; who is alive and what records say is made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int = 4) -> None:
        process = Stage(n, inner_s=3.0).peers()[0]
        node = process.node
        self.agenda: Agenda = node.coordinator.agenda
        self.exchange = node.exchange
        self.ctx, self.log, self.me = node.ctx, node.log, process.voter
        self.voters = self.log.state.electorate
        self.others = [voter for voter in self.voters if voter != self.me]
        self.records = {record.voter: record for record in node.members.records()}
        self.dead: set[Voter] = set()
        self.gone: set[Voter] = set()
        self.unseen_s: dict[Voter, float] = {}
        members: Any = node.members
        monkeypatch.setattr(members, "alive", lambda voter: voter not in self.dead | self.gone)
        monkeypatch.setattr(members, "gone", lambda voter: voter in self.gone)
        monkeypatch.setattr(members, "unseen_s", lambda voter: self.unseen_s.get(voter, 0.0))
        monkeypatch.setattr(members, "records", lambda: list(self.records.values()))
        monkeypatch.setattr(
            members, "record", lambda peer: next((r for v, r in self.records.items() if v.peer == peer), None)
        )
        self.agenda.enter()

    def says(self, voter: Voter, /, **changes: Any) -> None:
        """Its record."""
        self.records[voter] = dataclasses.replace(self.records[voter], **changes)

    def state(self, **changes: Any) -> None:
        self.log.state = dataclasses.replace(self.log.state, **changes)

    def offer(self, voter: Voter, **changes: Any) -> msg.Ready:
        state = self.log.state
        known, lease = state.channel(TRAIN), state.ledger.lease(voter)
        assert known is not None and lease is not None
        grid = msg.GridSpec(known.numel, known.chunk_elems, known.codec)
        digest, upto = self.log.digest(TRAIN), lease.ranges[0].hi
        ready = msg.Ready(state.head, TRAIN, state.base(TRAIN), grid, 1.0, upto, digest, 0.0, False, 0)
        return dataclasses.replace(ready, **changes)

    def wish(self, digest: bytes = A, **changes: Any) -> msg.Ready:
        grid = msg.GridSpec(8, 8, "fp32")
        base = self.log.state.base("new")
        wish = msg.Ready(self.log.head, "new", base, grid, 0.0, 0, digest, 0.0, True, 0)
        return dataclasses.replace(wish, **changes)

    def plan(self, digest: bytes) -> msg.Plan:
        """A round of the training, of this state."""
        known = self.log.state.channel(TRAIN)
        assert known is not None
        grid = msg.GridSpec(known.numel, known.chunk_elems, known.codec)
        entry = self.agenda._entry(ROUND, TRAIN, known.t + 1, (), grid, b"", 0)
        return msg.Plan(self.log.head, Ballot(0, self.me), (), entry, digest, (), (), (), ())

    def hears(self, *readies: tuple[Voter, msg.Ready]) -> None:
        for voter, ready in readies:
            self.agenda.ready(voter, ready)

    def round(self) -> Draft | None:
        draft = self.agenda._round(TRAIN)
        assert draft is None or draft.entry.kind == ROUND
        return draft

    def roster(self) -> list[Voter] | None:
        draft = self.round()
        return None if draft is None else [part.voter for part in draft.entry.roster]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


# ------------------------------------------------------------------ who is ready


def test_what_no_correct_peer_offers_is_not_planned_for(desk: Desk) -> None:
    wrong: list[dict[str, Any]] = [
        {"head": A},
        {"channel": ""},
        {"grid": msg.GridSpec(0, 8, "fp32")},
        {"grid": msg.GridSpec(8, 8, "fp31")},
        {"digest": b"short"},
        *({"lease_len": value} for value in (-1, LEASE_LEN_MAX)),
        *({"weight": value} for value in (-1.0, 2 * WEIGHT_MAX, math.nan)),
        *({"norm": value} for value in (-1.0, math.inf)),
        *({"fill_s": value} for value in (-1.0, 2 * FILL_S_MAX)),
        *({"offered_s": value} for value in (-1.0, math.inf)),
    ]
    for changes in wrong:
        desk.hears((desk.me, desk.offer(desk.me, **changes)))
        assert not desk.agenda._ready, changes


def test_only_voters_are_ready_and_for_so_many_channels(desk: Desk) -> None:
    agenda, offer = desk.agenda, desk.offer(desk.me)
    agenda.ready(Voter("stranger", 1), offer)
    assert not agenda._ready
    for number in range(CHANNELS_MAX + 1):
        agenda.ready(desk.me, dataclasses.replace(offer, channel=f"c{number}"))
    assert len(agenda._ready) == CHANNELS_MAX
    agenda.ready(desk.me, dataclasses.replace(offer, channel="c0", weight=2.0))
    assert agenda._ready["c0"][desk.me][0].weight == 2.0, "a repeat is none more"


def test_a_wait_counts_from_the_first_of_the_offers_repeats(desk: Desk) -> None:
    began, offer = desk.ctx.now, desk.offer(desk.me, offered_s=3.0)
    for at_s, offered_s in ((0.0, 3.0), (2.0, 5.5), (4.0, 7.0)):
        desk.ctx.now = began + at_s
        desk.hears((desk.me, dataclasses.replace(offer, offered_s=offered_s)))
    assert desk.agenda._ready[TRAIN][desk.me][1] == pytest.approx(began - 3.5)


def test_a_contribution_in_the_place_of_one_taken_back_begins_its_own_wait(desk: Desk) -> None:
    agenda, began, offer = desk.agenda, desk.ctx.now, desk.offer(desk.me, channel="sum")
    desk.hears((desk.me, offer))
    desk.ctx.now += 30.0
    desk.hears((desk.me, dataclasses.replace(offer, upto=offer.upto + 1, offered_s=1.0)))
    assert agenda._ready["sum"][desk.me][1] == pytest.approx(began + 29.0)


def test_who_holds_up_what_is_named(desk: Desk) -> None:
    one, two, three = desk.others
    desk.hears((desk.me, desk.offer(desk.me)))
    desk.dead.add(three)
    assert set(desk.agenda.waiting_for()) == {one, two}
    desk.says(two, role=HELPER)
    desk.hears((one, desk.wish()))
    assert desk.agenda.waiting_for() == (desk.me,), "it wishes no such channel, and two need none"


# ------------------------------------------------------------------ openings


def test_a_channel_is_opened_with_the_state_that_most_hold(desk: Desk) -> None:
    me, one, two, three = desk.me, *desk.others
    desk.hears((me, desk.wish(B)), (one, desk.wish(A)), (two, desk.wish(A)), (three, desk.wish(B)))
    draft = desk.agenda._opening("new")
    assert draft is not None and draft.entry.kind == OPEN
    assert draft.digest == draft.entry.digest == A, "ties go to the lowest"
    desk.hears((one, desk.wish(B)))
    draft = desk.agenda._opening("new")
    assert draft is not None and draft.digest == B


def test_an_opening_waits_a_while_for_all_and_for_a_quorum_without_end(desk: Desk) -> None:
    agenda, ctx = desk.agenda, desk.ctx
    ranked = list(desk.log.state.ranked)
    _, *low = ranked  # the first has the casting vote
    desk.hears(*((voter, desk.wish()) for voter in low[:2]))
    began = ctx.now
    assert agenda._opening("new") is None
    ctx.now = began + OPEN_PATIENCE_S + 0.1
    assert agenda._opening("new") is None, "half is no quorum"
    agenda.enter()
    desk.hears(*((voter, desk.wish()) for voter in low))
    assert agenda._opening("new") is not None, "it has waited, though in another slot"
    agenda._wished_at.clear()
    assert agenda._opening("new") is None
    desk.dead.add(ranked[0])
    assert agenda._opening("new") is not None, "nobody is waited for who is dead"
    desk.dead = {low[0]}
    ctx.now += OPEN_PATIENCE_S + 0.1
    assert agenda._opening("new") is None, "nor counts what the dead wish"


def test_helpers_that_wish_nothing_abstain(desk: Desk) -> None:
    """More than half of the others hold the state: as many as decide anything after them."""
    _, helper, one, two = desk.log.state.ranked
    desk.hears((one, desk.wish()), (two, desk.wish()))
    desk.agenda._wished_at["new"] = desk.ctx.now - OPEN_PATIENCE_S - 0.1
    assert desk.agenda._opening("new") is None
    desk.says(helper, role=HELPER)
    assert desk.agenda._opening("new") is not None
    desk.says(helper, voter=Voter(helper.peer, helper.inc + 1))
    assert desk.agenda._opening("new") is None, "that is another process"


def test_nothing_is_opened_twice(desk: Desk) -> None:
    desk.hears(*((v, desk.offer(v, opening=True)) for v in desk.voters))
    assert desk.agenda._opening(TRAIN) is None and desk.round() is None, "nor is a wish a contribution"


def test_an_openings_patience_ends_with_it(desk: Desk) -> None:
    """The same name may be wished for once more, in another history."""
    desk.agenda._wished_at = {TRAIN: 0.0, "new": 0.0}
    desk.agenda.enter()
    assert list(desk.agenda._wished_at) == ["new"]


def test_names_of_which_nothing_comes_are_forgotten(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody wished for another one in each slot, and what a coordinator kept of each grew without end."""
    monkeypatch.setattr(entries, "CHANNELS_MAX", 10)
    exchange = desk.exchange
    for i in range(50):
        name = f"name{i}"
        base = desk.log.state.base(name)
        desk.hears((desk.others[0], desk.wish(channel=name, base=base)))
        assert desk.agenda._opening(name) is None
        desk.agenda._listened_s(name)
        exchange._count_sent(name, 1)
        desk.agenda.enter()
    for kept in (desk.agenda._wished_at, desk.agenda._unheard, exchange.traffic):
        assert list(kept)[-1] == "name49" and len(kept) <= 10


# ------------------------------------------------------------------ rounds


def test_a_roster_names_those_who_fit(desk: Desk) -> None:
    me, one, two, three = desk.me, *desk.others
    fit = [(v, desk.offer(v)) for v in (me, one, two)]
    assert fit[0][1].grid.numel > 8
    unfit = (
        {"base": A},
        {"upto": desk.log.state.ledger.lease(three).ranges[-1].hi + 1},  # type: ignore[union-attr]
        {"grid": msg.GridSpec(8, 8, "fp32")},
        {"digest": A},
    )
    for changes in unfit:
        desk.agenda.enter()
        desk.ctx.now += 2.0  # the slot is not young
        desk.hears(*fit, (three, desk.offer(three, patience_s=0.001, offered_s=1.0, **changes)))
        desk.hears(*((v, dataclasses.replace(m, patience_s=0.001, offered_s=1.0)) for v, m in fit))
        assert desk.roster() == sorted((me, one, two)), changes
    desk.hears((three, desk.offer(three)))
    assert desk.roster() == sorted(desk.voters)
    desk.dead.add(three)
    assert desk.roster() == sorted((me, one, two)), "a dead one's contribution cannot be had"


def test_the_grid_of_an_open_channel_is_the_runs_whatever_most_offer(desk: Desk) -> None:
    me, *others = desk.voters
    desk.hears((me, desk.offer(me)), *((v, desk.offer(v, grid=msg.GridSpec(8, 8, "fp32"))) for v in others))
    assert desk.roster() == [me]


def test_a_plan_tells_norms_in_the_order_of_the_roster_and_the_longest_filling(desk: Desk) -> None:
    last, *before = reversed(desk.voters)
    desk.hears((last, desk.offer(last, norm=9.0, fill_s=3.0)), *((v, desk.offer(v, norm=1.0)) for v in before))
    draft = desk.round()
    assert draft is not None and draft.norms == (1.0, 1.0, 1.0, 9.0) and draft.fill_s == 3.0


def test_where_not_all_have_room_they_take_turns(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grid, "parts_max", property(lambda grid: 2))
    desk.hears(*((v, desk.offer(v)) for v in desk.voters))
    first, second, third, fourth = desk.voters
    counted = {first: 3.0, second: 1.0, third: 2.0}
    desk.agenda._counted_at = {(TRAIN, v): at for v, at in counted.items()} | {("other", fourth): 9.0}
    assert desk.roster() == [second, fourth]


def test_a_coordinator_that_is_outvoted_plans_nothing(desk: Desk) -> None:
    me, *others = desk.voters
    desk.hears((me, desk.offer(me)), *((v, desk.offer(v, digest=B)) for v in others))
    assert desk.round() is None and desk.agenda.diverged == (TRAIN, B)
    desk.agenda.enter()
    assert desk.agenda.diverged is None


def test_a_round_that_was_applied_is_where_the_work_of_its_roster_began(desk: Desk) -> None:
    agenda, ctx, (me, one, *_) = desk.agenda, desk.ctx, desk.voters
    past = desk.log.past[-1]
    entry = dataclasses.replace(past.entry, roster=(Part(me, 1.0, 1),))
    desk.log.past[-1] = dataclasses.replace(past, entry=entry)
    ctx.now += 100.0
    agenda._seated[one] = ctx.now - 50.0
    agenda._counted_at.clear()
    agenda.applied(TRAIN)
    assert agenda._works_since(TRAIN, me) == ctx.now
    assert agenda._works_since(TRAIN, one) == ctx.now - 50.0, "since it got its vote"
    assert agenda._works_since("other", me) == max(agenda._seated[me], agenda._slot_since)


# ------------------------------------------------------------------ the wait for the late


def ready_three(desk: Desk, **changes: Any) -> Voter:
    """The fourth, who alone is not ready."""
    *three, late = desk.voters
    desk.hears(*((v, desk.offer(v, **changes)) for v in three))
    return late


def test_the_late_are_waited_for_if_they_live_train_and_have_not_ended(desk: Desk) -> None:
    late = ready_three(desk)
    for v in desk.voters:
        desk.says(v, speed=1.0, eta_s=1.0)
        desk.agenda._seated[v] = desk.ctx.now - 100.0
        desk.agenda._counted_at[(TRAIN, v)] = desk.ctx.now - 30.0
    desk.agenda._hear_etas()
    assert desk.round() is None
    desk.dead.add(late)
    assert desk.round() is not None
    desk.dead.clear()
    trainers = desk.log.state.trainers
    desk.state(trainers=tuple(v for v in trainers if v != late))
    assert desk.round() is not None, "a helper brings nothing"
    desk.state(trainers=trainers)
    desk.says(late, eta_s=NEVER_S)
    assert desk.agenda._rests(TRAIN, late) and not desk.agenda._rests("reduce", late)
    assert desk.round() is not None
    desk.says(late, voter=Voter(late.peer, late.inc + 1))
    assert not desk.agenda._rests(TRAIN, late), "that is another process"


def test_who_names_a_patience_is_asked_for_no_other(desk: Desk) -> None:
    """The longest that anybody named, from the first offer on."""
    desk.ctx.now += 1.0  # the slot is not young
    first, second, third, _ = desk.voters
    for v, patience_s, offered_s in ((first, 1.0, 5.9), (second, 6.0, 0.0), (third, 0.0, 0.0)):
        desk.hears((v, desk.offer(v, patience_s=patience_s, offered_s=offered_s)))
    assert desk.round() is None
    desk.ctx.now += 0.2
    assert desk.round() is not None


def test_who_was_ready_before_the_slot_began_is_heard_in_it_before_a_round_goes_on_without_the_late(desk: Desk) -> None:
    """Patience had passed as the slot before decided something else: a coordinator then planned its own offer alone, as
    that is heard first, and left out those who had been ready for as long."""
    base, grid = desk.log.state.base("sum"), msg.GridSpec(8, 8, "fp32")
    offer = desk.offer(desk.me, channel="sum", base=base, grid=grid, digest=b"", patience_s=1.0, offered_s=5.0)
    first, second, third, _ = desk.voters
    desk.agenda.enter()
    desk.hears((first, offer))
    assert desk.agenda.due() is None
    desk.ctx.now += 0.9 * desk.ctx.members.t_prep_s
    desk.hears((second, offer), (third, offer))
    assert desk.agenda.due() is None
    desk.ctx.now += 0.2 * desk.ctx.members.t_prep_s
    draft = desk.agenda.due()
    assert draft is not None and [part.voter for part in draft.entry.roster] == [first, second, third]


def test_of_two_rounds_that_are_due_the_one_that_was_offered_first_begins(desk: Desk) -> None:
    """By their names, one that is offered again and again would come before the other for ever."""
    for channel, offered_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        base, grid = desk.log.state.base(channel), msg.GridSpec(8, 8, "fp32")
        offer = desk.offer(desk.me, channel=channel, base=base, grid=grid, digest=b"", offered_s=offered_s)
        desk.hears(*((voter, offer) for voter in desk.voters))
    draft = desk.agenda.due()
    assert draft is not None and draft.entry.channel == "b"


def test_no_round_overtakes_one_that_only_waits_to_hear_who_else_has_offered(desk: Desk) -> None:
    first = desk.voters[0]
    base, grid = desk.log.state.base("z"), msg.GridSpec(8, 8, "fp32")
    desk.agenda.enter()
    desk.hears((first, desk.offer(first, channel="z", base=base, grid=grid, digest=b"", patience_s=1.0, offered_s=5.0)))
    desk.hears(*((v, desk.offer(v, offered_s=2.0)) for v in desk.voters))
    assert desk.agenda.due() is None
    desk.ctx.now += 1.1 * desk.ctx.members.t_prep_s
    draft = desk.agenda.due()
    assert draft is not None and draft.entry.channel == "z"


def test_a_prediction_counts_down_and_ends_with_its_work(desk: Desk) -> None:
    agenda, ctx, late = desk.agenda, desk.ctx, desk.voters[-1]
    agenda._told.clear()
    assert agenda._eta_s(late, 100.0) is None
    desk.says(late, eta_s=10.0)
    agenda._hear_etas()
    ctx.now += 4.0
    agenda._hear_etas()  # the same record: nothing new
    assert agenda._eta_s(late, 100.0) == pytest.approx(6.0)
    assert agenda._eta_s(late, 3.0) is None, "it spoke of work that a round has counted since"
    ctx.now += 20.0
    assert agenda._eta_s(late, 100.0) == 0.0
    desk.says(late, eta_s=5.0)
    agenda._hear_etas()
    assert agenda._eta_s(late, 100.0) == pytest.approx(5.0)


def test_a_phase_is_as_long_as_for_those_who_began_it_with_the_last_round(desk: Desk) -> None:
    agenda, now, (one, two, three, late) = desk.agenda, desk.ctx.now, desk.voters
    agenda._counted_at = {(TRAIN, v): now - 20.0 for v in (one, two)}
    agenda._counted_at |= {(TRAIN, three): now - 40.0, (TRAIN, late): now - 20.0, ("other", one): now - 1.0}
    offers = {v: (desk.offer(v), now - ago) for v, ago in ((one, 0.0), (two, 2.0), (three, 15.0))}
    assert agenda._phase_of(TRAIN, offers) == pytest.approx(19.0)
    assert agenda._phase_of(TRAIN, {three: offers[three]}) == pytest.approx(19.0), "remembered"


def waits_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the rule of stragglers is asked."""
    asked: dict[str, Any] = {}

    def worth_waiting(ready: Any, late: Any, floor_s: float, share: float, usual_s: float, fill_s: float) -> bool:
        asked.update(ready=ready, late=late, floor_s=floor_s, share=share, usual_s=usual_s, fill_s=fill_s)
        return False

    monkeypatch.setattr(agenda_module, "worth_waiting", worth_waiting)
    assert desk.round() is not None
    return asked


def test_what_the_rule_of_stragglers_is_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    late, now = ready_three(desk, fill_s=10.0), desk.ctx.now
    one, two, three, _ = desk.voters
    desk.agenda._counted_at = {(TRAIN, v): now - 30.0 for v in desk.voters}
    for v, speed in ((one, 2.0), (two, 4.0), (three, 0.0)):
        desk.says(v, speed=speed)
    del desk.records[late]  # nothing is known of it
    asked = waits_for(desk, monkeypatch)
    assert [idle.pace for idle in asked["ready"]] == [2.0, 4.0, 3.0], "who tells none is as quick as the others"
    assert [(peer.worked_s, peer.pace) for peer in asked["late"]] == [(pytest.approx(30.0), 3.0)]
    assert (asked["usual_s"], asked["fill_s"]) == (pytest.approx(30.0), 10.0)
    timeouts = desk.ctx.members.timeouts
    floor_s = max(timeouts.straggler_floor_s * 30.0 / 40.0, 4 * desk.ctx.members.rtt_max_s)
    assert asked["floor_s"] == pytest.approx(floor_s) and floor_s < timeouts.straggler_floor_s


def test_who_has_made_no_step_yet_has_worked_for_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds its model; unless nobody tells a speed, as where no steps are timed."""
    late = ready_three(desk)
    desk.agenda._counted_at = {(TRAIN, v): desk.ctx.now - 30.0 for v in desk.voters}
    for v in desk.voters:
        desk.says(v, speed=0.0 if v == late else 1.0)
    assert [peer.worked_s for peer in waits_for(desk, monkeypatch)["late"]] == [0.0]
    for v in desk.voters:
        desk.says(v, speed=0.0)
    assert [peer.worked_s for peer in waits_for(desk, monkeypatch)["late"]] == [pytest.approx(30.0)]


# ------------------------------------------------------------------ which state is right


class Reports:
    """Of which voter has told what digest at this head."""

    def __init__(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.desk, self.told = desk, dict[Voter, bytes | None]()
        self.can_vote = set(desk.voters)
        self.suspects: set[Voter] = set()
        monkeypatch.setattr(agenda_module, "told_digest", lambda record, head, channel: self.told.get(record.voter))
        monkeypatch.setattr(agenda_module, "can_vote", lambda record: record.voter in self.can_vote)
        monkeypatch.setattr(desk.ctx.members, "suspect", lambda voter: voter in self.suspects)

    def says(self, mine: bytes, offers: dict[Voter, bytes], offered_s: float = 0.0) -> bytes | None:
        desk = self.desk
        at = desk.ctx.now - offered_s
        return desk.agenda._digest(TRAIN, mine, {v: (desk.offer(v, digest=d), at) for v, d in offers.items()})


@pytest.fixture
def reports(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Reports:
    return Reports(desk, monkeypatch)


def test_more_than_half_of_the_alive_trainers_decide_at_once(desk: Desk, reports: Reports) -> None:
    me, one, two, three = desk.me, *desk.others
    reports.told = {one: B}
    assert reports.says(B, {me: B}) is None, "two of four are half"
    reports.told[two] = B
    assert reports.says(B, {me: B}) == B
    assert reports.says(B, {three: A}) == B, "my own state counts though I offer nothing"


def test_the_silent_and_those_without_a_vote_speak_only_for_a_state_that_others_have(
    desk: Desk, reports: Reports
) -> None:
    me, one, two, three = desk.me, *desk.others
    desk.dead |= {two, three}
    desk.gone |= {two, three}
    reports.told = {one: B, two: B, three: B}
    assert reports.says(A, {me: A}) == B
    reports.told = {one: None, two: B, three: B}
    desk.says(one, states=())
    desk.state(trainers=(me,))
    assert reports.says(A, {me: A}) == A, "nobody could fetch that one"


def test_who_may_just_have_died_convicts_nobody_by_a_tie(desk: Desk, reports: Reports) -> None:
    me, one = desk.me, desk.others[0]
    desk.state(electorate=(me, one), trainers=(me, one))
    for voter in desk.others[1:]:
        del desk.records[voter]
    reports.told, reports.suspects = {one: A}, {one}
    assert reports.says(B, {me: B}) is None
    reports.suspects.clear()
    assert reports.says(B, {me: B}) == A, "ties go to the lowest"


def test_where_states_differ_all_are_heard_for_T_dead_and_a_minute(desk: Desk, reports: Reports) -> None:
    me, one = desk.me, desk.others[0]
    reports.told = {one: A}
    agenda, ctx, t_dead_s = desk.agenda, desk.ctx, desk.ctx.members.t_dead_s

    def listen(seconds: float) -> None:
        agenda.enter()
        agenda._unheard.clear()
        reports.says(B, {me: B})
        ctx.running_s += seconds

    for heard_s, offered_s, answer in (
        (t_dead_s + 0.1, DISSENT_PATIENCE_S - 1.0, None),
        (t_dead_s - 0.1, DISSENT_PATIENCE_S + 1.0, None),
        (t_dead_s + 0.1, DISSENT_PATIENCE_S + 1.0, A),
    ):
        listen(heard_s)
        assert reports.says(B, {me: B}, offered_s) == answer, (heard_s, offered_s)
    listen(t_dead_s + 0.1)
    assert reports.says(B, {me: B}) is None
    agenda.enter()
    assert reports.says(B, {me: B}, DISSENT_PATIENCE_S + 1.0) == A, "it listened in the slot before"
    reports.told = {one: B}
    listen(t_dead_s + 0.1)
    assert reports.says(B, {me: B}) == B, "nobody differs"
    reports.told = {}
    listen(t_dead_s + 0.1)
    assert reports.says(B, {me: B}) is None, "it may be mine that is wrong"
    listen(3 * t_dead_s + 0.1)
    assert reports.says(B, {me: B}) == B


def test_trainers_and_whoever_holds_a_state_are_heard_first(desk: Desk, reports: Reports) -> None:
    me = desk.me
    states = (msg.StateDigest(TRAIN, B),)
    for voter in desk.others:
        desk.says(voter, states=())
    assert reports.says(B, {me: B}) is None, "what a trainer has just attached may not be in its record"
    desk.state(trainers=(me,))
    assert reports.says(B, {me: B}) == B
    for voter in desk.others:
        desk.says(voter, states=states)
    assert reports.says(B, {me: B}) is None


def test_a_minute_of_dissent_counts_from_the_first_offer(desk: Desk, reports: Reports) -> None:
    me, one, now = desk.me, desk.others[0], desk.ctx.now
    offers = {me: (desk.offer(me, digest=B), now - DISSENT_PATIENCE_S - 1.0), one: (desk.offer(one, digest=A), now)}
    assert desk.agenda._digest(TRAIN, B, offers) is None
    desk.ctx.running_s += desk.ctx.members.t_dead_s + 0.1
    assert desk.agenda._digest(TRAIN, B, offers) == A


def test_an_observers_state_is_dissent_and_no_vote(desk: Desk, reports: Reports) -> None:
    me, observer = desk.me, desk.others[0]
    reports.told, reports.can_vote = {observer: A}, set(desk.voters) - {observer}
    desk.state(electorate=tuple(v for v in desk.voters if v != observer))
    assert reports.says(B, {me: B}) is None
    desk.ctx.running_s += 10 * desk.ctx.members.t_dead_s
    assert reports.says(B, {me: B}) is None, "others may show that mine is the wrong one"
    assert reports.says(B, {me: B}, DISSENT_PATIENCE_S + 1.0) == B
    desk.gone |= set(desk.others) - {observer}
    assert reports.says(B, {me: B}) == B, "nobody else could speak"


def test_a_planned_round_is_outvoted_by_those_who_live_and_tell_another_state(desk: Desk, reports: Reports) -> None:
    plan, (me, one, two, three) = desk.plan(A), (desk.me, *desk.others)
    attached = desk.log.attached[TRAIN]
    for mine, told, outvoted in (
        (B, {}, True),
        (A, {}, False),
        (b"", {}, False),
        (B, {one: A}, True),  # as many: found out anew
        (B, {one: A, two: A}, False),  # it is mine that is wrong
        (A, {one: B}, False),
        (A, {one: B, two: B}, True),
        (b"", {one: A, two: B}, False),
        (b"", {one: A, two: B, three: B}, True),
        (b"", {one: b"", two: None}, False),
    ):
        attached.synced, attached.digest, reports.told = bool(mine), mine, told
        assert desk.agenda.outvoted(plan) == outvoted, (mine, told)
    attached.synced, attached.digest, reports.told = True, A, {one: B, two: B, three: B}
    desk.dead |= {two, three}
    assert not desk.agenda.outvoted(plan), "one of two"
    reports.told, desk.dead = {}, set()
    desk.hears((one, desk.offer(one, digest=B)), (two, desk.offer(two, digest=B)))
    assert desk.agenda.outvoted(plan) and not desk.agenda.outvoted(dataclasses.replace(plan, digest=b""))
    reports.told, reports.can_vote = {three: A, two: A}, {me, one, two}
    assert desk.agenda.outvoted(plan), "a record may be older than an offer, and an observer has no vote"


def test_a_coordinator_has_not_listened_before_its_slot(desk: Desk) -> None:
    agenda = desk.agenda
    agenda._listened_s(TRAIN)
    desk.ctx.running_s += 100.0
    agenda.enter()
    desk.ctx.running_s += 1.0
    assert agenda._listened_s(TRAIN) == pytest.approx(1.0), "somebody else may have coordinated meanwhile"


def test_a_snapshot_ends_what_was_heard(desk: Desk) -> None:
    agenda = desk.agenda
    agenda._listened_s(TRAIN)
    desk.state(head=A)
    agenda.enter()
    assert not agenda._unheard and agenda.recent() == {A}, "who stands elsewhere may be of another history"


# ------------------------------------------------------------------ who votes next


def next_voters(desk: Desk, forced: tuple[Voter, ...] | None = None, anew: bool = False) -> set[Voter]:
    electorate, _ = next_electorate(desk.ctx, desk.log, forced, desk.agenda.recent(), ranks_anew=anew)
    return set(electorate)


def test_who_falls_silent_keeps_its_vote_for_T_remove(desk: Desk) -> None:
    silent = desk.others[0]
    desk.dead.add(silent)
    desk.unseen_s[silent] = desk.ctx.members.t_remove_s - 0.1
    assert silent in next_voters(desk)
    desk.unseen_s[silent] += 0.2
    assert silent not in next_voters(desk)
    desk.unseen_s[silent] = 0.0
    desk.gone.add(silent)
    assert silent not in next_voters(desk), "that is proved"


def test_half_or_less_that_rank_anew_go_on_without_the_dead(desk: Desk) -> None:
    """Else the casting vote might be given to one of them. A config entry keeps the ranks."""
    one, two, three = desk.others
    desk.dead = {one, two}
    assert next_voters(desk, anew=True) == {desk.me, three}
    assert next_voters(desk) == set(desk.voters)
    desk.dead = {one}
    assert next_voters(desk, anew=True) == set(desk.voters)
    entry = desk.agenda._entry
    desk.dead = {one, two}
    grid = msg.GridSpec(8, 8, "fp32")
    assert len(entry(ROUND, TRAIN, 1, (), grid, b"", 0).electorate) == 2
    assert len(entry(CONFIG, "", 0, (), grid, b"", 0).electorate) == 4


def test_a_newcomer_gets_a_vote_where_it_lives_and_stands_here_in_step(desk: Desk) -> None:
    newcomer = desk.others[0]
    desk.state(electorate=tuple(v for v in desk.voters if v != newcomer))
    desk.says(newcomer, head=desk.log.head, synced=True)
    right = desk.records[newcomer]
    assert newcomer in next_voters(desk)
    for why in ({"role": OBSERVER}, {"synced": False}, {"head": A}):
        desk.says(newcomer, **why)
        assert newcomer not in next_voters(desk), why
        desk.records[newcomer] = right
    for lost in (desk.dead, desk.gone):
        lost.add(newcomer)
        assert newcomer not in next_voters(desk)
        lost.clear()


def test_of_two_processes_of_a_peer_the_newer_votes_and_helpers_do_not_train(desk: Desk) -> None:
    one, two, three = desk.others
    newer = Voter(one.peer, one.inc + 1)
    desk.records[newer] = dataclasses.replace(desk.records[one], voter=newer, head=desk.log.head, synced=True)
    desk.says(two, role=HELPER)
    del desk.records[three]  # nobody has told of it yet
    electorate, trainers = next_electorate(desk.ctx, desk.log, None, desk.agenda.recent())
    assert set(electorate) == {desk.me, newer, two, three}
    assert set(trainers) == {desk.me, newer, three}


def test_a_newcomer_may_lag_by_some_entries_or_some_seconds(desk: Desk) -> None:
    agenda, ctx = desk.agenda, desk.ctx
    agenda._heads.clear()
    heads = [bytes([i]) * 32 for i in range(1, NEWCOMER_LAG_MAX + 4)]
    for number, head in enumerate(heads):
        agenda._heads.append((ctx.now + number, head))
    desk.state(head=heads[-1])
    ctx.now += len(heads) + 100.0
    assert agenda.recent() == set(heads[-1 - NEWCOMER_LAG_MAX :])
    ctx.now = agenda._heads[1][0] + NEWCOMER_LAG_S - 0.1  # the first head was left when the second came
    assert agenda.recent() == set(heads)
    ctx.now += 0.2
    assert agenda.recent() == set(heads[1:])


def test_the_electorate_is_brought_up_to_date_when_it_is_not_and_the_slot_has_settled(desk: Desk) -> None:
    agenda, ctx = desk.agenda, desk.ctx
    settle_s = ctx.members.timeouts.slot_settle_s
    leaver = desk.others[0]
    ctx.now += settle_s + 0.1
    assert agenda._config() is None, "nothing has changed"
    desk.gone.add(leaver)
    draft = agenda._config()
    assert draft is not None and draft.entry.kind == CONFIG and leaver not in draft.entry.electorate
    ctx.now -= 0.2
    assert agenda._config() is None
    ctx.now += 0.2
    desk.gone.clear()
    ledger = desk.log.state.ledger
    desk.state(ledger=dataclasses.replace(ledger, leases=ledger.leases[1:]))
    assert agenda._config() is not None, "a trainer without a lease gets one"
    desk.state(ledger=dataclasses.replace(ledger, length=0, leases=()))
    assert agenda._config() is None, "where there are any"


# ------------------------------------------------------------------ the mute


def test_a_mute_peer_is_tried_again_after_twice_as_long_each_time(desk: Desk) -> None:
    agenda, ctx, mute = desk.agenda, desk.ctx, desk.others[0]
    waits_s = []
    for _ in range(7):
        ctx.out.clear()
        agenda.silent([mute])
        assert len(ctx.out) == 1 and agenda.mute() == {mute}
        agenda.silent([mute])
        assert len(ctx.out) == 1, "it is told once"
        waits_s.append(agenda._mute_until[mute] - ctx.now)
        ctx.now += waits_s[-1]
        assert not agenda.mute()
    assert waits_s == pytest.approx([min(MUTE_S * 2**i, MUTE_S_MAX) for i in range(7)])


def test_a_peer_that_is_mute_now_and_then_is_tried_again_soon_and_one_that_is_gone_is_forgotten(desk: Desk) -> None:
    agenda, ctx, (mute, once, *_) = desk.agenda, desk.ctx, desk.others
    agenda.silent([once])
    for _ in range(7):
        agenda.silent([mute])
        ctx.now += MUTE_S + 1
        assert not agenda.mute()
        agenda.silent([mute])
        ctx.now += MUTE_S + 1
        assert agenda.mute() == {mute}
        ctx.now += MUTE_S_MAX + MUTE_S
    assert set(agenda._mute_until) == {mute} == set(agenda._mute_s)
