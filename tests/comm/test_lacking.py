"""Peers that lack the state of one channel and hold that of another, and what they give each other meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from dlc.comm import imageoffers
from dlc.comm import messages as msg
from dlc.comm.effects import Effect, Send
from dlc.comm.entries import CONFIG, EMPTY, OPEN, ROUND, ChannelState, Entry, LogState
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.images import PieceLimits
from dlc.comm.ledger import Ledger
from dlc.comm.log import HISTORY_PINNED_MAX, HISTORY_ROUNDS_MAX, Attached, Log, Past
from dlc.comm.records import STATES_MAX
from dlc.errors import CheckpointError, ProtocolError
from dlc.sim.invariants import Checker
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import ToyState
from dlc.sim.world import Process, World
from tests.comm.test_sync import PIECE, swarm, synced, until

ASKER = Voter("q", 1)


def answer(donor: Process, head: bytes, depth: int, snapshot: bool = True) -> list[Any]:
    """What this asker is sent at once, or when what it asked for is ready."""
    donations = donor.node.sync.donations
    donor.node.ctx.out = []
    donations.receive_request(ASKER, msg.SyncReq(head, depth, snapshot, ()))
    for _ in range(100):
        donations._work()
    return [effect.message for effect in donor.node.ctx.out]  # type: ignore[union-attr]


def one_round_later(world: World, process: Process) -> tuple[bytes, int]:
    """Where its log stood before its last round of training, which is the last entry."""
    state = process.node.log.state
    until(world, lambda: process.node.log.state.depth > state.depth and process.node.log.past[-1].entry.kind == ROUND)
    last = process.node.log.past[-1].entry
    return last.parent, last.depth - 1


@pytest.mark.parametrize("never", [False, True], ids=["lacks it", "has no use for it"])
def test_who_gives_no_state_makes_nobody_leave_its_own_behind(never: bool) -> None:
    """Whoever jumped to its head would hold a state of one round earlier, which perhaps nobody else has."""
    world = swarm(2)
    donor = world.running()[0]
    before = one_round_later(world, donor)
    log = donor.node.log
    assert [type(m) for m in answer(donor, *before)] == [msg.Offer]
    log.attached[TRAIN].synced = False
    if never:
        del log.attached[TRAIN]
    (steps,) = answer(donor, *before)
    assert isinstance(steps, msg.Steps) and [s.entry.depth for s in steps.steps] == [log.state.depth]
    (offer,) = answer(donor, log.head, log.state.depth)
    assert isinstance(offer, msg.Offer) and not offer.images, "nothing is lost by who stands at the same head"


def test_a_state_that_is_found_to_be_wrong_is_given_to_nobody_any_more() -> None:
    """Who had asked for it before was offered it still, when the others had gone on, and nobody spoke against it."""
    world = swarm(2)
    donor = world.running()[0]
    donations = donor.node.sync.donations
    donations.limits = PieceLimits(PIECE, hash_pieces=1, copy_pieces=1)
    donations.receive_request(ASKER, msg.SyncReq(EMPTY, 0, True, ()))
    (key,) = donations._images
    assert donations._pending
    donor.node.ctx.out = []
    donor.node.applier.diverged(TRAIN, b"")
    donations.receive_piece_request(ASKER, msg.PieceReq(TRAIN, key[1], (0,)))
    told = [type(e.message) for e in donor.node.ctx.out if isinstance(e, Send) and e.to == ASKER.peer]
    assert told == [msg.NoOffer, msg.NoPiece] and not donations._images and not synced(donor)


def opening(world: World, process: Process) -> Past:
    """Let a process stand just after the opening of its channel, without the state that opened it."""
    log = process.node.log
    first = ToyState(world.grids[TRAIN].numel, 0).digest()
    entry = dataclasses.replace(
        log.past[-1].entry, kind=OPEN, parent=bytes(31) + b"1", channel=TRAIN, digest=first, manifest=b"", roster=()
    )
    log.past[-1] = Past(entry, (), ())
    log.attached[TRAIN].synced = False
    return log.past[-1]


def offered(process: Process, past: Past, digest: bytes) -> msg.Offer:
    """By somebody who stands before the opening."""
    log = process.node.log
    before, depth = past.entry.parent, past.entry.depth - 1
    state = dataclasses.replace(log.state, head=before, depth=depth, tokens=0.0, channels=(), ledger=Ledger())
    n_bytes = log.attached[TRAIN].state.image_bytes()
    pieces = tuple(bytes(32) for _ in range(-(-n_bytes // PIECE)))
    return msg.Offer(state, (before,), (0.0,), (msg.ImageOffer(TRAIN, digest, n_bytes, PIECE, pieces),))


@pytest.mark.parametrize("first", [True, False])
def test_a_first_state_that_its_opening_has_overtaken_is_what_is_lacking_and_no_other(first: bool) -> None:
    """It was thrown away once it had come; and another one, of no use, was asked for again and again at once."""
    world = swarm(2, inner_s=0.2)
    process, other = world.running()
    log, members = process.node.log, process.node.members
    until(world, lambda: any(r.head == log.head for r in members.records() if r.voter == other.voter))
    past = opening(world, process)
    sync = process.node.sync
    sync._abandon()
    sync._asked, sync.donor = {other.voter: world.now}, other.voter
    process.node.ctx.out = []
    sync.receive_offer(other.voter, offered(process, past, past.entry.digest if first else bytes(32)))
    asked = [type(e.message) for e in process.node.ctx.out if isinstance(e, Send)]
    assert asked == ([msg.PieceReq] if first else []) and sync.donor == (other.voter if first else None)


def test_a_first_state_is_asked_of_those_who_lack_another_one_too() -> None:
    """No record tells of first states, and theirs say that they are not in step."""
    world = swarm(2)
    one, other = world.running()
    until(world, lambda: one.node.log.head == other.node.log.head)
    record = next(r for r in one.node.members.records() if r.voter == other.voter)
    one.node.members.records = lambda: [  # type: ignore[method-assign]
        dataclasses.replace(record, head=one.node.log.head, synced=False, states=())
    ]
    sync = one.node.sync
    assert sync._holders(["second"]) == []
    sync.offers.first_states = {"second": bytes(32)}
    assert sync._holders(["second"]) == [other.voter]
    sync.offers.first_states = {}
    full = tuple(msg.StateDigest(f"a{i:03}", bytes(32)) for i in range(STATES_MAX))
    one.node.members.records = lambda: [  # type: ignore[method-assign]
        dataclasses.replace(record, head=one.node.log.head, synced=False, states=full)
    ]
    assert sync._holders(["second"]) == [other.voter], "its record has room for no more channels"


def test_what_one_pin_is_too_old_to_keep_is_dropped_and_no_more() -> None:
    """One state waited for, and another given meanwhile: with the 257th entry both lost theirs."""
    log, heads = Log(), [bytes([i % 251, 1 + i // 251]) * 16 for i in range(2 * HISTORY_PINNED_MAX)]
    entry = Entry(CONFIG, EMPTY, 1, "", 0, (), (), (), 0, 0, "", b"", b"", 0)
    log.pin("taken", heads[0])
    log.pin("given", heads[240])
    for i in range(HISTORY_PINNED_MAX + 1):
        log.past.append(Past(dataclasses.replace(entry, parent=heads[i], depth=i + 1), (), ()))
        log._trim()
    assert log.after(heads[0]) is None and log.after(heads[240]) is not None
    log.pin("given", b"")
    assert len(log.past) == HISTORY_ROUNDS_MAX


def test_many_rounds_that_follow_an_image_are_one_piece_of_work() -> None:
    """Each by itself was short enough to be done while nobody was answered."""
    world = swarm(1, inner_s=0.2)
    log = world.running()[0].node.log
    log.pin("given", log.head)
    head, depth = log.head, log.state.depth
    world.running()[0].node.sync.donations.tick = lambda: None  # type: ignore[method-assign]
    attached = log.attached[TRAIN]
    older = ToyState(attached.grid.numel, 0)
    older.restore(memoryview(bytearray(attached.state.export())))
    until(world, lambda: log.state.depth > depth + 20)
    late = Log(state=LogState())
    late.attached[TRAIN] = dataclasses.replace(attached, state=older, digest=older.digest(), synced=True)
    sizes: list[int] = []

    def at_length(work: Any, size_bytes: int) -> None:
        sizes.append(size_bytes)
        work()

    late.at_length = at_length
    later = log.after(head)
    assert later is not None
    late.follow(TRAIN, later)
    rounds = sum(past.entry.kind == ROUND for past in later)
    assert sizes == [rounds * older.image_bytes()] and rounds > 15
    assert late.attached[TRAIN].digest == attached.digest == older.digest()


def test_rounds_before_a_channel_was_opened_are_not_of_its_state() -> None:
    state = ToyState(8, 0)
    log = Log()
    log.attached["x"] = Attached(state, 0, Grid(8, 8, "fp32"), False, state.digest())
    stateless = Entry(ROUND, EMPTY, 1, "x", 1, (), (), (), 8, 8, "fp32", b"", b"", 0)
    opening = dataclasses.replace(stateless, kind=OPEN, t=0, digest=state.digest())
    log.follow("x", [Past(stateless, (), ()), Past(opening, (), ())])
    assert log.attached["x"].synced


class Elsewhere(ToyState):
    """Of another kind, as its image says."""

    def restore(self, image: memoryview) -> None:
        raise CheckpointError("another outer optimizer")


class Fed:
    """A process that is given an offer, and all of its pieces, by another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = swarm(2, inner_s=0.5)
        self.process, self.other = self.world.running()
        self.log, self.sync = self.process.node.log, self.process.node.sync
        until(self.world, lambda: self.other.node.log.head == self.log.head and self.log.state.depth > 3)
        self.train = self.log.attached[TRAIN]
        self.numel = self.train.grid.numel
        monkeypatch.setattr(self.sync, "start", lambda hint=None: None)

    def attach(self, channel: str, state: ToyState) -> None:
        self.log.attached[channel] = Attached(state, 0, self.train.grid, digest=state.digest())

    def offer(self, state: LogState, *states: tuple[str, ToyState]) -> bool:
        """Whether it is taken."""
        images, self._pieces = [], list[msg.Piece]()
        for channel, given in states:
            whole, digest = bytes(given.export()), given.digest()
            parts = [whole[at : at + PIECE] for at in range(0, len(whole), PIECE)]
            hashes = tuple(blake3(part).digest() for part in parts)
            images.append(msg.ImageOffer(channel, digest, len(whole), PIECE, hashes))
            self._pieces += [msg.Piece(channel, digest, i, part) for i, part in enumerate(parts)]
        here = state.head == self.log.head
        chain = tuple(self.log.chain) if here else (*self.log.chain, state.head)
        totals = tuple(self.log.totals) if here else (*self.log.totals, state.tokens)
        voter = self.other.voter
        self.sync._abandon()
        self.sync._asked, self.sync.donor = {voter: self.world.now}, voter
        self.sync.receive_offer(voter, msg.Offer(state, chain, totals, tuple(images)))
        return self.sync._download is not None

    def give(self) -> None:
        for piece in self._pieces:
            self.sync.receive_piece(self.other.voter, piece)
        while self.sync._download is not None:
            self.sync._download.verify()
            self.sync._finish_if_complete()


@pytest.mark.parametrize("order", [1, -1])
def test_a_state_that_has_come_is_taken_though_another_channel_was_opened_meanwhile(
    monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    """The other one's first state was in the offer, and not asked for: for want of it the first was thrown away."""
    fed = Fed(monkeypatch)
    right = fed.train.state.copy()  # type: ignore[attr-defined]
    fed.attach("second", ToyState(fed.numel, 5))
    fed.train.state.flip()  # type: ignore[attr-defined]
    fed.train.digest, fed.train.synced = fed.train.state.digest(), False
    his = ToyState(fed.numel, 9)
    fed.log.pin("taken", fed.log.head)
    assert fed.offer(fed.log.state, *((TRAIN, right), ("second", his))[::order])
    opening = dataclasses.replace(
        fed.log.past[-1].entry, kind=OPEN, parent=fed.log.head, depth=fed.log.state.depth + 1, channel="second", t=0,
        roster=(), manifest=b"", digest=his.digest(), lease_len=0,
    )  # fmt: skip
    Log.commit(fed.log, opening, (), (), None)  # the simulation looks on, and nobody has decided this
    fed.give()
    assert fed.train.synced and fed.train.state.digest() == right.digest()
    assert fed.sync.offers.unsynced() == ["second"]


def test_of_an_offer_that_cannot_be_taken_no_state_is_called_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is greater, and two of its states are of another kind than mine, which shows one by one: the third
    had come to stand at its head with the first offer, and was called in step with mine by the second."""
    fed = Fed(monkeypatch)
    state = fed.log.state
    newer = fed.train.state.copy()  # type: ignore[attr-defined]
    newer.theta += 1
    newer.t += 1
    channels = {known.name: known for known in state.channels}
    for name in ("x1", "x2"):
        fed.attach(name, Elsewhere(fed.numel, 5))
        channels[name] = ChannelState(name, bytes(32), 3, fed.numel, 8, "fp32", True, False)
    channels[TRAIN] = dataclasses.replace(channels[TRAIN], base=b"n" * 32, t=channels[TRAIN].t + 1)
    ahead = dataclasses.replace(
        state, head=b"\1" * 32, depth=state.depth + 1, tokens=state.tokens + 5,
        channels=tuple(channels[name] for name in sorted(channels)),
    )  # fmt: skip
    for _ in range(2):
        assert fed.offer(ahead, (TRAIN, newer), ("x1", ToyState(fed.numel, 7)), ("x2", ToyState(fed.numel, 8)))
        fed.give()
        assert fed.log.head == state.head and not fed.train.synced
    assert all(fed.log.attached[name].misfit for name in ("x1", "x2"))


def second(fed: Fed) -> tuple[LogState, ToyState]:
    """Open another channel in the log of who is fed, which holds its state."""
    fed.attach("second", his := ToyState(fed.numel, 5))
    fed.log.attached["second"].synced = True
    known = ChannelState("second", b"s" * 32, 3, fed.numel, 8, "fp32", True, False)
    fed.log.state = dataclasses.replace(fed.log.state, channels=(known, *fed.log.state.channels))
    return fed.log.state, his


def test_who_lacks_one_state_gives_the_others_to_those_who_are_far_behind() -> None:
    """Two held the state that it lacked, slept, and woke when the entries between were kept no longer: it gave them
    nothing, and so nobody gave it what it lacked."""
    world = swarm(2)
    donor = world.running()[0]
    log, before = donor.node.log, donor.node.log.head
    until(world, lambda: log.after(before) is None)
    log.attached["second"] = Attached(ToyState(8, 0), 0, log.attached[TRAIN].grid)
    known = ChannelState("second", b"s" * 32, 3, 8, 8, "fp32", True, False)
    log.state = dataclasses.replace(log.state, channels=(known, *log.state.channels))
    (offer,) = answer(donor, before, 1, snapshot=False)
    assert isinstance(offer, msg.Offer) and [image.channel for image in offer.images] == [TRAIN]
    log.attached[TRAIN].synced = False
    assert [type(m) for m in answer(donor, before, 1, snapshot=False)] == [msg.NoOffer], "it has nothing to give"


@pytest.mark.parametrize("rounds", [0, 1])
def test_an_offer_without_a_state_that_is_held_here_is_taken_where_that_state_stays(
    monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    fed = Fed(monkeypatch)
    state, his = second(fed)
    newer = fed.train.state.copy()  # type: ignore[attr-defined]
    newer.theta += 1
    (known,) = (c for c in state.channels if c.name == "second")
    moved = dataclasses.replace(known, base=b"t" * 32, t=known.t + 1) if rounds else known
    channels = (moved, *(c for c in state.channels if c.name != "second"))
    ahead = dataclasses.replace(
        state, head=b"\1" * 32, depth=state.depth + 1, tokens=state.tokens + 5, channels=channels
    )
    assert fed.offer(ahead, (TRAIN, newer)) == (not rounds)
    if not rounds:
        fed.give()
        assert fed.log.head == ahead.head and fed.train.digest == newer.digest()
    assert fed.log.holds("second") and fed.log.digest("second") == his.digest()
    if rounds:  # nobody has shown it those rounds for as long as the silent may stand in the way
        fed.process.node.ctx.running_s += fed.process.node.members.t_evict_s
        assert fed.offer(ahead, (TRAIN, newer))
        fed.give()
        assert fed.log.head == ahead.head and not fed.log.holds("second")


def ahead_of(fed: Fed) -> tuple[LogState, ToyState]:
    """A greater history, and its state of the training."""
    newer = fed.train.state.copy()  # type: ignore[attr-defined]
    newer.theta += 1
    state = fed.log.state
    return dataclasses.replace(state, head=b"\1" * 32, depth=state.depth + 1, tokens=state.tokens + 5), newer


def test_a_state_that_most_who_stand_there_deny_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its donor does not know yet that it is wrong."""
    fed = Fed(monkeypatch)
    state, newer = ahead_of(fed)
    members = fed.process.node.members
    (record,) = (r for r in members.records() if r.voter == fed.other.voter)
    told: list[bytes] = []

    def records() -> list[msg.Record]:
        return [dataclasses.replace(record, voter=Voter(f"q{i}", 1)) for i in range(len(told))]

    monkeypatch.setattr(members, "records", records)
    monkeypatch.setattr(imageoffers, "told_digest", lambda r, head, channel: told[int(r.voter.peer[1:])])
    for told[:], taken in (([bytes(32)], False), ([bytes(32), newer.digest()], True), ([b""], True)):
        assert fed.offer(state, (TRAIN, newer)) == taken, told


def test_at_an_equal_head_only_what_is_lacking_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state that both hold one is wrong: a round will show which."""
    fed = Fed(monkeypatch)
    state, _ = second(fed)
    lacked, mine = fed.log.attached["second"], fed.train.digest
    lacked.synced = False
    wrong = fed.train.state.copy()  # type: ignore[attr-defined]
    wrong.flip()
    assert fed.offer(state, (TRAIN, wrong), ("second", his := ToyState(fed.numel, 9)))
    fed.give()
    assert fed.train.synced and fed.train.digest == fed.train.state.digest() == mine
    assert lacked.synced and lacked.digest == lacked.state.digest() == his.digest()


def test_a_state_from_which_no_entries_lead_here_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log went on for longer than its history is kept, while the image was on its way."""
    fed = Fed(monkeypatch)
    right = fed.train.state.copy()  # type: ignore[attr-defined]
    fed.train.state.flip()  # type: ignore[attr-defined]
    fed.train.digest, fed.train.synced = fed.train.state.digest(), False
    assert fed.offer(fed.log.state, (TRAIN, right))
    fed.log.state, _ = ahead_of(fed)
    fed.log.past.clear()
    fed.give()
    assert not fed.train.synced and fed.train.state.digest() != right.digest() and not fed.sync.busy


def test_an_offer_that_cannot_be_is_not_taken_nor_one_that_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed = Fed(monkeypatch)
    state, newer = ahead_of(fed)
    sync, voter = fed.sync, fed.other.voter
    assert fed.offer(state, (TRAIN, newer))
    assert sync._download is not None
    offer, short = sync._download.offer, dataclasses.replace(sync._download.offer, totals=(0.0,))
    small = (dataclasses.replace(image, piece_bytes=1) for image in offer.images)  # it would be asked for byte by byte
    bad = dataclasses.replace(offer, images=tuple(small))
    for asked, given in (({}, offer), ({voter: 0.0}, short), ({voter: 0.0}, bad)):
        sync._abandon()
        sync._asked, sync.donor = dict(asked), voter
        sync.receive_offer(voter, given)
        assert sync._download is None and (sync.donor is None) == bool(asked)
    sync.offers.bad.add((voter, offer.images[0].digest))
    sync.receive_offer(voter, offer)
    assert sync._download is None, "that digest was found to be wrong"
    sync.offers.bad.clear()
    sync.receive_offer(voter, offer)
    assert sync._download is not None


def test_an_offer_of_two_states_of_one_channel_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the second were taken in the name of the first, and called in step with the next offer."""
    fed = Fed(monkeypatch)
    state, newer = ahead_of(fed)
    other, mine = newer.copy(), fed.train.digest
    other.flip()
    taken = fed.offer(state, (TRAIN, newer), (TRAIN, other))
    if taken:
        fed.give()
    assert fed.train.digest == fed.train.state.digest(), "it holds other bits than it says"
    assert not taken and fed.train.digest == mine
    assert fed.offer(state, (TRAIN, newer))


def test_what_the_donor_does_not_hold_is_not_called_in_step_after_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came to be in step here while the other image was on its way."""
    fed = Fed(monkeypatch)
    state, _ = second(fed)
    mine = fed.log.attached["second"]
    mine.synced = False
    moved = tuple(dataclasses.replace(c, base=b"t" * 32) if c.name == "second" else c for c in state.channels)
    ahead, newer = ahead_of(fed)
    ahead = dataclasses.replace(ahead, channels=moved)
    assert fed.offer(ahead, (TRAIN, newer))
    mine.synced = True
    fed.give()
    assert fed.log.head == ahead.head and fed.train.synced and not mine.synced


def test_a_state_that_is_replaced_is_told_of_and_set_aside_where_it_was_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed = Fed(monkeypatch)
    sync, train, done = fed.sync, fed.train, list[str]()
    monkeypatch.setattr(fed.log, "before_change", lambda channel: done.append("told"))
    monkeypatch.setattr(sync.donations, "keep", lambda channel: done.append("kept"))
    for accepted, expected in ((bytes(32), ["told"]), (train.digest, ["kept", "told"])):
        done.clear()
        train.passed.append((bytes(32), train.digest))
        monkeypatch.setattr(sync, "accepted_first", lambda accepted=accepted: accepted)
        assert sync._replace(train, TRAIN, memoryview(bytearray(train.state.export())), train.digest)
        assert done == expected and not train.passed


@pytest.mark.parametrize("gone", [False, True], ids=["two say so", "the others are gone"])
def test_a_size_is_believed_of_two_or_where_there_is_nobody_else(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    fed = Fed(monkeypatch)
    donor = fed.other.voter
    (record,) = (r for r in fed.process.node.members.records() if r.voter == donor)
    here = [record, dataclasses.replace(record, voter=Voter("q0", 1))]
    monkeypatch.setattr(imageoffers, "alive_records", lambda ctx: here)
    monkeypatch.setattr(imageoffers, "told_digest", lambda record, head, channel: bytes(32))
    image = msg.ImageOffer(TRAIN, b"i" * 32, 7, PIECE, (b"p" * 32,))
    fed.sync.offers._another_size(donor, image, fed.log.head)
    fed.sync.offers._another_size(donor, image, fed.log.head)
    assert not fed.train.misfit and not fed.sync.offers.bad, "of that size, too, a state may be brought here yet"
    if gone:
        here.pop()
    fed.sync.offers._another_size(donor if gone else Voter("q0", 1), image, fed.log.head)
    assert fed.train.misfit and not fed.train.synced and not fed.sync.offers.unsynced(), "no other could help"


FALSE_STATES: dict[str, Callable[[LogState], dict[str, Any]]] = {
    "another depth": lambda s: {"depth": s.depth - 1},
    "other tokens": lambda s: {"tokens": s.tokens + 1.0},
    "another head": lambda s: {"head": bytes(32)},
    "nobody votes": lambda s: {"electorate": (), "trainers": ()},
    "trainers without a vote": lambda s: {"trainers": (*s.trainers, Voter("stranger", 1))},
    "a vector of no elements": lambda s: {"channels": (dataclasses.replace(s.channels[0], numel=0),)},
    "a codec that there is not": lambda s: {"channels": (dataclasses.replace(s.channels[0], codec="none such"),)},
    "a channel twice": lambda s: {"channels": (*s.channels, *s.channels)},
    "leases of no channel": lambda s: {"channels": (dataclasses.replace(s.channels[0], leased=False),)},
    "a block leased twice": lambda s: {"ledger": dataclasses.replace(s.ledger, pool=s.ledger.leases[0].ranges)},
    "blocks that were never given out": lambda s: {"ledger": dataclasses.replace(s.ledger, next=0)},
}


@pytest.mark.parametrize("how", FALSE_STATES)
def test_an_offered_log_that_no_entries_can_have_made_is_not_taken(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whoever took it understood no entry that follows, and the run waited for it without end."""
    fed = Fed(monkeypatch)
    state, newer = ahead_of(fed)
    assert fed.offer(state, (TRAIN, newer))
    sync, voter, offer = fed.sync, fed.other.voter, fed.sync._download.offer  # type: ignore[union-attr]
    sync._abandon()
    sync._asked, sync.donor = {voter: fed.world.now}, voter
    sync.receive_offer(voter, dataclasses.replace(offer, state=dataclasses.replace(state, **FALSE_STATES[how](state))))
    assert sync._download is None and sync.donor is None


def test_an_offered_log_is_not_taken_of_whose_record_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long log the chain tells only the newest entries: any depth might be."""
    fed = Fed(monkeypatch)
    state, newer = ahead_of(fed)
    members = fed.process.node.members
    record = members.record(fed.other.voter.peer)
    assert record is not None
    for depth, taken in ((state.depth, True), (state.depth + 1, False)):
        told = dataclasses.replace(record, head=state.head, depth=depth, tokens=state.tokens, states=())
        monkeypatch.setattr(members, "record", lambda peer, told=told: told)
        assert fed.offer(state, (TRAIN, newer)) == taken


@pytest.mark.parametrize("needed", [False, True])
def test_whose_own_log_is_wrong_takes_another_and_trains_on(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refused what follows its head, of everybody, for ever; and those who needed its vote decided nothing more."""
    world = swarm(4 if needed else 3)
    checker = world.checker
    world.checker = Silent()  # type: ignore[assignment]
    for peer in world.running():
        peer.node.receive = driven(peer)  # type: ignore[method-assign]
    one = world.running()[0]
    until(world, lambda: len({p.node.log.head for p in world.running()}) == 1)
    if needed:  # none of the two halves that do not understand each other has a quorum
        world.crash(next(p for p in world.running() if p.voter == one.node.log.state.rank0))
    one, *wrong = world.running()[1 - needed :]
    for process in wrong:
        log = process.node.log
        log.state = dataclasses.replace(log.state, depth=log.state.depth - 2)
        process.node.ctx.record_due = True

    judge_no_slot_that_was_planned_twice(checker, monkeypatch)
    t = one.node.log.state.round_of(TRAIN)
    until(world, lambda: all(p.node.log.state.round_of(TRAIN) > t + 3 for p in world.running()), 60.0)
    assert all(map(synced, world.running()))


def judge_no_slot_that_was_planned_twice(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose log was spoilt by hand plans in a ballot once with that, and once with the log that it took: members vote
    there for the results of either. All other slots are judged, as peers ask this checker whatever the world's is."""
    sent, decided, spoilt = checker._sent, checker._check_decided, set[bytes]()

    def judged(process: Process, m: msg.Message) -> None:
        if isinstance(m, msg.Plan) and m.entry.depth != checker.states[m.head].depth + 1:
            spoilt.add(m.head)
        if not (isinstance(m, msg.Plan | msg.Held) and m.head in spoilt):
            sent(process, m)

    monkeypatch.setattr(checker, "_sent", judged)
    monkeypatch.setattr(checker, "_check_decided", lambda p, entry: entry.parent in spoilt or decided(p, entry))


def driven(process: Process) -> Callable[[Voter, msg.Message, float], list[Effect]]:
    """What it does with a message in its driver, which drops what no correct peer sends."""
    receive = process.node.receive

    def received(sender: Voter, message: msg.Message, now: float) -> list[Effect]:
        try:
            return receive(sender, message, now)
        except ProtocolError:
            return []

    return received


class Silent:
    """A checker that has no say: what a peer holds was spoilt by hand."""

    corrupt = frozenset[Process]()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: None
